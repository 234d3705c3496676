"""Whether a refresh is made, and what it may take."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import PlanError
from specactor.trainer.distillation import budget
from specactor.trainer.distillation.budget import Account, Outlook, decide, may_start, saving_s, time_limit_s
from specactor.trainer.distillation.history import Drafted, History, accept_length

NOW = Outlook(gain=1.25, refreshes=5, drafted_s=100.0, limit_s=2.0, cost_s=3.0, steps_since=1, steps_left=50)
EVERY = 10


def auto(**changes: object) -> tuple[bool, str]:
    decision = decide("auto", replace(NOW, **changes), explore_every=EVERY)  # type: ignore[arg-type]
    return decision.refresh, decision.reason


def test_a_refresh_that_pays_is_made() -> None:
    decision = decide("auto", NOW, explore_every=EVERY)
    assert decision.refresh
    assert decision.saved_s == pytest.approx(10 * 20.0)
    assert decision.reason == "may save 200 s of rollouts for 3 s"


def test_one_that_does_not_pay_is_not() -> None:
    assert auto(gain=1.0) == (False, "may save 0 s of rollouts for 3 s, no more")
    assert not auto(gain=0.9)[0]
    assert auto(gain=1.01, drafted_s=10.0) == (False, "may save 0.99 s of rollouts for 3 s, no more")
    assert not auto(drafted_s=0.0)[0], "nothing of the draft model is verified"


def test_what_was_learned_stays_until_it_is_measured_anew_or_the_run_ends() -> None:
    assert saving_s(replace(NOW, steps_left=2), EVERY) == pytest.approx(2 * 20.0)
    assert saving_s(NOW, 3) == pytest.approx(3 * 20.0)


def test_what_a_push_takes_is_a_cost() -> None:
    cheap = {"gain": 1.01, "limit_s": 0.1}
    assert auto(**cheap, cost_s=3.0)[0]
    assert not auto(**cheap, cost_s=10.0)[0]


def test_what_refreshes_take_beyond_their_share_is_taken_off_the_next_ones() -> None:
    """Each spends 0.4 s beside learning, which nobody foresaw; one is held up for 20 s."""
    account, took = Account(push_s=0.2), []
    for number in range(100):
        took.append(account.limit_s(3.0, 0.1) + 0.3 + 0.4 + (20.0 if number == 50 else 0.0))
        account.ended(3.0, took[-1])
    assert Account.of({"last": 2.0} | account.state()) == account
    assert sum(took[:50]) <= 50 * 3.0 + 0.5
    assert took[51] > 1.0, "the others go on"
    assert sum(took[51:]) <= 49 * 3.0 + 0.5


def test_refreshes_that_only_teach() -> None:
    assert not auto(gain=None)[0]
    assert auto(gain=None, refreshes=3) == (True, "one of the first refreshes: shows what it is worth")
    assert auto(gain=None, refreshes=9, is_warming_up=True) == (True, "the learning rate still rises")
    assert not auto(gain=1.0, steps_since=9)[0]
    assert auto(gain=1.0, steps_since=10) == (True, "10 steps without one: shows what it is worth now")


@pytest.mark.parametrize("mode", ["every_step", "auto"])
def test_no_refresh_without_time_or_use(mode: budget.Refresh) -> None:
    for changes, reason in (
        ({"steps_left": 0}, "no rollout is left to serve"),
        ({"limit_s": 0.0}, "no time was granted: nothing is left of its share of the last step after the last push"),
    ):
        decision = decide(mode, replace(NOW, **changes), explore_every=EVERY)  # type: ignore[arg-type]
        assert (decision.refresh, decision.reason) == (False, reason)
    assert not decide("off", NOW, explore_every=EVERY).refresh
    assert decide("every_step", replace(NOW, gain=0.5), explore_every=EVERY).refresh


@given(
    st.floats(0.1, 3), st.floats(0, 1e3), st.floats(0.1, 100), st.floats(0, 100), st.integers(0, 9), st.integers(1, 99)
)  # fmt: skip
def test_auto_never_pays_more_than_it_gets(
    gain: float, drafted_s: float, limit_s: float, cost_s: float, since: int, left: int
) -> None:
    outlook = Outlook(
        gain=gain, refreshes=5, drafted_s=drafted_s, limit_s=limit_s, cost_s=cost_s, steps_since=since, steps_left=left
    )
    decision = decide("auto", outlook, explore_every=EVERY)
    assert decision.refresh == (decision.saved_s > cost_s)
    assert 0 <= decision.saved_s <= min(left, EVERY) * drafted_s


def test_time() -> None:
    assert time_limit_s(200.0, 0.03) == pytest.approx(6.0)
    assert time_limit_s(-1.0, 0.03) == 0
    assert may_start(1.0, 1.0, 2.0)
    assert not may_start(1.1, 1.0, 2.0)


@pytest.mark.parametrize("wrong", [{"gain": 0.0}, {"gain": -1.0}, {"drafted_s": float("nan")}, {"cost_s": -1.0}])
def test_impossible_numbers_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=next(iter(wrong))):
        replace(NOW, **wrong)  # type: ignore[arg-type]


WINDOW, ROLLOUT_S, STEP_S, SHARE, STEPS = 4.0, 80.0, 100.0, 0.03, 60


def drifting(step: int, acceptance: float) -> float:
    """Problems get harder all the time."""
    return acceptance - 0.008


def hard_for_a_while(step: int, acceptance: float) -> float:
    return acceptance - (0.02 if 10 <= step < 25 else 0.0)


def still(step: int, acceptance: float) -> float:
    return acceptance


def learning(acceptance: float) -> float:
    """A refresh takes a tenth of what is missing to a good draft model."""
    return acceptance + 0.1 * (0.92 - acceptance)


def harmful(acceptance: float) -> float:
    return acceptance - 0.002


WORLDS: dict[str, tuple[float, Callable[[int, float], float], Callable[[float], float]]] = {
    "undertrained": (0.5, still, learning),
    "drifting": (0.9, drifting, learning),
    "harder for a while": (0.9, hard_for_a_while, learning),
    "as good as it gets": (0.92, still, learning),
    "refreshes harm": (0.9, still, harmful),
}


def run_s(mode: budget.Refresh, world: str, noise: float, seed: int = 0) -> float:
    """Seconds of rollouts and refreshes in a world where acceptance is known, and seen with noise."""
    chance, history, total_s = random.Random(seed), History(), 0.0
    acceptance, changed, refreshed = WORLDS[world]
    plain_s = ROLLOUT_S * accept_length(acceptance, WINDOW)
    for step in range(STEPS):
        acceptance = max(0.05, changed(step, acceptance))
        rollout_s = plain_s / accept_length(acceptance, WINDOW)
        total_s += rollout_s
        seen = accept_length(acceptance, WINDOW) * chance.gauss(1, 0.03)
        history.rollout(Drafted(accept_length=max(1.0, seen), window=WINDOW, share=1.0))
        cost_s = SHARE * (rollout_s + STEP_S - ROLLOUT_S)
        now = Outlook(
            gain=history.gain,
            refreshes=history.refreshes,
            drafted_s=rollout_s,
            limit_s=cost_s,
            cost_s=cost_s,
            steps_since=history.steps_since,
            steps_left=STEPS - 1 - step,
        )
        if decide(mode, now, explore_every=EVERY).refresh:
            before, acceptance = acceptance, refreshed(acceptance)
            history.refreshed(before, min(1.0, max(0.0, acceptance + chance.gauss(0, noise))))
            total_s += cost_s
    return total_s


@pytest.mark.parametrize(("noise", "more"), [(0.0005, SHARE), (0.02, 2 * SHARE)])
@pytest.mark.parametrize("world", WORLDS)
def test_auto_is_about_as_fast_as_the_better_of_the_others(world: str, noise: float, more: float) -> None:
    """Noise is that of the overlap on many prompts, and on a few."""
    ratios = []
    for seed in range(5):
        others = (run_s("off", world, noise, seed), run_s("every_step", world, noise, seed))
        ratios.append(run_s("auto", world, noise, seed) / min(others))
    assert mean(ratios) <= 1 + more


def test_a_rule_that_counts_one_rollout_alone_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = budget.saving_s
    monkeypatch.setattr(budget, "saving_s", lambda now, explore_every: true(now, 1))
    with pytest.raises(AssertionError):
        test_auto_is_about_as_fast_as_the_better_of_the_others("drifting", 0.0005, SHARE)


def test_a_rule_that_believes_in_the_mean_of_few_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops after an unlucky refresh."""
    monkeypatch.setattr(History, "gain", property(lambda of: math.exp(of.log_gains[-1]) if of.log_gains else None))
    with pytest.raises(AssertionError):
        test_auto_is_about_as_fast_as_the_better_of_the_others("drifting", 0.02, 2 * SHARE)
