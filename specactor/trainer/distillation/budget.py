"""Whether the draft model is refreshed now, and for how long. PURE: numbers in, a decision with its reason out.

What a refresh is worth: a verify takes about the same time whatever is accepted, so the time of rounds with the draft
model's drafts goes with 1 / accept_length. By how much a refresh raises that is measured in every refresh, on responses
that it does not learn from (`held_out`), so neither harder problems nor a lucky rollout pass for its doing; and as what
was learned stays, it is worth that in every rollout until its worth would be measured anew. Where the recent ones leave
it open, it is made: it costs little, and what it would have been worth shows only then. What it costs: its own seconds,
in which nothing is generated.

Invariants: refreshes take no more than their share of the steps in the long run, if they spend no more than half of it
beside learning; with `auto`, one whose predicted saving is below its cost is made only to learn what refreshing is
worth (the first, from when the learning rate has risen, and one after `explore_every` steps without).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, assert_never

import msgspec

from specactor.errors import PlanError

FIRST = 4
"""Refreshes that are made before anything is known of their worth."""
Refresh = Literal["off", "every_step", "auto"]


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is known when a step has ended."""

    gain: float | None
    """accept_length after a refresh over that before it, as the next one may well have it; None: not known yet."""
    refreshes: int
    """So far, of those that count."""
    is_warming_up: bool = False
    """Whether the learning rate still rises: what refreshing is worth shows only after that."""
    drafted_s: float
    """Of the last rollout, in rounds with drafts of the draft model."""
    limit_s: float
    """That learning may take."""
    cost_s: float
    """Of a usual refresh: learning and pushing."""
    steps_since: int
    """RL steps since the last refresh (or since the start)."""
    steps_left: int
    """Rollouts still to come in this run."""

    def __post_init__(self) -> None:
        if self.gain is not None and not self.gain > 0:
            raise PlanError(f"gain: got {self.gain}, expected > 0. Leave it out (None) if it is not known.")
        for name in ("drafted_s", "limit_s", "cost_s", "steps_since", "steps_left"):
            if not getattr(self, name) >= 0:
                raise PlanError(f"{name}: got {getattr(self, name)}, expected >= 0.")


@dataclass(kw_only=True)
class Account:
    """Of the seconds that refreshes may take: what one takes beyond its share is taken off the next ones."""

    push_s: float = 0.0
    """Of the last push; halved by every refresh since that made none, or a slow one would leave no time for a refresh,
    and so for a push, ever again."""
    owed_s: float = 0.0

    def limit_s(self, share_s: float, spent_s: float) -> float:
        """What is left to learn in. Args: this refresh's share; what it has spent of it."""
        return max(0.0, share_s - spent_s - self.push_s - self.owed_s)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Account:
        """What `state` returned, among others; of an older checkpoint nothing is owed."""
        return cls(push_s=state.get("push_s", 0.0), owed_s=state.get("owed_s", 0.0))

    def ended(self, share_s: float, took_s: float) -> None:
        """A refresh has. At most half a share is owed, so that one that was held up stops no others."""
        self.owed_s = min(share_s / 2, max(0.0, self.owed_s + took_s - share_s))


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """`reason` is for people and metrics."""

    refresh: bool
    saved_s: float
    """Predicted, in the rollouts that the refresh serves."""
    limit_s: float
    """That learning may take."""
    reason: str


def time_limit_s(last_step_s: float, max_time_share: float) -> float:
    """Longest refresh."""
    return max(0.0, last_step_s) * max_time_share


def may_start(elapsed_s: float, expected_s: float, limit_s: float) -> bool:
    """Whether what takes `expected_s` ends within the limit."""
    return elapsed_s + expected_s <= limit_s


def decide(mode: Refresh, now: Outlook, *, explore_every: int) -> Decision:
    """Whether to refresh between the last rollout and the next."""
    saved_s = saving_s(now, explore_every)

    def answer(refresh: bool, reason: str) -> Decision:
        return Decision(refresh=refresh, saved_s=saved_s, limit_s=now.limit_s, reason=reason)

    if mode == "off":
        return answer(False, "refresh is off")
    if not now.steps_left:
        return answer(False, "no rollout is left to serve")
    if not now.limit_s:
        return answer(False, "no time was granted: nothing is left of its share of the last step after the last push")
    if mode == "every_step":
        return answer(True, "every step")
    if mode != "auto":
        assert_never(mode)
    if now.is_warming_up:
        return answer(True, "the learning rate still rises")
    if now.gain is None and now.refreshes < FIRST:
        return answer(True, "one of the first refreshes: shows what it is worth")
    worth = f"may save {saved_s:.3g} s of rollouts for {now.cost_s:.3g} s"
    if saved_s > now.cost_s:
        return answer(True, worth)
    if now.steps_since >= explore_every:
        return answer(True, f"{now.steps_since} steps without one: shows what it is worth now")
    return answer(False, f"{worth}, no more")


def saving_s(now: Outlook, explore_every: int) -> float:
    """Seconds that a refresh saves: those of rounds with drafts * (1 - 1 / gain), in every rollout that is left, but
    in no more than pass until its worth would be measured anew."""
    if now.gain is None:
        return 0.0
    return max(0.0, min(now.steps_left, explore_every) * now.drafted_s * (1 - 1 / now.gain))
