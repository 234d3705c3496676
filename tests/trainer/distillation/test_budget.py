"""Whether a refresh is made, and what it may take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import PlanError
from specactor.trainer.distillation.budget import Outlook, decide, may_start, saving_s, time_limit_s

NOW = Outlook(
    accept_length=2.0,
    fresh_accept_length=2.5,
    gain=1.1,
    rollout_s=100.0,
    refresh_s=3.0,
    steps_since=1,
    steps_left=50,
)


def auto(**changes: object) -> tuple[bool, str]:
    decision = decide("auto", replace(NOW, **changes), explore_every=10)  # type: ignore[arg-type]
    return decision.refresh, decision.reason


def test_a_refresh_that_pays_is_made() -> None:
    decision = decide("auto", NOW, explore_every=10)
    assert decision.refresh
    assert (decision.saved_s, decision.cost_s) == (pytest.approx(20.0), 3.0)
    assert decision.reason == "saves 20 s of rollouts for 3 s"


def test_one_that_does_not_pay_is_not() -> None:
    assert auto(accept_length=2.49, gain=None) == (False, "only saves 0.4 s of rollouts for 3 s")
    assert auto(accept_length=2.6, gain=1.0) == (False, "only saves 0 s of rollouts for 3 s")


def test_what_the_last_refresh_gained_is_expected_again() -> None:
    """Also where acceptance is above what the last refresh reached: the draft model is still learning."""
    assert auto(accept_length=3.0, gain=1.2)[0]
    assert not auto(accept_length=3.0, gain=None)[0]


def test_a_refresh_serves_as_many_rollouts_as_the_last_one_did() -> None:
    once, often = replace(NOW, steps_since=1), replace(NOW, steps_since=5)
    assert saving_s(often) == pytest.approx(5 * saving_s(once))
    assert saving_s(replace(NOW, steps_since=5, steps_left=2)) == pytest.approx(2 * saving_s(once))
    assert saving_s(replace(NOW, steps_since=0)) == pytest.approx(saving_s(once))


def test_refreshes_that_only_teach() -> None:
    assert auto(fresh_accept_length=None, gain=None) == (True, "the first refresh: shows what it is worth")
    never = {"accept_length": 2.5, "gain": 1.0}
    assert not auto(**never, steps_since=9)[0]
    assert auto(**never, steps_since=10) == (True, "10 steps without one: shows what it is worth now")


@pytest.mark.parametrize("mode", ["every_step", "auto"])
def test_no_refresh_without_time_or_use(mode: str) -> None:
    for changes, reason in (
        ({"steps_left": 0}, "no rollout is left to serve"),
        ({"refresh_s": 0.0}, "no time was granted: the last step was too short, or its time is not known"),
    ):
        decision = decide(mode, replace(NOW, **changes), explore_every=10)  # type: ignore[arg-type]
        assert (decision.refresh, decision.reason) == (False, reason)
    assert not decide("off", NOW, explore_every=10).refresh
    assert decide("every_step", replace(NOW, accept_length=2.5, gain=1.0), explore_every=10).refresh


@given(
    st.floats(1, 8), st.floats(1, 8), st.one_of(st.none(), st.floats(0, 3)), st.floats(0, 1e3), st.floats(0, 100),
    st.integers(0, 9), st.integers(1, 99),
)  # fmt: skip
def test_auto_never_pays_more_than_it_gets(
    now: float, fresh: float, gain: float | None, rollout_s: float, refresh_s: float, since: int, left: int
) -> None:
    outlook = Outlook(
        accept_length=now,
        fresh_accept_length=fresh,
        gain=gain,
        rollout_s=rollout_s,
        refresh_s=refresh_s,
        steps_since=since,
        steps_left=left,
    )
    decision = decide("auto", outlook, explore_every=10)
    assert decision.refresh == (decision.saved_s > refresh_s > 0)
    assert 0 <= decision.saved_s <= max(1, since) * rollout_s


def test_time() -> None:
    assert time_limit_s(200.0, 0.03) == pytest.approx(6.0)
    assert time_limit_s(-1.0, 0.03) == 0
    assert may_start(1.0, 1.0, 2.0)
    assert not may_start(1.1, 1.0, 2.0)


@pytest.mark.parametrize("wrong", [{"accept_length": 0.5}, {"gain": -1.0}, {"rollout_s": float("nan")}])
def test_impossible_numbers_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=next(iter(wrong))):
        replace(NOW, **wrong)  # type: ignore[arg-type]
