"""Which sequences are trained together. PURE.

Invariants of a plan, a list of micro-batches per data-parallel rank:
1. Every sequence is in exactly one micro-batch.
2. Every rank has the same number of micro-batches, a multiple of `multiple_of`.
3. No micro-batch holds more tokens than its capacity, that of all context-parallel ranks together.
4. Micro-batches are empty only if there are fewer sequences; as few as can be, the last ones,
   which run as padding of weight 0.
5. Micro-batches differ by at most the longest sequence, and so do the ranks' sums; the n-th of all ranks are neighbours
   in size.
6. Equal arguments give equal plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from specactor.errors import ConfigError
from specactor.types import TrainSequence


def padded_len(length: int, multiple: int) -> int:
    """Return `length`, rounded up for context and sequence parallelism."""
    return -(-length // multiple) * multiple


def balance(lengths: Sequence[int], ranks: int, capacity: int, *, multiple_of: int = 1) -> list[list[list[int]]]:
    """Return per data-parallel rank its micro-batches; per micro-batch, ascending indices into `lengths`: tokens of
    each sequence as packed (`padded_len`), 1 or more.

    The longest sequence goes first, each into the emptiest micro-batch (Graham's LPT rule, SIAM J. Appl. Math. 17,
    1969). Raises ConfigError for a sequence longer than a micro-batch.
    """
    _check_lengths(lengths, capacity)
    per_rank = padded_len(max(1, -(-_fewest_bins(lengths, capacity) // ranks)), multiple_of)
    while (bins := _pack(lengths, ranks * per_rank, capacity)) is None:
        per_rank += multiple_of  # ends: with a micro-batch for every sequence the rule fits
    return _deal(bins, lengths, ranks)


def _check_lengths(lengths: Sequence[int], capacity: int) -> None:
    for i, length in enumerate(lengths):
        if length > capacity:
            raise ConfigError.at(
                "train.tokens_per_microbatch x parallel.context",
                capacity,
                f">= {length}, the packed length of sequence {i}",
                "Raise one of them, or shorten prompts and responses.",
            )


def _fewest_bins(lengths: Sequence[int], capacity: int) -> int:
    bound = -(-sum(lengths) // capacity)
    for k in range(1, 9):  # of items longer than capacity / (k+1), a bin holds at most k
        large = sum(1 for length in lengths if length * (k + 1) > capacity)
        bound = max(bound, -(-large // k))
    return bound


def _pack(lengths: Sequence[int], num_bins: int, capacity: int) -> list[list[int]] | None:
    """Return each bin's sequences by the LPT rule; None when one does not fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]  # (tokens, bin): ties go to the first bin
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, b = heap[0]
        if tokens + lengths[i] > capacity:
            return None
        bins[b].append(i)
        heapq.heapreplace(heap, (tokens + lengths[i], b))
    return [sorted(members) for members in bins]


def _deal(bins: list[list[int]], lengths: Sequence[int], ranks: int) -> list[list[list[int]]]:
    """Deal rounds of the largest bins left, the larger to the rank with fewer tokens so far."""

    def tokens(members: list[int]) -> int:
        return sum(lengths[i] for i in members)

    largest_first = sorted(bins, key=lambda members: (-tokens(members), members))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for start in range(0, len(bins), ranks):
        neediest_first = sorted(range(ranks), key=lambda r: (load[r], r))
        for rank, members in zip(neediest_first, largest_first[start : start + ranks], strict=True):
            plan[rank].append(members)
            load[rank] += tokens(members)
    return plan


def checked(sequences: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
    """Return the argument, whose sequences have a prompt, and parts of one length."""
    for s in sequences:
        assert 1 <= s.prompt_len <= len(s.token_ids), "the first token of a sequence cannot be learned"
        for values in (s.rollout_logprobs, s.loss_mask):
            assert not values or len(values) == s.response_len, f"{len(values)} values of {s.response_len} tokens"
    return sequences


def split(sequences: Sequence[TrainSequence], updates: int) -> list[Sequence[TrainSequence]]:
    """Split whole groups, in order of appearance, into at most `updates` nearly equal shares."""
    if updates == 1:
        return [sequences]
    groups = list(dict.fromkeys(s.group_id for s in sequences))
    updates = min(updates, len(groups))
    bounds = [round(i * len(groups) / updates) for i in range(updates + 1)]
    shares = [set(groups[start:end]) for start, end in pairwise(bounds)]
    return [[s for s in sequences if s.group_id in share] for share in shares]
