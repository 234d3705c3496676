"""What an RL step leaves for the draft model. PURE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specactor.rollout.draft.counts import Counts
from specactor.types import ScoredGroup, TrainSequence

PHASES = ("rollout", "reward", "train", "sync")
"""Of a step, before the draft model learns from it."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an RL step leaves to learn from."""

    sequences: Sequence[TrainSequence]
    """Just as the policy learned from them."""
    rewards: Sequence[float]
    """Of each."""
    version: int
    """Of the policy that generated them."""
    counts: Mapping[str, Counts]
    """Of its rollout, per drafter."""
    seconds: float
    """Of all of it, on this rank."""
    rollout_s: float
    steps_left: int

    @classmethod
    def of(
        cls,
        groups: Sequence[ScoredGroup],
        sequences: Sequence[TrainSequence],
        counts: Mapping[str, Counts],
        *,
        version: int,
        spent: Mapping[str, float],
        steps_left: int,
    ) -> Step:
        """Args: what all groups were made to; seconds of the step by phase."""
        return cls(
            sequences=sequences,
            rewards=[reward for group in groups for reward in group.rewards],
            version=version,
            counts=counts,
            seconds=sum(spent.get(phase, 0.0) for phase in PHASES),
            rollout_s=spent.get("rollout", 0.0),
            steps_left=steps_left,
        )
