"""Drafts what most often followed the longest n-gram that ends the text, in earlier text of the request, its group
(equal prompts) and others (SuffixDecoding, arXiv 2411.04975; DAS, arXiv 2511.13841).

Invariants: a draft has at most `TOKENS_PER_MATCH` tokens per matching one; `max_tokens` are held, of which the oldest
half goes; equal calls draft equally; a new policy changes nothing.

Shape legend: P new tokens, B requests, N longest n-gram, K kinds of n-grams, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from specactor.rollout.speculation.drafter import Drafter, DraftSequence

TOKENS_PER_MATCH = 2
"""Of 1, 1.5, 2, 3 and no bound, the fastest or within 1 % of it where a draft token costs 2-10 % of a verify."""
KINDS = ((12, 1), (8, 1), (6, 1), (4, 1), (3, 1), (5, 0), (4, 0), (3, 0), (2, 1), (2, 0), (1, 1))
"""(tokens, 1: of the group's texts, 0: of all), by preference. Those of all beyond 5 gained less than 0.5 % of
accept_length."""
AT_ONCE = 1 << 15  # tokens that wait to be entered together, at most
FIRST_BITS = 14  # of the table's size, which grows to at least 16 n-grams per token
_N = max(n for n, _ in KINDS)
_LENGTH_K = np.array([n for n, _ in KINDS])
_OWN_K = np.array([own for _, own in KINDS], dtype=np.uint64)
_CONFIDENCE_N = np.array([0, 0, 1, 2, 2, 2, 2, 2, *[3] * _N])
"""By length of the match. The first draft token was right in 0.2, 0.4, 0.7 and 0.95 of cases, on small models."""
_WEIGHT_N = np.random.default_rng(0).integers(0, 2**64, _N, dtype=np.uint64) | np.uint64(1)
"""The key of an n-gram is its group plus the sum of (token + 1) times these, the last token first, modulo 2^64. Two
n-grams of one key would cost a wrong draft, and no more."""
_BACK_N = np.arange(-1, -_N - 1, -1)
Keys = NDArray[np.uint64]
Ints = NDArray[np.signedinteger]


class SuffixDrafter(Drafter):
    """The drafter `suffix`. It takes 210 to 420 bytes per token held, and 16 per token that may be."""

    name = "suffix"

    def __init__(self, *, max_tokens: int = 1_000_000) -> None:
        assert max_tokens >= 2, max_tokens
        # By place; place 0 is none.
        self._token = np.full(max_tokens + 1, -1)
        self._after = np.zeros(max_tokens + 1, dtype=np.int64)  # the place that follows in the same text
        self._end = 1
        # By n-gram; one of another key takes the place of an older one.
        self._key = np.zeros(1 << FIRST_BITS, dtype=np.uint64)
        self._place = np.zeros(1 << FIRST_BITS, dtype=np.int32)
        self._votes = np.zeros(1 << FIRST_BITS, dtype=np.int8)
        self._shift = np.uint64(64 - FIRST_BITS)
        # By row; a running request has one.
        self._context = np.zeros((0, _N), dtype=np.uint64)  # its last tokens (plus 1), the last first; 0: none
        self._group = np.zeros((0, len(KINDS)), dtype=np.uint64)
        self._tip = np.zeros(0, dtype=np.int64)
        self._row: dict[str, int] = {}
        self._free: list[int] = []
        self._ended: list[int] = []  # rows whose last tokens may be pending
        self._pending: dict[int, list[int]] = {}
        self._num_pending = 0
        self._prompts: set[tuple[int, ...]] = set()  # whose text is held

    @property
    def num_tokens(self) -> int:
        return self._end - 1 + self._num_pending

    def open(self, sequence: DraftSequence) -> None:
        self.close(sequence)  # a request that was begun before: its first attempt stays, and foretells the second
        if not self._free:
            self._grow()
        row = self._row[sequence.request_id] = self._free.pop()
        prompt = sequence.prompt_ids
        self._context[row], self._tip[row] = 0, 0
        self._group[row] = np.uint64(hash(prompt) & 2**64 - 1) * _OWN_K
        if prompt in self._prompts:
            last = np.array(prompt[: -_N - 1 : -1], dtype=np.uint64)
            self._context[row, : len(last)] = last + np.uint64(1)
        else:
            self._append(row, prompt)
            self._prompts.add(prompt)
        self._append(row, sequence.output_ids)

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        row = self._row.get(sequence.request_id)
        if row is not None:
            self._append(row, tokens)

    def close(self, sequence: DraftSequence) -> None:
        row = self._row.pop(sequence.request_id, None)
        if row is not None:
            self._ended.append(row)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        self._take_in()
        row_B = np.array([self._row[sequence.request_id] for sequence in sequences], dtype=np.int64)
        context_BN = self._context[row_B]
        key_BK = self._keys(context_BN, self._group[row_B])
        slot_BK = key_BK >> self._shift
        place_BK = self._place.take(slot_BK) * (self._key.take(slot_BK) == key_BK)
        kind_B = (place_BK > 0).argmax(axis=1)
        # Where a text is shorter than an n-gram, the key is that of the text.
        length_B = np.minimum(_LENGTH_K.take(kind_B), np.count_nonzero(context_BN, axis=1))
        room_B = np.minimum(TOKENS_PER_MATCH * length_B, np.array(windows))
        place_WB = np.empty((max(windows, default=0) + 1, len(row_B)), dtype=np.int64)
        place_WB[0] = place_BK[np.arange(len(row_B)), kind_B]
        for before_B, place_B in pairwise(place_WB):
            self._after.take(before_B, out=place_B)
        drafted_B = np.minimum(np.count_nonzero(place_WB, axis=0), room_B)
        self.confidence = _CONFIDENCE_N.take(length_B * (place_WB[0] > 0)).tolist()
        drafts = self._token.take(place_WB.T).tolist()
        return [draft[:drafted] for draft, drafted in zip(drafts, drafted_B.tolist(), strict=True)]

    def _append(self, row: int, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        size = len(self._token)
        most = min(AT_ONCE, size // 2)
        part = max(1, most // 2)
        if len(tokens) > part:
            for start in range(0, len(tokens), part):
                self._append(row, tokens[start : start + part])
            return
        if self._num_pending + len(tokens) > most:
            if self.is_verified:
                self._take_in()
            else:
                self._thin()
        if self._end + self._num_pending + len(tokens) > size:
            self._forget()
        pending = self._pending.get(row)
        if pending is None:
            self._pending[row] = [*tokens]
        else:
            pending += tokens
        self._num_pending += len(tokens)

    def _thin(self) -> None:
        """Keep half of what may be pending, each request's newest tokens, each as a text of its own."""
        share = min(AT_ONCE, len(self._token) // 2) // (2 * len(self._pending))
        for row, pending in list(self._pending.items()):
            if len(pending) > share:
                self._context[row], self._tip[row] = 0, 0
                del pending[: len(pending) - share]
                if not pending:
                    del self._pending[row]
        self._num_pending = sum(map(len, self._pending.values()))
        self._prompts.clear()

    def _take_in(self) -> None:
        if self._pending:
            while len(self._key) < 16 * (self._end + self._num_pending):
                self._widen()
            self._enter()
        self._free += self._ended
        self._ended = []

    def _enter(self) -> None:
        row_B = np.array([*self._pending])
        count_B = np.array([*map(len, self._pending.values())])
        token_P = np.fromiter(chain.from_iterable(self._pending.values()), np.int64, self._num_pending)
        place_P = np.arange(self._end, self._end + self._num_pending)
        self._end += self._num_pending
        self._pending, self._num_pending = {}, 0
        last_B = count_B.cumsum() - 1
        first_B = last_B - count_B + 1
        self._token[place_P] = token_P
        self._after[place_P] = place_P + 1
        self._after[place_P[last_B]] = 0
        tip_B = self._tip[row_B]
        self._after[tip_B] = place_P[first_B] * (tip_B > 0)
        self._after[0] = 0
        self._tip[row_B] = place_P[last_B]
        # Each text with what came before it, so that all n-grams are laid out.
        owner_P = np.arange(len(row_B)).repeat(count_B)
        number_B = np.arange(len(row_B))
        flat = np.empty(len(token_P) + _N * len(row_B), dtype=np.uint64)
        at_P = np.arange(len(token_P)) + (owner_P + 1) * _N
        flat[(first_B + _N * (number_B + 1))[:, None] + _BACK_N] = self._context[row_B]
        flat[at_P] = token_P.astype(np.uint64) + np.uint64(1)
        self._context[row_B] = flat[(last_B + _N * (number_B + 1) + 1)[:, None] + _BACK_N]
        key_PK = self._keys(flat[at_P[:, None] + _BACK_N], self._group[row_B[owner_P]])
        self._vote(key_PK.ravel(), place_P.repeat(len(KINDS)), token_P.repeat(len(KINDS)))

    def _vote(self, key: Keys, place: Ints, token: Ints) -> None:
        """Enter n-grams and what followed; a place that is outvoted makes way."""
        slot = key >> self._shift
        held = self._place.take(slot) * (self._key.take(slot) == key)
        votes = self._votes.take(slot) + np.where(self._token.take(held) == token, 1, -1)
        is_new = (held == 0) | (votes < 0)
        # However many texts went on as the remembered one did, 17 later ones that did not outvote them.
        self._votes[slot] = np.where(is_new, 0, np.minimum(votes, 16))
        slot = slot[is_new]
        self._key[slot], self._place[slot] = key[is_new], place[is_new]

    @staticmethod
    def _keys(context_BN: Keys, group_BK: Keys) -> Keys:
        sum_BN = (context_BN * _WEIGHT_N).cumsum(axis=1)
        keys_BK: Keys = sum_BN[:, _LENGTH_K - 1] + group_BK
        return keys_BK

    def _forget(self) -> None:
        half = len(self._token) // 2
        kept = self._end - half
        for of_place in (self._token, self._after):
            of_place[1:kept] = of_place[half + 1 : self._end]
        for places in (self._after, self._place, self._tip):
            np.maximum(places - half, 0, out=places)
        self._end = kept
        self._prompts.clear()

    def _widen(self) -> None:
        key, place, votes = self._key, self._place, self._votes
        self._shift -= np.uint64(1)
        slot = key >> self._shift
        for name, held in (("_key", key), ("_place", place), ("_votes", votes)):
            wide = np.zeros(2 * len(held), dtype=held.dtype)
            wide[slot] = held
            setattr(self, name, wide)

    def _grow(self) -> None:
        self._free = [row for row in self._ended if row not in self._pending]
        self._ended = [row for row in self._ended if row in self._pending]
        if self._free:
            return
        size = len(self._tip)
        more = max(16, size)
        self._free = [*range(size + more - 1, size - 1, -1)]
        self._context = np.pad(self._context, ((0, more), (0, 0)))
        self._group = np.pad(self._group, ((0, more), (0, 0)))
        self._tip = np.pad(self._tip, (0, more))
