"""Algorithm 2 on live estimates: every request as a scalar loop would choose, in a small part of a decode step."""

from __future__ import annotations

import time
import timeit
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor.planning.plans import coupled_tokens, pipelined
from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.costs import CostTable, Grid
from specactor.rollout.speculation.reconfiguration import (
    PLAIN,
    DrafterOffer,
    DraftPlan,
    LiveCosts,
    reconfigure,
    speeds,
    worths,
)

W = 4
AXIS = (1.0, 64.0)
EACH = range(1, W + 2)
"""Tokens per request of a verify."""


def grid(base_s: float, per_request_s: float, per_each_s: float) -> Grid:
    each = (1.0, 2.0, 9.0)
    return Grid(
        requests=AXIS,
        per_request=each,
        seconds=tuple(tuple(base_s + n * per_request_s + k * per_each_s for k in each) for n in AXIS),
    )


TABLE = CostTable(
    model="m",
    device="d",
    date="",
    verify=grid(0.010, 1e-4, 0.0005),
    plain=Grid(requests=AXIS, per_request=(1.0,), seconds=((0.0095,), (0.016,))),
    drafters={"small": grid(1e-4, 1e-5, 0.002)},
)
REMOTE = grid(1e-4, 1e-5, 0.002)
DECOUPLED = DraftPlan(mode="decoupled", drafter="small", window=2)


def costs(requests: int = 8, *, remote: Grid | None = REMOTE, drafter: str = "small") -> LiveCosts:
    return LiveCosts.of(
        TABLE, requests=requests, max_window=W, drafter=drafter, remote=remote, served=2 * requests, message_s=2e-4
    )


def survivals(*rates: float) -> np.ndarray:
    return np.array([[p ** (j + 1) for j in range(W)] for p in rates])


def reconfigured(
    survival_BW: np.ndarray, live: LiveCosts, current: list[DraftPlan], **fields: object
) -> list[DraftPlan]:
    """With one drafter, as published."""
    offer = DrafterOffer(drafter="small", survival=survival_BW, costs=live)
    return reconfigure([offer], current, **fields)  # type: ignore[arg-type]


def one_by_one(survival: tuple[float, ...], requests: int) -> dict[tuple[str, int], float]:
    """Speeds by (mode, window), by the scalar functions of the search."""
    found = {("off", 0): 1 / TABLE.plain_s(requests)}
    for w in range(1, W + 1):
        verify_s = TABLE.verify_s(requests, requests * (1 + w))
        found["coupled", w] = coupled_tokens(survival, w) / (verify_s + TABLE.draft_s("small", requests, w))
        rounds = pipelined(survival, w)
        whole = np.interp(
            1 + w * rounds.ready, range(1, W + 2), [TABLE.verify.at(requests, k) for k in range(1, W + 2)]
        )
        found["decoupled", w] = rounds.tokens / max(whole, REMOTE.at(2 * requests, w + 1) + 2e-4)
    return found


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.floats(0.01, 1), min_size=W, max_size=W), min_size=1, max_size=6))
def test_every_request_as_one_by_one(steps: list[list[float]]) -> None:
    survival_BW = np.cumprod(np.array(steps), axis=1)
    live = costs()
    expected = [one_by_one(tuple(row), 8) for row in survival_BW.tolist()]
    for mode in ("coupled", "decoupled"):
        found = speeds(survival_BW, live, mode)
        wanted = [[speed for (m, _), speed in row.items() if m == mode] for row in expected]
        assert found == pytest.approx(np.array(wanted))
    chosen = reconfigured(survival_BW, live, [PLAIN] * len(steps), margin=0.0)
    for plan, row in zip(chosen, expected, strict=True):
        assert row[plan.mode, plan.window] == pytest.approx(max(row.values()))


def test_a_request_that_accepts_nothing_decodes_plainly() -> None:
    assert reconfigured(survivals(0.9, 0.0), costs(), [DECOUPLED] * 2)[1] == PLAIN
    slow_plain = replace(TABLE, plain=Grid(requests=AXIS, per_request=(1.0,), seconds=((9.0,), (9.0,))))
    live = LiveCosts.of(slow_plain, requests=8, max_window=W, drafter="small")
    assert reconfigured(survivals(0.0), live, [DECOUPLED]) == [PLAIN]


def test_modes_that_are_not_there_are_not_chosen() -> None:
    every = [DECOUPLED] * 2
    rates = survivals(0.9, 0.8)
    only_coupled = reconfigured(rates, costs(remote=None), every)
    assert {plan.mode for plan in only_coupled} == {"coupled"}
    only_remote = reconfigured(rates, costs(drafter="gone"), [PLAIN] * 2)
    assert {plan.mode for plan in only_remote} <= {"off", "decoupled"}


def test_small_gains_do_not_switch() -> None:
    rates = survivals(0.7)
    best = reconfigured(rates, costs(), [PLAIN], margin=0.0)[0]
    found = one_by_one(tuple(rates[0]), 8)
    second = max((key for key in found if key != (best.mode, best.window) and key[1]), key=found.__getitem__)
    gain = found[best.mode, best.window] / found[second] - 1
    now = DraftPlan(mode="coupled" if second[0] == "coupled" else "decoupled", drafter="small", window=second[1])
    assert reconfigured(rates, costs(), [now], margin=gain * 1.1) == [now]
    assert reconfigured(rates, costs(), [now], margin=gain * 0.9) == [best]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=W, max_size=W), st.floats(0, 1))
