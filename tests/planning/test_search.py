"""The search is as good as brute force, charges every device, and says off where nothing else pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, product
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_algorithms import PaperCosts
from benchmarks.paper_algorithms import plan as algorithm_1
from specactor.errors import PlanError
from specactor.planning.plans import (
    Cluster,
    DrafterEngine,
    DrafterOption,
    Footprint,
    Pace,
    RolloutPlan,
    VerifierOption,
    coupled_tokens,
    running,
)
from specactor.planning.search import search
from specactor.rollout.decoupled.protocol import AHEAD
from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.costs import Grid
from tests import test_structure
from tests.lib.pipelined import pipelined
from tests.planning.search_cases import AXIS, Case, W, cases, drafter, drafting, linear, verifier


def by_brute_force(cluster: Cluster, verifiers: list[VerifierOption], option: DrafterOption) -> float:
    """Of every number of engines and every window, all windows verified that are ready."""
    best = 0.0
    for v in verifiers:
        most = cluster.devices // v.devices
        for engines in range(1, most + 1):
            b = ceil(cluster.requests / engines)
            best = max(best, cluster.requests / v.costs.plain_s(b))
            for w in range(1, W + 1):
                seconds = v.costs.verify_s(b, b * (1 + w)) + v.costs.draft_s("small", b, w)
                best = max(best, cluster.requests * coupled_tokens(option.survival, w) / seconds)
                for own, drafting_engines in product(option.engines, range(1, cluster.devices + 1)):
                    if engines * v.devices + drafting_engines * own.devices > cluster.devices:
                        continue
                    rounds = pipelined(option.survival, w)
                    draft_s = own.seconds.at(ceil(cluster.requests / drafting_engines), w + 1) + cluster.message_s
                    seconds = max(v.costs.verify.at(b, 1 + w * rounds.ready), draft_s)
                    best = max(best, cluster.requests * rounds.tokens / seconds)
    return best


@given(cases())
def test_nothing_is_faster(case: Case) -> None:
    cluster, verifiers, option = case
    found = search(cluster, verifiers, [option], max_window=W)
    assert found[0].tokens_per_s >= by_brute_force(*case) * (1 - 1e-9)
    assert found == sorted(found, key=lambda plan: -plan.tokens_per_s)
    assert search(cluster, verifiers, [option], max_window=W) == found


def of_all(plan: RolloutPlan, cluster: Cluster) -> float:
    return plan.tokens_per_s / cluster.devices


def of_the_used(plan: RolloutPlan, cluster: Cluster) -> float:
    """Wrong: idle devices are free."""
    return plan.tokens_per_s / (cluster.devices - plan.idle_devices)


def check_charges(case: Case, charge: Callable[[RolloutPlan, Cluster], float]) -> None:
    cluster, verifiers, option = case
    for plan in search(cluster, verifiers, [option], max_window=W):
        assert plan.tokens_per_s_per_device == pytest.approx(charge(plan, cluster))
        assert plan.verifiers.devices + plan.drafters.devices + plan.idle_devices == cluster.devices
        assert plan.idle_devices >= 0


@settings(max_examples=20)
@given(cases())
def test_every_device_is_charged(case: Case) -> None:
    check_charges(case, of_all)


def test_free_idle_devices_are_caught() -> None:
    case = (Cluster(devices=5, requests=8), [verifier(2)], drafter(0.5))
    check_charges(case, of_all)
    with pytest.raises(AssertionError):
        check_charges(case, of_the_used)


@given(cases(), st.floats(0, 1))
def test_a_better_drafter_never_makes_the_plan_slower(case: Case, share: float) -> None:
    cluster, verifiers, option = case
    risen = accumulate((s + share * (1 - s) for s in option.survival), min)  # rounding must not make it rise with j
    better = replace(option, survival=tuple(risen))
    before = search(cluster, verifiers, [option], max_window=W)[0].tokens_per_s
    assert search(cluster, verifiers, [better], max_window=W)[0].tokens_per_s >= before * (1 - 1e-9)


@given(cases())
def test_without_acceptance_the_answer_is_off(case: Case) -> None:
    cluster, verifiers, option = case
    hopeless = replace(option, survival=(0.0,) * (W + 1))
    found = search(cluster, verifiers, [hopeless], max_window=W)
    assert [plan.mode for plan in found] == ["off"] * len(verifiers)
    assert (found[0].mode, found[0].window) == ("off", 0)
    assert found[0].speedup == 1.0


def test_off_also_where_the_plain_step_was_measured_slower_than_a_verify() -> None:
    slow = replace(verifier().costs, plain=Grid(requests=AXIS, per_request=(1.0,), seconds=((9.0,), (9.0,))))
    found = search(Cluster(devices=2, requests=4), [VerifierOption(devices=1, costs=slow)], [drafter(0.0)])
    assert found[0].mode == "off"


@settings(max_examples=20)
@given(cases(), st.integers(1, 4))
def test_more_devices_never_make_the_plan_slower(case: Case, more: int) -> None:
    cluster, verifiers, option = case
    larger = replace(cluster, devices=cluster.devices + more)
    before = search(cluster, verifiers, [option], max_window=W)[0].tokens_per_s
    assert search(larger, verifiers, [option], max_window=W)[0].tokens_per_s >= before * (1 - 1e-9)


@settings(max_examples=20)
@given(cases(), st.floats(0.05, 0.99))
def test_no_slower_than_the_papers_plan_in_the_same_model(case: Case, p: float) -> None:
    cluster, verifiers, option = case
    option = replace(option, survival=survival_of(p, W + 1))
    own = option.engines[0]
    lines = PaperCosts.fit(
        draft={own.devices: own.seconds}, verify={v.devices: v.costs.verify for v in verifiers}, max_window=W
    )
    if own.devices + min(v.devices for v in verifiers if v.devices >= own.devices) > cluster.devices:
        return
    theirs = algorithm_1(lines, devices=cluster.devices, requests=cluster.requests, p=p)
    groups = cluster.devices // (theirs.g_d + theirs.g_v)
    chosen = next(v for v in verifiers if v.devices == theirs.g_v)
    rounds = pipelined(option.survival, theirs.window)
    b = ceil(cluster.requests / groups)
    seconds = max(
        chosen.costs.verify.at(b, 1 + theirs.window * rounds.ready),
        own.seconds.at(b, theirs.window + 1) + cluster.message_s,
    )
    ours = search(cluster, verifiers, [option], max_window=W)[0]
    assert ours.tokens_per_s >= cluster.requests * rounds.tokens / seconds * (1 - 1e-9)


# --- single plans -----------------------------------------------------------------------------------------------------


def test_coupled_by_hand() -> None:
    """2 engines of 4 requests: verify .01 + 4 x 3 x .0002 = .0124, draft 2 x .001: 1.75 tokens per .0144 s for 8."""
    found = search(Cluster(devices=2, requests=8), [verifier(coupled=drafting(0.001, 0.0))], [drafter(0.5)])
    best = next(plan for plan in found if plan.mode == "coupled")
    speeds = {w: 8 * coupled_tokens((0.5, 0.25, 0.125), w) / (0.01 + 4 * (1 + w) * 2e-4 + w * 1e-3) for w in (1, 2, 3)}
    assert best.window == max(speeds, key=speeds.__getitem__) == 2
    assert best.tokens_per_s == pytest.approx(8 * 1.75 / 0.0144)
    assert best.speedup == pytest.approx(best.tokens_per_s / (8 / 0.0108))
    assert best.reason == "1.75 tokens per round of 12.40 ms verify + 2.00 ms draft"


def test_decoupled_by_hand() -> None:
    """Drafting is slow: w = 1 takes 2 x .02 s + .001 s of messages, more than a verify. p = .5: 1.2 tokens a round."""
    cluster = Cluster(devices=2, requests=4, message_s=0.001)
    found = search(cluster, [verifier()], [drafter(0.5, drafting(0.02, 0.0))], max_window=1)
    plan = next(plan for plan in found if plan.mode == "decoupled")
    assert (plan.mode, plan.drafter, plan.window) == ("decoupled", "small", 1)
    assert (plan.verifiers.engines, plan.drafters.engines) == (1, 1)
    assert (plan.round_s, plan.tokens_per_round) == pytest.approx((0.041, 1.2))
    assert found[0].mode == "off", "2 verifiers, no drafter"


def test_one_drafter_serves_many_verifiers() -> None:
    cluster = Cluster(devices=16, requests=64, message_s=0.0)
    many = [verifier(1, linear(0.01, 0.002, 1e-5))]
    free = search(cluster, many, [drafter(0.95, drafting(1e-5, 0.0))], max_window=W)[0]
    assert (free.mode, free.verifiers.engines, free.drafters.engines) == ("decoupled", 13, 1), "5 requests each"
    busy = search(cluster, many, [drafter(0.95, drafting(0.0005, 2e-4))], max_window=W)[0]
    assert busy.drafters.engines > 1
    assert busy.tokens_per_s < free.tokens_per_s


def test_drafters_that_are_not_needed_stay_idle() -> None:
    found = search(Cluster(devices=9, requests=8), [verifier(8)], [drafter(0.9, drafting(1e-5, 0.0))])
    assert next(plan for plan in found if plan.mode == "decoupled").idle_devices == 0
    found = search(Cluster(devices=12, requests=8), [verifier(8)], [drafter(0.9, drafting(1e-5, 0.0))])
    plan = next(plan for plan in found if plan.mode == "decoupled")
    assert (plan.drafters.engines, plan.idle_devices) == (1, 3)


def running_drafter(p: float, token_s: float, **more: object) -> DrafterOption:
    """Of a process that was measured: so many seconds per token."""
    own = drafting(token_s, 0.0)
    measured = Grid(requests=AXIS, per_request=(1.0,), seconds=((token_s,), (token_s,)))
    engines = (DrafterEngine(devices=1, seconds=own, token_s=measured),)
    return DrafterOption(name="small", survival=survival_of(p, W + 1), engines=engines, **more)  # type: ignore[arg-type]


def ahead(seconds: float) -> Grid:
    return Grid(requests=AXIS, per_request=(1.0,), seconds=((seconds,), (seconds,)))


def fastest_of(found: list[RolloutPlan], mode: str) -> RolloutPlan:
    return next(plan for plan in found if plan.mode == mode)


def test_a_process_that_was_measured_is_not_waited_for() -> None:
    """Drafting takes three quarters of a verify: whole windows are promised, and half of them are there."""
    cluster = Cluster(devices=2, requests=4)
    verify = linear(0.010, 0.0, 1e-5)
    promised = search(cluster, [verifier(1, verify)], [drafter(0.9, drafting(0.004, 0.0))], max_window=W)
    found = fastest_of(search(cluster, [verifier(1, verify)], [running_drafter(0.9, 0.004)], max_window=W), "decoupled")
    assert found.tokens_per_round < 0.9 * fastest_of(promised, "decoupled").tokens_per_round
    assert found.round_s < 0.011, "it does not last until windows are there"
    expected = running(
        survival_of(0.9, W + 1),
        found.window,
        Pace(requests=4, round_s=verify, token_s=0.004, message_s=cluster.message_s, most=AHEAD * W),
    )
    assert (found.tokens_per_round, found.round_s) == pytest.approx((expected.tokens, expected.round_s))
    assert "tokens are drafted" in found.reason


def test_what_the_engine_does_beside_the_verify_is_charged() -> None:
    """A tenth of a plain step for drafts that are right at .4, which come as slowly: off."""
    cluster = Cluster(devices=2, requests=4)
    option = [running_drafter(0.4, 0.004)]
    free = search(cluster, [verifier(1)], option, max_window=W)
    charged = search(cluster, [verifier(1, ahead_s=ahead(0.001))], option, max_window=W)
    one, other = fastest_of(free, "decoupled"), fastest_of(charged, "decoupled")
    assert other.round_s > one.round_s + 0.0009
    assert charged[0].mode == "off"
    lasting = search(cluster, [verifier(1, ahead_s=ahead(0.001))], [drafter(0.9, drafting(1e-4, 0.0))], max_window=1)
    assert fastest_of(lasting, "decoupled").round_s > 0.011


@settings(max_examples=20)
@given(st.floats(0.002, 0.02), st.integers(1, 16))
def test_drafts_that_are_never_right_lose_to_the_same_engine(token_s: float, requests: int) -> None:
    cluster = Cluster(devices=2, requests=requests)
    found = search(
        cluster, [verifier(2), verifier(1, ahead_s=ahead(1e-4))], [running_drafter(1e-6, token_s)], max_window=W
    )
    alone = requests / verifier(1).costs.plain_s(requests)
    assert all(plan.tokens_per_s < alone for plan in found if plan.mode == "decoupled")
    assert found[0].mode == "off"


def test_memory_bounds_the_requests_at_once() -> None:
    held = {"footprint": Footprint(weights_bytes=60.0, request_bytes=5.0), "capacity_bytes": 100.0}
    cluster = Cluster(devices=2, requests=64)
    small = Footprint(weights_bytes=10.0, request_bytes=5.0)
    option = drafter(0.9, drafting(1e-4, 0.0), footprint=small)
    found = search(cluster, [verifier(1, coupled=drafting(1e-4, 0.0), **held)], [option])
    by_mode = {plan.mode: plan for plan in found}
    assert by_mode["off"].requests_per_engine == 8, "(100 - 60) / 5"
    assert by_mode["coupled"].requests_per_engine == 3, "(100 - 70) / 10"
    assert by_mode["decoupled"].requests_per_engine == 8
    assert by_mode["off"].tokens_per_s == pytest.approx(16 / 0.0116), "48 wait"
    assert "more requests wait" in by_mode["off"].reason
    with pytest.raises(PlanError, match=r"verifiers of \[1\]; expected one that fits"):
        search(
            cluster, [verifier(1, footprint=Footprint(weights_bytes=200.0, request_bytes=1.0), capacity_bytes=100.0)]
        )
    crowded = DrafterEngine(devices=1, seconds=drafting(1e-4, 0.0), capacity_bytes=12.0)
    none = search(cluster, [verifier(1, **held)], [replace(option, engines=(crowded,))])
    assert {plan.mode for plan in none} == {"off"}, "no room for a request at the drafter"


def test_ties_are_off() -> None:
    """A draft that costs what it brings."""
    even = Grid(requests=AXIS, per_request=(1.0, 2.0), seconds=((0.01, 0.019),) * 2)
    own = Grid(requests=AXIS, per_request=(1.0,), seconds=((0.001,),) * 2)
    found = search(Cluster(devices=1, requests=1), [verifier(1, even, own)], [drafter(1.0)], max_window=1)
    assert found[0].tokens_per_s == pytest.approx(found[1].tokens_per_s)
    assert found[0].mode == "off"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(AssertionError, match="devices=0"):
        Cluster(devices=0, requests=1)
    with pytest.raises(PlanError, match="means plain decoding"):
        DrafterOption(name="off", survival=(0.5,))
    with pytest.raises(PlanError, match="survival: got"):
        DrafterOption(name="x", survival=(0.5, 0.9))
    with pytest.raises(AssertionError, match="a window of 0 goes with mode and drafter off"):
        replace(search(Cluster(devices=1, requests=1), [verifier()])[0], mode="coupled")
    assert Footprint(weights_bytes=1.0, request_bytes=0.0) is not None
    assert VerifierOption(devices=1, costs=verifier().costs, capacity_bytes=inf).requests() is None


def test_the_search_does_not_know_where_costs_come_from() -> None:
    for module in ("planning.plans", "planning.search"):
        text = test_structure.file_of(module).read_text()
        assert not any(f"planning.{other} import" in text for other in ("rooflines", "model_shapes"))
