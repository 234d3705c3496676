"""What refreshes of the draft model have done for the length of what is accepted, as far as is known. PURE.

Invariant: only rollouts that have ended count, and the state that a checkpoint keeps is all there is, so a resumed run
decides as the run that was interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specactor.rollout.draft.counts import Counts
from specactor.trainer.distillation.budget import Outlook

USUAL_DECAY = 0.98
"""What accept_length was, is worth per rollout that did not reach it."""
LOST = 0.9
"""Below this share of what it was, accept_length is to be recovered."""
DRAFTED_BY = ("model", "decoupled")
"""Drafters with the draft model's weights."""


def accept_length(counts: Mapping[str, Counts]) -> float | None:
    """Tokens emitted per verify of what the draft model drafted; None where nothing of it was verified."""
    verifies = sum(counts[name].verifies for name in DRAFTED_BY if name in counts)
    emitted = sum(counts[name].emitted for name in DRAFTED_BY if name in counts)
    return max(1.0, emitted / verifies) if verifies else None


@dataclass(kw_only=True)
class History:
    """Of one run."""

    last: float | None = None
    """accept_length of the last rollout that had one."""
    before: float | None = None
    """The same, when the last refresh was made."""
    fresh: float | None = None
    """Of the first rollout after the last refresh that had one."""
    gain: float | None = None
    """That over `before`, of the last refresh of which both are known."""
    usual: float | None = None
    """What accept_length was: of the best rollout, less what its age takes off."""
    waits: bool = False
    """For the first rollout after the last refresh."""
    steps_since: int = 0
    """Rollouts since the last refresh."""

    def rollout(self, accepted: float | None) -> None:
        """One has ended. Args: its accept_length."""
        self.steps_since += 1
        if accepted is None:
            return
        if self.waits:
            self.waits, self.fresh = False, accepted
            self.gain = accepted / self.before if self.before is not None else self.gain
        self.last = accepted
        self.usual = max(accepted, USUAL_DECAY * (self.usual or 0.0))

    @property
    def is_lost(self) -> bool:
        """Whether accept_length is well below what it was."""
        return self.last is not None and self.usual is not None and self.last < LOST * self.usual

    def refreshed(self) -> None:
        """After the last rollout, and before the next."""
        self.before, self.waits, self.steps_since = self.last, True, 0

    def outlook(self, *, rollout_s: float, refresh_s: float, steps_left: int) -> Outlook:
        """Args: of the last rollout; that a refresh may take; rollouts still to come."""
        return Outlook(
            accept_length=self.last or 1.0,
            fresh_accept_length=self.fresh,
            gain=self.gain,
            rollout_s=rollout_s,
            refresh_s=refresh_s,
            steps_since=self.steps_since,
            steps_left=steps_left,
        )

    def state(self) -> dict[str, Any]:
        """Of JSON types."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> History:
        return cls(**state)