def test_more_acceptance_never_promises_less(steps: list[float], share: float) -> None:
    survival_BW = np.cumprod(np.array([steps]), axis=1)
    better_BW = np.minimum.accumulate(survival_BW + share * (1 - survival_BW), axis=1)  # rounding may make it rise
    live = costs()
    assert (speeds(better_BW, live, "coupled") >= speeds(survival_BW, live, "coupled") * (1 - 1e-12)).all()


def offers(*rates: tuple[float, ...], live: LiveCosts) -> list[DrafterOffer]:
    """Of drafters a, b, .., with one rate per request."""
    return [
        DrafterOffer(drafter=name, survival=survivals(*of), costs=live) for name, of in zip("abcd", rates, strict=False)
    ]


chances = st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3)


@settings(deadline=None, max_examples=40)
@given(st.lists(chances, min_size=1, max_size=3), st.one_of(st.none(), st.floats(1, 500)))
def test_the_best_of_several_drafters_and_never_worse_without_one(rates: list[list[float]], pace: float | None) -> None:
    live = costs()
    every = offers(*map(tuple, rates), live=live)

    def promised(of: list[DrafterOffer], plans: list[DraftPlan]) -> list[float]:
        rows = {o.drafter: o for o in of}
        found = []
        for i, plan in enumerate(plans):
            table = worths(rows.get(plan.drafter, of[0]), plan.mode, pace=pace)
            found.append(float(table[i, max(plan.window, 1) - 1]))
        return found

    plans = reconfigure(every, [PLAIN] * 3, margin=0.0, pace=pace)
    best = promised(every, plans)
    for i in range(3):
        all_of = [float(worths(o, mode, pace=pace)[i].max()) for o in every for mode in ("off", "coupled", "decoupled")]
        assert best[i] == pytest.approx(max(all_of))
    fewer = reconfigure(every[:-1], [PLAIN] * 3, margin=0.0, pace=pace) if every[1:] else [PLAIN] * 3
    assert all(more >= less - 1e-9 for more, less in zip(best, promised(every, fewer), strict=True))
    better = [*every[:-1], replace(every[-1], survival=every[-1].survival ** 0.5)]
    only_coupled = [replace(o, costs=replace(live, decoupled_draft_s=None)) for o in (*every, *better)]
    before, after = only_coupled[: len(every)], only_coupled[len(every) :]
    worse = reconfigure(before, [PLAIN] * 3, margin=0.0, pace=pace)
    plans = reconfigure(after, [PLAIN] * 3, margin=0.0, pace=pace)
    assert all(now >= then - 1e-9 for now, then in zip(promised(after, plans), promised(before, worse), strict=True)), (
        "a better drafter promises no less"
    )


def test_requests_choose_between_drafters_and_a_switch_has_to_pay() -> None:
    live = costs(remote=None)
    a, b = DraftPlan(mode="coupled", drafter="a", window=4), DraftPlan(mode="coupled", drafter="b", window=4)
    plans = reconfigure(offers((0.9, 0.2), (0.2, 0.9), live=live), [PLAIN] * 2)
    assert [plan.drafter for plan in plans] == ["a", "b"]
    near = offers((0.9, 0.9), (0.903, 0.95), live=live)
    assert [plan.drafter for plan in reconfigure(near, [a, a])] == ["a", "b"]
    assert [plan.drafter for plan in reconfigure(near, [b, b])] == ["b", "b"]
    gone = reconfigure(offers((0.9,), live=live), [b], margin=9.0)
    assert gone[0].drafter == "a", "a plan of a drafter that is gone promises nothing"


def test_a_pace_prices_rows_by_what_others_make_of_them() -> None:
    """Alone, a long bad draft pays, as it shares the round's base; where others are fast, a short good one does."""
    steps = np.array([[0.33, 0.325, 0.32, 0.315]])
    live = costs(requests=8, remote=None)
    every = [
        DrafterOffer(drafter="long", survival=steps, costs=live),
        DrafterOffer(drafter="short", survival=np.array([[0.7, 0.0, 0.0, 0.0]]), costs=live),
    ]
    chosen = [reconfigure(every, [PLAIN], pace=pace)[0].drafter for pace in (1.0, 110.0)]
    assert chosen == ["long", "short"]


def test_on_the_estimates_of_a_running_engine() -> None:
    model = AcceptanceModel(max_window=W)
    for _ in range(40):
        model.observe("easy", W, W, asked=W)
        model.observe("hard", W, 0, asked=W)
    ids = ["easy", "new", "hard"]
    chosen = reconfigured(model.survivals(ids, covered=False), costs(), [DECOUPLED] * 3)
    assert chosen[0].window > chosen[2].window


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(AssertionError):
        reconfigured(survivals(0.5, 0.5), costs(), [PLAIN])
    with pytest.raises(AssertionError):
        reconfigured(np.ones((1, 3)), costs(), [PLAIN])
    with pytest.raises(AssertionError):
        LiveCosts.of(TABLE, requests=1, max_window=W, remote=REMOTE)
    assert reconfigured(np.ones((0, W)), costs(), []) == []


def test_256_requests_take_less_than_a_millisecond() -> None:
    """About 0.2 ms for the choice and 0.4 ms for the costs of a new number of requests, where it was measured."""
    rates = np.random.default_rng(0).uniform(0.3, 0.95, (256, 1))
    survival_BW = np.cumprod(np.repeat(rates, 16, axis=1), axis=1)
    live = LiveCosts.of(TABLE, requests=256, max_window=16, drafter="small", remote=REMOTE, served=512)
    current = [DECOUPLED] * 256

    def decide() -> None:
        reconfigured(survival_BW, live, current)

    assert min(timeit.repeat(decide, timer=time.process_time, number=10, repeat=10)) / 10 < 1e-3
