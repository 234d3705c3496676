"""What a simulated rollout was. PURE: values.

Invariant: every request has finished; nothing in it is about how it was simulated but `events`.

Shape legend: N requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specactor.rollout.planning.plans import RolloutPlan
from specactor.rollout.simulator.ledger import Span
from specactor.rollout.simulator.requests import Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a rollout was."""

    plan: RolloutPlan
    lengths: Ints
    """[N], tokens."""
    finish_s: Floats
    """[N]: seconds from the rollout's begin."""
    spans: Sequence[Span]
    rounds: float
    """Of all engines."""
    emitted: float
    """Tokens, as engines counted them."""
    drafted: float
    """Draft tokens that were verified."""
    accepted: float
    decisions: int
    events: int
    lent: int
    """Engines that ran dry and drafted for others."""
    pairs: int
    """(request, further method) pairs."""

    @property
    def seconds(self) -> float:
        return float(self.finish_s.max())

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())
