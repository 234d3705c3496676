"""The published cost model and algorithms on cases that were worked out by hand, and against brute force."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import paper_algorithms as paper
from benchmarks.paper_algorithms import (
    Line,
    PaperCosts,
    PaperPlan,
    plan,
    probability,
    reconfigure,
    tau,
    tau_coupled,
    tgs,
    tgs_coupled,
    windows,
)
from specactor.errors import PlanError
from specactor.rollout.speculation.costs import Grid


def line(per_request_s: float, base_s: float) -> Line:
    return Line(per_request_s=per_request_s, base_s=base_s)


BY_HAND = PaperCosts(
    draft={1: line(0.1, 1.0)},
    verify={(1, 1): line(0.2, 2.0), (1, 2): line(0.3, 2.0), (1, 3): line(0.4, 2.0), (1, 4): line(0.5, 2.0)},
)
"""Seconds; w_max(w) = max(ceil((1 + w) 0.1 / 0.1), ceil(2 / 1)) = w + 1: all four windows are looked at."""


def check_tau(of: Callable[[int, float], float]) -> None:
    """p = 0.5: w = 1: .5 (1/2) + 1 (.5) = .75;  w = 2: .5 (1/2) + .25 (2/2) + 2 (.25) = 1.  p = 0.8, w = 3:
    .2 (1/2) + .16 (2/2) + .128 (3/2) + 3 (.512) = 1.988."""
    assert of(1, 0.5) == pytest.approx(0.75)
    assert of(2, 0.5) == pytest.approx(1.0)
    assert of(3, 0.8) == pytest.approx(1.988)


def test_tau_as_published() -> None:
    check_tau(tau)
    with pytest.raises(AssertionError):
        check_tau(tau_coupled)  # seeded: without the half


def test_tau_without_the_half() -> None:
    """p = 0.5, w = 2: .5 (1) + .25 (2) + 2 (.25) = 1.5."""
    assert tau_coupled(2, 0.5) == pytest.approx(1.5)


@given(st.integers(1, 16), st.floats(0, 1))
def test_outcomes_have_probabilities(window: int, p: float) -> None:
    assert sum(probability(a, window, p) for a in range(window + 1)) == pytest.approx(1.0)
    assert tau(window, 0.0) == 0.5
    assert tau(window, 1.0) == window


def check_speeds(coupled: Callable[..., float]) -> None:
    """b = 4, w = 2: D = 1.4, V = 3.2: decoupled max(2.8, 3.2) = 3.2, coupled 2.8 + 3.2 = 6."""
    case = {"g_d": 1, "g_v": 1, "window": 2, "requests": 4, "p": 0.5}
    assert tgs(BY_HAND, **case) == pytest.approx(1.0 / 3.2)  # type: ignore[arg-type]
    assert coupled(BY_HAND, **case) == pytest.approx(1.5 / 6.0)


def charged_the_longer(costs: PaperCosts, *, g_d: int, g_v: int, window: int, requests: float, p: float) -> float:
    """Wrong: coupled drafting hidden behind the verify."""
    return tau_coupled(window, p) / max(window * costs.draft[g_d].at(requests), costs.verify[g_v, window].at(requests))


def test_coupled_pays_for_both_and_decoupled_for_the_longer() -> None:
    check_speeds(tgs_coupled)
    with pytest.raises(AssertionError):
        check_speeds(charged_the_longer)


def test_windows_up_to_the_bound() -> None:
    assert list(windows(BY_HAND, 1, 1)) == [1, 2, 3, 4]
    flat = PaperCosts(draft={1: line(0.1, 1.0)}, verify={(1, w): line(0.15, 2.9) for w in range(1, 9)})
    assert list(windows(flat, 1, 1)) == [1, 2, 3], "max(ceil(1.5), ceil(2.9)) = 3"
    free = PaperCosts(draft={1: line(0.0, 0.0)}, verify=flat.verify)
    assert list(windows(free, 1, 1)) == list(range(1, 9)), "as far as verifies were measured"


def test_algorithm_1_by_hand() -> None:
    """G = 2, B = 4: b = ceil(2 * 4 / 2) = 4, D = 1.4; V = 2.8, 3.2, 3.6, 4. p = 0.8: tau = .9, 1.54, 1.988, 2.2952.
    w=1: .9 / 2.8 = .321; w=2: 1.54 / 3.2 = .481; w=3: 1.988 / 4.2 = .473; w=4: 2.2952 / 5.6 = .410."""
    found = plan(BY_HAND, devices=2, requests=4, p=0.8)
    assert found == PaperPlan(g_d=1, g_v=1, window=2, requests=4, tgs=pytest.approx(1.54 / 3.2))
    assert plan(BY_HAND, devices=4, requests=10, p=0.8).requests == 5, "ceil(2 * 10 / 4)"


COSTS = st.builds(line, st.floats(0.001, 1), st.floats(0.001, 1))


@st.composite
def clusters(draw: st.DrawFn) -> PaperCosts:
    sizes = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3, unique=True))
    return PaperCosts(
        draft={g: draw(COSTS) for g in (1, 2)},
        verify={(g, w): draw(COSTS) for g in sizes for w in range(1, 5)},
    )


@given(clusters(), st.integers(5, 32), st.integers(1, 64), st.floats(0, 1))
def test_algorithm_1_is_the_loop_over_everything(costs: PaperCosts, devices: int, requests: int, p: float) -> None:
    speeds = []
    for g_v in {g for g, _ in costs.verify}:
        for g_d in range(1, g_v + 1):
            if g_d not in costs.draft or g_d + g_v > devices:
                continue
            b = ceil((g_d + g_v) * requests / devices)
            for w in range(1, 5):
                v, d = costs.verify[g_v, w], costs.draft[g_d]
                if w > max(ceil(v.per_request_s / d.per_request_s), ceil(v.base_s / d.base_s)):
                    break
                expected = sum(p**a * (1 - p) * (a + 1) / 2 for a in range(w)) + w * p**w
                speeds.append(expected / max(w * (b * d.per_request_s + d.base_s), b * v.per_request_s + v.base_s))
    assert plan(costs, devices=devices, requests=requests, p=p).tgs == pytest.approx(max(speeds))


def test_algorithm_1_never_says_off() -> None:
    assert plan(BY_HAND, devices=2, requests=4, p=0.0).window >= 1


def test_algorithm_1_refuses_what_cannot_be() -> None:
    with pytest.raises(PlanError, match="got 1 devices"):
        plan(BY_HAND, devices=1, requests=4, p=0.5)
    larger = PaperCosts(draft={2: line(0.1, 1.0)}, verify=BY_HAND.verify)
    with pytest.raises(PlanError, match="expected a drafter no larger than a verifier"):
        plan(larger, devices=8, requests=4, p=0.5)


def test_algorithm_2_by_hand() -> None:
    """b = 1: D = 1.1; V = 2.2, 2.3, 2.4, 2.5. p = 0.1: decoupled w=1: (.45 + .1) / 2.2 = .25; w=2: .56 / 2.3 = .243;
    coupled w=1: (.9 + .1) / 3.3 = .303; w=2: 1.1 / 4.5 = .244. So coupled with 1. p = 0.9 is not below the average."""
    chosen = plan(BY_HAND, devices=2, requests=4, p=0.8)
    assert reconfigure(BY_HAND, chosen, [0.9, 0.1]) == [("decoupled", 2), ("coupled", 1)]
    assert reconfigure(BY_HAND, chosen, [0.1, 0.1]) == [("decoupled", 2)] * 2, "nobody is below"
    assert reconfigure(BY_HAND, chosen, []) == []


def test_algorithm_2_can_keep_a_poor_request_decoupled() -> None:
    """Slow drafting, p = .95 below an average of .97. w=2 decoupled: (.025 + .0475 + 1.805) / max(6, 2.3) = .313;
    coupled: (.05 + .095 + 1.805) / 8.3 = .235."""
    slow = PaperCosts(draft={1: line(0.0, 3.0)}, verify=BY_HAND.verify)
    chosen = PaperPlan(g_d=1, g_v=1, window=2, requests=4, tgs=1.0)
    assert reconfigure(slow, chosen, [0.99, 0.95])[1][0] == "decoupled"


def test_lines_are_fitted_to_tables() -> None:
    axis = (1.0, 8.0, 64.0)
    verify = Grid(requests=axis, per_request=(1.0, 3.0), seconds=tuple((0.2 * n + 2, 0.4 * n + 2) for n in axis))
    draft = Grid(requests=axis, per_request=(1.0, 2.0), seconds=tuple((0.1 * n + 1, 0.2 * n + 2) for n in axis))
    fitted = PaperCosts.fit(draft={1: draft}, verify={1: verify}, max_window=3)
    for found, expected in (
        (fitted.draft[1], line(0.1, 1.0)),
        (fitted.verify[1, 1], line(0.2, 2.0)),
        (fitted.verify[1, 2], line(0.3, 2.0)),
        (fitted.verify[1, 3], line(0.4, 2.0)),
    ):
        assert (found.per_request_s, found.base_s) == pytest.approx((expected.per_request_s, expected.base_s))
    constant = Line.fit((4.0,), (2.0,))
    assert (constant.at(1), constant.at(100)) == pytest.approx((2.0, 2.0))
    assert Line.fit((1.0, 2.0), (2.0, 1.0)).per_request_s == 0.0, "never falling"


def test_ties_keep_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "tgs", lambda *_, **__: 1.0)
    assert plan(BY_HAND, devices=2, requests=4, p=0.8).window == 1
