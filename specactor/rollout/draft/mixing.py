"""Whose draft each request has verified, where several drafters have drafts. PURE: drafts and estimates in, names out.

Drafts that are there are verified alike, wherever they were made, and what making them took is spent. So each request
takes the one that Algorithm 2 (`planning.reconfiguration`) promises most of, as far as it reaches; windows are then
chosen for all requests together (`options.of_requests`).

Invariants: a request has one drafter, or none if nobody drafted for it or nothing would be accepted; only the past is
used; a request stays with its drafter until another promises more by `MARGIN`. Where its drafter has no draft, another
stands in for it. That is no switch, and it goes back as soon as there is one.

Shape legend: B requests, W windows 1..max_window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specactor.rollout.draft.decision import Decision
from specactor.rollout.draft.trees import Drafts
from specactor.rollout.planning.reconfiguration import PLAIN, DraftPlan, LiveCosts, Offer, reconfigure, worths
from specactor.rollout.planning.windows import OFF

MARGIN = 0.1
"""Tokens per round."""
PACE_ROUNDS = 16
"""Over which the pace of the engine is averaged: that of a round depends on who happened to have drafts."""

Floats = NDArray[np.float64]


class Switch(NamedTuple):
    """Requests that changed their drafter in a round."""

    before: str
    after: str
    requests: int


class Mixing:
    """Which drafter each running request has."""

    def __init__(self) -> None:
        self._drafter: dict[str, str] = {}
        self.pace: float | None = None
        """Tokens per second and request that the last rounds promised, on average: what a row's seconds are worth."""

    def promised(self, pace: float) -> None:
        """A round was decided, of which so many tokens per second and request are expected."""
        self.pace = pace if self.pace is None else self.pace + (pace - self.pace) / PACE_ROUNDS

    def owners(self, ids: Sequence[str], reaching: Mapping[str, Floats], costs: LiveCosts) -> list[str]:
        """Each request's drafter in this round; OFF for none. `reaching`: per drafter [B][W], survivals of the draft
        tokens that are there, and 0 behind the last."""
        offers = [Offer(drafter=name, survival=table, costs=costs) for name, table in reaching.items()]
        # Drafters are compared at the windows that are best for them now.
        window_of = {o.drafter: worths(o, "coupled", pace=self.pace).argmax(axis=1).tolist() for o in offers}
        current = [
            _plan(name, window_of[name][i] + 1) if (name := self._drafter.get(one, OFF)) in window_of else PLAIN
            for i, one in enumerate(ids)
        ]
        plans = reconfigure(offers, current, everyone=True, margin=MARGIN, pace=self.pace)
        return [plan.drafter for plan in plans]

    def settle(self, ids: Sequence[str], drafts: Drafts, decision: Decision) -> list[Switch]:
        """A round was decided; who changed. `drafts`: all that were there."""
        verified = {decision.drafter: decision.drafts, **decision.beside}
        found: Counter[tuple[str, str]] = Counter()
        for i, one in enumerate(ids):
            if decision.together:
                after = decision.drafter if decision.windows[i] else OFF
            else:
                after = next((name for name, lists in verified.items() if lists[i]), OFF)
            before = self._drafter.setdefault(one, after) if after != OFF else OFF
            if before == after:
                continue
            if before not in drafts or drafts[before][i]:
                self._drafter[one] = after
                found[before, after] += 1
        return [Switch(before, after, count) for (before, after), count in found.items()]

    def forget(self, request_id: str) -> None:
        self._drafter.pop(request_id, None)


def reaching(survival_BW: Floats, lengths: Sequence[int]) -> Floats:
    """Survivals of drafts that are so long; 0 behind their ends."""
    return np.where(np.arange(survival_BW.shape[1]) < np.array(lengths)[:, None], survival_BW, 0.0)


@cache
def _plan(drafter: str, window: int) -> DraftPlan:
    return DraftPlan(mode="coupled", drafter=drafter, window=window)
