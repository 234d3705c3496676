"""Whether the draft model is refreshed now, and for how long. PURE: numbers in, a decision with its reason out.

What a refresh is worth: a rollout's verifies take about the same time whatever is accepted, so its time goes with
1 / accept_length. What it costs: its own seconds, in which nothing is generated.

Invariants: a refresh is never longer than its share of the last step; with `auto`, one whose predicted saving is below
its cost is made only to learn what refreshing is worth (the first, and one after `explore_every` steps without).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

from specactor.errors import PlanError

Refresh = Literal["off", "every_step", "auto"]


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is known when a step has ended."""

    accept_length: float
    """Of the last rollout; 1 where nothing is accepted."""
    fresh_accept_length: float | None
    """Of the first rollout after the last refresh; None before there was one."""
    gain: float | None
    """accept_length after the last refresh over that before it; None before there were two rollouts around one."""
    rollout_s: float
    """Of the last rollout."""
    refresh_s: float
    """That a refresh may take."""
    steps_since: int
    """RL steps since the last refresh (or since the start)."""
    steps_left: int
    """Rollouts still to come in this run."""

    def __post_init__(self) -> None:
        for name in ("accept_length", "fresh_accept_length", "gain"):
            value = getattr(self, name)
            least = 0.0 if name == "gain" else 1.0
            if value is not None and not value >= least:
                raise PlanError(f"{name}: got {value}, expected >= {least:g}. Leave it out (None) if it is not known.")
        for name in ("rollout_s", "refresh_s", "steps_since", "steps_left"):
            if not getattr(self, name) >= 0:
                raise PlanError(f"{name}: got {getattr(self, name)}, expected >= 0.")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """`reason` is for people and metrics."""

    refresh: bool
    saved_s: float
    """Predicted, in the rollouts that the refresh serves."""
    cost_s: float
    reason: str


def time_limit_s(last_step_s: float, max_time_share: float) -> float:
    """Longest refresh."""
    return max(0.0, last_step_s) * max_time_share


def may_start(elapsed_s: float, expected_s: float, limit_s: float) -> bool:
    """Whether what takes `expected_s` ends within the limit."""
    return elapsed_s + expected_s <= limit_s


def decide(mode: Refresh, now: Outlook, *, explore_every: int) -> Decision:
    """Whether to refresh between the last rollout and the next."""
    saved_s = saving_s(now)

    def answer(refresh: bool, reason: str) -> Decision:
        return Decision(refresh=refresh, saved_s=saved_s, cost_s=now.refresh_s, reason=reason)

    if mode == "off":
        return answer(False, "refresh is off")
    if not now.steps_left:
        return answer(False, "no rollout is left to serve")
    if not now.refresh_s:
        return answer(False, "no time was granted: the last step was too short, or its time is not known")
    if mode == "every_step":
        return answer(True, "every step")
    if mode != "auto":
        assert_never(mode)
    if now.fresh_accept_length is None:
        return answer(True, "the first refresh: shows what it is worth")
    worth = f"saves {saved_s:.3g} s of rollouts for {now.refresh_s:.3g} s"
    if saved_s > now.refresh_s:
        return answer(True, worth)
    if now.steps_since >= explore_every:
        return answer(True, f"{now.steps_since} steps without one: shows what it is worth now")
    return answer(False, f"only {worth}")


def saving_s(now: Outlook) -> float:
    """Seconds of rollouts that a refresh saves: rollout time * (1 - accept_length now / then), for as many rollouts as
    the last refresh has served so far, at least one and at most those left.

    `then` is what the last refresh reached, or the present one times what the last refresh gained, if that is more.
    """
    if now.fresh_accept_length is None:
        return 0.0
    then = max(now.fresh_accept_length, now.accept_length * (now.gain or 1.0))
    served = min(max(1, now.steps_since), now.steps_left)
    return max(0.0, served * now.rollout_s * (1 - now.accept_length / then))
