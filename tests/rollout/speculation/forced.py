"""A speculator that switches at random, in place of doing what costs say."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.fastest_of_n import fitted
from specactor.rollout.speculation.speculator import Speculator
from specactor.rollout.speculation.verification import Decision, Drafts
from specactor.rollout.speculation.windows import OFF


class Drawn:
    """What each request has, drawn at random: drafts of one drafter, of several or of none. It keeps that for a few
    rounds; then it is drawn anew."""

    def __init__(self, seed: int, *, keep: float = 0.5) -> None:
        self._rng = Random(seed)
        self._keep = keep
        self._drawn: dict[str, dict[str, int]] = {}
        self.kinds: Counter[int] = Counter()
        """Requests of all rounds, by how many drafters they had."""

    def wanted(self, sequences: Sequence[DraftSequence], drafts: Drafts) -> list[dict[str, int]]:
        """Per request, draft tokens by drafter."""
        out = []
        for sequence in sequences:
            if sequence.request_id not in self._drawn or self._rng.random() > self._keep:
                names = self._rng.sample(sorted(drafts), self._rng.randint(0, len(drafts)))
                self._drawn[sequence.request_id] = {name: self._rng.randint(1, 8) for name in names}
            out.append(self._drawn[sequence.request_id])
            self.kinds[len(out[-1])] += 1
        return out


class Switching(Speculator):
    """Does what was drawn."""

    def __init__(self, *arguments: Any, drawn: Drawn, **named: Any) -> None:
        super().__init__(*arguments, **{"clock": time.perf_counter} | named)
        self._drawn = drawn

    def decide(self, sequences: Sequence[DraftSequence], limits: Sequence[int], *, max_branches: int = 0) -> Decision:
        windows = [max(0, min(limit, self.config.max_window)) for limit in limits]
        self.drafter_set.find()
        self.drafter_set.tell()
        drafts = self.drafter_set.first(sequences, windows)
        wanted = self._drawn.wanted(sequences, drafts)
        parts = {n: [d[: of.get(n, 0)] for d, of in zip(lists, wanted, strict=True)] for n, lists in drafts.items()}
        bounds = {"max_tokens": self.config.max_window, "max_branches": max_branches}
        self._decision = together(parts, depth=max(windows), **bounds)
        self._settle(sequences, drafts, self._decision, "as it was drawn")
        return self._decision

    @property
    def plain_rounds_ahead(self) -> int:
        return 0


class Mixing(Speculator):
    """Of two drafters, the first has drafted for some requests, the second is still to draft for others, and the rest
    have nothing; in each round others."""

    rounds = 0

    def decide(self, sequences: Sequence[DraftSequence], limits: Sequence[int], *, max_branches: int = 0) -> Decision:
        windows = [max(0, min(limit, self.config.max_window)) for limit in limits]
        self.rounds += 1
        self.drafter_set.find()
        self.drafter_set.tell()
        early, late = self.drafters
        turns = [(self.rounds + i) % 3 for i in range(len(windows))]
        drafts = self.drafter_set.first(sequences, windows)[early]
        self._decision = Decision(
            drafter=late,
            windows=windows,
            depth=max(windows),
            drafts=[[] for _ in windows],
            beside={early: [draft if turn == 0 else [] for draft, turn in zip(drafts, turns, strict=True)]},
            to_draft=[window if turn == 1 else 0 for window, turn in zip(windows, turns, strict=True)],
        )
        return self._decision

    @property
    def plain_rounds_ahead(self) -> int:
        return 0


def together(drafts: Drafts, *, depth: int, max_tokens: int, max_branches: int) -> Decision:
    """All of these, in one tree per request. `depth`: the largest window that was asked for."""
    requests = len(next(iter(drafts.values())))
    held = fitted(drafts, max_tokens=max_tokens, max_branches=max_branches)
    totals = [sum(len(lists[i]) for lists in held.values()) for i in range(requests)]
    decision = Decision(drafter=OFF, windows=totals, depth=depth, drafts=[[] for _ in totals])
    decision.take(held)
    return decision
