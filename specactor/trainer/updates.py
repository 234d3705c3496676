"""Which sequences an optimizer update learns from, and whether they can be learned from. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from specactor.errors import DataError
from specactor.types import TrainSequence


def checked(sequences: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
    """The argument. Raises DataError for a sequence without prompt, or with too few log-probabilities."""
    for i, s in enumerate(sequences):
        if not 1 <= s.prompt_len <= len(s.token_ids):
            raise DataError(
                f"sequence {i}: got a prompt of {s.prompt_len} in {len(s.token_ids)} tokens, expected 1 to all of "
                "them. The first token of a sequence cannot be learned."
            )
        if s.rollout_logprobs and len(s.rollout_logprobs) != s.response_len:
            raise DataError(
                f"sequence {i}: got {len(s.rollout_logprobs)} rollout log-probabilities, expected one for each of its "
                f"{s.response_len} response tokens. Leave them all out, or give every one."
            )
    return sequences


def split(sequences: Sequence[TrainSequence], updates: int) -> list[Sequence[TrainSequence]]:
    """Groups in order of appearance, in `updates` shares of nearly equal numbers of groups; no group is torn."""
    if updates == 1:
        return [sequences]
    groups = list(dict.fromkeys(s.group_id for s in sequences))
    if len(groups) < updates:
        raise DataError(
            f"train.updates_per_step: got {updates}, expected at most {len(groups)} groups in the step. Lower it."
        )
    bounds = [round(i * len(groups) / updates) for i in range(updates + 1)]
    shares = [set(groups[start:end]) for start, end in pairwise(bounds)]
    return [[s for s in sequences if s.group_id in share] for share in shares]
