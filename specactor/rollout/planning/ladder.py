"""The draft ladder of 2511.16193: which draft method buys the most, as a function of its acceptance. PURE: costs in,
order out.

Per model an offline table: for every method and every acceptance p on a grid, the highest predicted speed over plain
decoding of any mode and window (`reconfiguration.speeds`), from profiled seconds. Online, the acceptance that is
observed of each method picks a point of its row, and methods are ranked by what they find there.

Invariants: a method's speed-up does not fall when its acceptance rises; equal input gives equal order, by name among
equals; with acceptance 0 no method is above 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specactor.errors import PlanError
from specactor.rollout.planning.reconfiguration import LiveCosts, speeds
from specactor.rollout.planning.rounds import survival_of

POINTS = tuple(k / 20 for k in range(21))
"""Acceptances at which a ladder is tabulated."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A method, and what it buys at an acceptance."""

    method: str
    acceptance: float
    speedup: float
    """Predicted, over plain decoding."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Of one model on one engine."""

    acceptances: tuple[float, ...]
    speedups: Mapping[str, tuple[float, ...]]
    """By method, at each of `acceptances`."""

    def __post_init__(self) -> None:
        wrong = [name for name, row in self.speedups.items() if len(row) != len(self.acceptances)]
        if wrong or not self.acceptances or list(self.acceptances) != sorted(set(self.acceptances)):
            raise PlanError(
                f"ladder: got {wrong or self.acceptances}, expected rising acceptances and a speed-up at each. "
                "Make it with Ladder.of."
            )

    @classmethod
    def of(cls, costs: Mapping[str, LiveCosts]) -> Ladder:
        """`costs` by method: seconds of rounds if that method drafts, in every way that it can."""
        return cls(acceptances=POINTS, speedups={name: _row(costs[name]) for name in sorted(costs)})

    def rank(self, acceptance: Mapping[str, float]) -> list[Rung]:
        """Best first. `acceptance` by method: P(a draft token is accepted | those before it were)."""
        unknown = sorted(set(acceptance) - set(self.speedups))
        if unknown:
            raise PlanError(f"ladder: got {unknown}, expected methods in it: {sorted(self.speedups)}. Profile them.")
        rungs = [
            Rung(method=name, acceptance=p, speedup=float(np.interp(p, self.acceptances, self.speedups[name])))
            for name, p in acceptance.items()
        ]
        return sorted(rungs, key=lambda rung: (-rung.speedup, rung.method))


def _row(costs: LiveCosts) -> tuple[float, ...]:
    window = len(costs.verify_s) - 1
    survival_PW = np.array([survival_of(p, window) for p in POINTS])
    best_P = np.maximum(
        speeds(survival_PW, costs, "coupled").max(axis=1), speeds(survival_PW, costs, "decoupled").max(axis=1)
    )
    return tuple((best_P * costs.plain_s).tolist())
