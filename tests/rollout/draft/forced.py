"""A policy that switches at random: whose drafts a request has, of one drafter, of several or of none, and how many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from specactor.rollout.draft.drafter import DraftSequence
from specactor.rollout.draft.trees import Drafts


class Forced:
    """Each request keeps what was drawn for it for a few rounds; then it is drawn anew."""

    def __init__(self, seed: int, *, keep: float = 0.5) -> None:
        self._rng = Random(seed)
        self._keep = keep
        self._drawn: dict[str, dict[str, int]] = {}
        self.kinds: Counter[int] = Counter()
        """Requests of all rounds, by how many drafters they had."""

    def wanted(self, sequences: Sequence[DraftSequence], drafts: Drafts) -> list[dict[str, int]]:
        out = []
        for sequence in sequences:
            if sequence.request_id not in self._drawn or self._rng.random() > self._keep:
                names = self._rng.sample(sorted(drafts), self._rng.randint(0, len(drafts)))
                self._drawn[sequence.request_id] = {name: self._rng.randint(1, 8) for name in names}
            out.append(self._drawn[sequence.request_id])
            self.kinds[len(out[-1])] += 1
        return out
