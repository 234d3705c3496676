"""Rollouts conserve work and devices, repeat, and take as long as drawing every token says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor.errors import PlanError
from specactor.planning.plans import RolloutPlan
from specactor.simulator import rollout
from specactor.simulator.engine import Engine, Policy, SimulatedMode, placed
from specactor.simulator.requests import Requests
from specactor.simulator.rollout import Outcome, Rollout, simulate
from tests.simulator.small import NO_DELAYS, W, candidates, cluster, requests, table, world
from tests.simulator.test_rounds import host_afterwards

SOME = {"start_s": 0.3, "replan_s": 0.01, "rollback_s": 0.001}
MODES: list[SimulatedMode] = ["off", "coupled", "decoupled", "auto"]


def simulated(
    of: Requests, policy: Policy, *, p: float = 0.6, delays: Mapping[str, float] = SOME, seed: int = 0
) -> Outcome:
    real = world(p, delays=delays, spread=0.5, drift=0.05)
    return simulate(cluster(of), candidates(p), real, policy, of, seed=(seed,))


def check(outcome: Outcome, of: Requests, devices: int = 8) -> None:
    assert np.isfinite(outcome.finish_s).all()
    assert (outcome.finish_s > 0).all()
    assert outcome.emitted == pytest.approx(of.lengths.sum(), rel=1e-6), "work is conserved"
    assert outcome.emitted - outcome.accepted <= outcome.emitted
    assert 0 <= outcome.accepted <= outcome.drafted * (1 + 1e-9)
    assert outcome.busy_device_s <= devices * outcome.seconds * (1 + 1e-9), "no device does two things at once"
    assert outcome.plan.verifiers.devices + outcome.plan.drafters.devices <= devices


@given(
    st.sampled_from(MODES),
    st.integers(1, 10),
    st.integers(0, 5),
    st.floats(0.3, 0.95),
)
def test_work_and_devices_are_conserved(mode: SimulatedMode, prompts: int, seed: int, p: float) -> None:
    policy = Policy(mode=mode, max_window=W)
    of = requests(prompts, seed=seed)
    outcome = simulated(of, policy, p=p, seed=seed)
    check(outcome, of)
    same = simulated(of, policy, p=p, seed=seed)
    assert (outcome.finish_s == same.finish_s).all()
    assert outcome.busy_device_s == same.busy_device_s


def test_what_is_not_conserved_is_caught() -> None:
    of = requests()
    outcome = simulated(of, Policy(mode="coupled", max_window=W))
    check(outcome, of)
    lost = outcome.finish_s.copy()
    lost[3] = np.nan
    for wrong in (
        replace(outcome, finish_s=lost),
        replace(outcome, emitted=outcome.emitted + 1),
        replace(outcome, accepted=outcome.drafted + 1),
        replace(outcome, busy_device_s=outcome.busy_device_s + 8 * outcome.seconds),
    ):
        with pytest.raises(AssertionError):
            check(wrong, of)


class Losing(Rollout):
    """Wrong: what has to wait is forgotten."""

    def _turn(self, engine: Engine, now: float) -> None:
        engine.waiting = type(engine.waiting)(list(engine.waiting)[1:])
        super()._turn(engine, now)


class Backwards(Rollout):
    """Wrong: events come before what made them."""

    def _push(self, at: float, engine: Engine) -> None:
        super()._push(at if self.events < 3 else at - 5.0, engine)


def made(kind: type[Rollout], of: Requests) -> Rollout:
    found, policy = candidates(), Policy(mode="coupled", max_window=W)
    plan = placed(cluster(of), found, policy)
    return kind(plan, cluster(of), found, world(), policy, of, 0, (0,))


def test_lost_requests_and_time_that_goes_back_are_caught() -> None:
    of = requests()
    check(made(Rollout, of).run(), of)
    with pytest.raises(AssertionError, match="requests were lost"):
        made(Losing, of).run()
    with pytest.raises(AssertionError, match="s after one at"):
        made(Backwards, of).run()


def drawn_s(of: Requests, plan: RolloutPlan, p: float, seed: int) -> float:
    """Seconds of one engine with a fixed coupled window, every round and token drawn."""
    rng, costs, window = np.random.default_rng(seed), table(), plan.window
    left, seconds = of.lengths.astype(np.int64).copy(), 0.0
    while len(left):
        n = len(left)
        seconds += costs.verify_s(n, n * (1 + window)) + costs.draft_s("small", n, window)
        right = (rng.random((n, window)) < p).cumprod(axis=1).sum(axis=1)
        left = left - right - 1
        left = left[left > 0]
    return seconds


def equal(tokens: int) -> Requests:
    return replace(requests(4, 4), lengths=np.full(16, tokens))


def over_drawn(kind: type[Rollout], of: Requests, p: float) -> float:
    """Mean seconds of a fixed window over those of drawing every token."""
    one, found, policy = cluster(of, devices=2), candidates(p), Policy(mode="coupled", drafter="small", window=3)
    plan = placed(one, found, policy)
    assert plan.window == 3
    made = [kind(plan, one, found, world(p, spread=0.0), policy, of, 0, (seed,)).run().seconds for seed in range(8)]
    return float(np.mean(made)) / float(np.mean([drawn_s(of, plan, p, seed) for seed in range(24)]))


SHORT = {"equal": equal(100), "short": requests(4, 4, median=100.0), "long": requests(4, 4, median=800.0)}


@pytest.mark.parametrize("p", [0.3, 0.8])
@pytest.mark.parametrize("of", SHORT.values(), ids=SHORT)
def test_seconds_are_those_of_drawing_every_token(of: Requests, p: float) -> None:
    assert over_drawn(Rollout, of, p) == pytest.approx(1.0, abs=0.02)


class Even(Rollout):
    """Wrong: no request is luckier than another, so that equal ones end together."""

    def run(self) -> Outcome:
        self.progress.luck_N[:] = 0.0
        return super().run()


def test_ends_without_luck_are_caught() -> None:
    assert over_drawn(Even, equal(100), 0.8) < 0.95


def test_plain_decoding_by_hand() -> None:
    """One engine of 2 requests, 10 and 30 tokens: 10 steps of two, 20 of one."""
    of = Requests(lengths=np.array([10, 30]), groups=np.array([0, 1]), odds=np.ones(2))
    found, costs = candidates(), table()
    outcome = simulate(cluster(of, devices=2), found, world(delays={**SOME, "start_s": 1.0}), Policy(mode="off"), of)
    ten = 1.0 + 10 * costs.plain_s(2)
    assert outcome.finish_s == pytest.approx([ten, ten + 20 * costs.plain_s(1)])
    assert outcome.rounds == pytest.approx(30)


def test_belief_is_not_truth() -> None:
    """The planner keeps its plan where only the truth changes, and time follows the truth alone."""
    of, policy = requests(), Policy(mode="coupled", drafter="small", max_window=W)
    right, wrong = (simulate(cluster(of), candidates(), world(p), policy, of) for p in (0.6, 0.2))
    assert wrong.plan == right.plan
    assert wrong.seconds > 1.2 * right.seconds
    hopeful, doubtful = (
        simulate(cluster(of), candidates(p), world(), replace(policy, window=2), of) for p in (0.9, 0.3)
    )
    assert hopeful.plan.tokens_per_s > doubtful.plan.tokens_per_s
    assert hopeful.seconds == pytest.approx(doubtful.seconds), "beliefs alone move no time"


def test_auto_finds_out_what_belief_got_wrong() -> None:
    """Believed to be right at 90 %, the drafter is at 5 %: a fixed window loses to plain decoding, auto does not."""
    of = requests(8, 8, median=2000.0)
    found, real = candidates(0.9), world(0.05)
    plain, fixed, auto = (
        simulate(cluster(of), found, real, Policy(mode=mode, max_window=W), of).seconds
        for mode in ("off", "coupled", "auto")
    )
    assert fixed > 1.1 * plain
    assert auto < 1.03 * plain


def test_auto_ends_requests_no_later_than_a_fixed_window_that_is_right() -> None:
    """On average: windows are chosen for the speed of all, so the last of them may wait for rounds of others."""
    of, found = requests(16, 8, median=2000.0), candidates(0.7)
    real = world(0.7)
    fixed, auto = (
        [simulate(cluster(of), found, real, Policy(mode=mode, max_window=W), of, seed=(k,)) for k in range(4)]
        for mode in ("coupled", "auto")
    )
    assert np.mean([one.finish_s for one in auto]) < np.mean([one.finish_s for one in fixed])
    assert sum(one.seconds for one in auto) < 1.05 * sum(one.seconds for one in fixed)


def test_delays_cost_time() -> None:
    of = requests(8, 4, median=600.0)
    policy = Policy(max_window=W)
    none = NO_DELAYS
    free = simulated(of, policy, delays=none).seconds
    for name in ("start_s", "replan_s"):
        assert simulated(of, policy, delays={**none, name: 2.0}).seconds > free
    ahead = Policy(mode="decoupled", max_window=W)
    assert simulated(of, ahead, delays={**none, "rollback_s": 0.05}).seconds > simulated(of, ahead, delays=none).seconds


def check_between_passes() -> None:
    """Seconds between passes are as good for drafters elsewhere as those of passes."""
    of, policy, host_s = requests(), Policy(mode="decoupled", max_window=1), 0.006
    long, short = (candidates(base_s=base_s, step_s=0.012) for base_s in (0.010, 0.010 - host_s))
    plan = placed(cluster(of), long, policy)
    whole = simulate(cluster(of), long, world(), policy, of, plan=plan)
    parts = simulate(cluster(of), short, world(delays=NO_DELAYS | {"host_s": host_s}), policy, of, plan=plan)
    assert parts.finish_s == pytest.approx(whole.finish_s)


def test_drafters_draft_between_passes() -> None:
    check_between_passes()


def test_drafters_that_stand_still_between_passes_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "round_of", host_afterwards)
    with pytest.raises(AssertionError):
        check_between_passes()


def test_requests_that_do_not_fit_wait() -> None:
    of, found = requests(16, 4), candidates()
    tight = replace(
        found,
        verifiers=(
            replace(
                found.verifiers[0],
                footprint=replace(found.verifiers[0].footprint, weights_bytes=10.0, request_bytes=1.0),
                capacity_bytes=14.0,
            ),
        ),
    )
    real = world()
    few, all_at_once = (simulate(cluster(of), belief, real, Policy(mode="off"), of) for belief in (tight, found))
    assert few.plan.requests_per_engine == 4
    assert few.seconds > all_at_once.seconds
    check(few, of)


@settings(max_examples=15)
@given(st.floats(0.3, 0.9), st.floats(0.0, 1.0), st.sampled_from(MODES[1:]))
def test_a_better_drafter_never_makes_the_predicted_plan_worse(p: float, share: float, mode: SimulatedMode) -> None:
    of = requests()
    worse, better = (
        placed(cluster(of), candidates(q), Policy(mode=mode, max_window=W)) for q in (p, p + share * (1.0 - p))
    )
    assert better.tokens_per_s >= worse.tokens_per_s * (1 - 1e-9)


def test_nothing_is_planned_or_simulated_that_cannot_be() -> None:
    of, found = requests(), candidates()
    with pytest.raises(AssertionError):
        simulate(replace(cluster(of), requests=3), found, world(), Policy(), of)
    with pytest.raises(PlanError, match="no such plan fits"):
        placed(cluster(of), replace(found, drafters=()), Policy(mode="coupled"))
