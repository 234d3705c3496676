"""Rounds that take what is there: as on a clock with messages, steps and coins, and as `pipelined` in the limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.decoupled_speed_clock import decoupled
from specactor.errors import PlanError
from specactor.planning.plans import Pace, coupled_tokens, running
from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.costs import Grid
from tests.lib.pipelined import pipelined

BASE_S = 0.010
PER_ROW_S = 0.0002
LATER_S = 1e-9
ROUNDS = 1000


def round_grid(base_s: float = BASE_S) -> Grid:
    """Seconds: base + requests x rows x .0002."""
    axis = (1.0, 64.0)
    return Grid(
        requests=axis,
        per_request=(1.0, 17.0),
        seconds=tuple(tuple(base_s + n * k * PER_ROW_S for k in (1.0, 17.0)) for n in axis),
    )


def pace(token_s: float, requests: int = 1, message_s: float = 2e-4, most: int = 16) -> Pace:
    return Pace(requests=requests, round_s=round_grid(), token_s=token_s, message_s=message_s, most=most)


def on_a_clock(p: float, window: int, of: Pace) -> tuple[float, float]:
    """(tokens per round of a request, seconds of a round) of a verifier and a drafter that wait for nobody."""
    played = decoupled(p, window, of)
    return played.tokens / played.rounds / of.requests, played.seconds / played.rounds


def by_the_chain(p: float, window: int, of: Pace) -> tuple[float, float]:
    found = running(survival_of(p, window + 1), window, of)
    return found.tokens, found.round_s


def as_if_windows_were_there(p: float, window: int, of: Pace) -> tuple[float, float]:
    """Wrong where drafting takes a good part of the round: whole windows, a round after a rejection."""
    rounds = pipelined(survival_of(p, window + 1), window)
    return rounds.tokens, of.round_s.at(of.requests, 1.0 + rounds.ready * window)


def check_speed(of: Callable[[float, int, Pace], tuple[float, float]], within: float) -> None:
    for p in (0.4, 0.6, 0.8, 0.9):
        for share in (0.1, 0.3, 0.5):
            for window, requests in ((2, 1), (4, 1), (4, 8)):
                at = pace(share * BASE_S, requests)
                tokens, seconds = on_a_clock(p, window, at)
                found, round_s = of(p, window, at)
                assert found / round_s == pytest.approx(tokens / seconds, rel=within), (p, share, window, requests)


def test_speeds_are_those_of_a_clock() -> None:
    check_speed(by_the_chain, 0.03)
    with pytest.raises(AssertionError):
        check_speed(as_if_windows_were_there, 0.03)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.01, 1), min_size=6, max_size=6), st.integers(1, 5))
def test_a_drafter_that_takes_no_time_is_pipelined(steps: list[float], window: int) -> None:
    survival = tuple(accumulate(steps, mul))
    free = pace(LATER_S, message_s=0.0, most=2 * window + 1)
    found = running(survival, window, free)
    whole = pipelined(survival, window)
    assert (found.tokens, found.ready) == pytest.approx((whole.tokens, whole.ready), rel=1e-6)
    assert found.window == pytest.approx(whole.ready * window, rel=1e-6)


def test_by_hand() -> None:
    """Nothing is right: every round is plain, but for the rows that are wrong. All is right: whole windows."""
    none = running((0.0, 0.0), 1, pace(0.001))
    assert (none.tokens, none.ready, none.round_s) == pytest.approx((1.0, 0.0, BASE_S + PER_ROW_S))
    sure = running(survival_of(1.0, 4), 4, pace(0.001))
    assert (sure.tokens, sure.ready) == pytest.approx((5.0, 1.0))
    slow = running(survival_of(1.0, 4), 4, pace(0.005))
    assert slow.tokens == pytest.approx(slow.round_s / 0.005, rel=0.05), "no more than is drafted"
    late = running(survival_of(0.9, 4), 4, pace(0.1))
    assert late.tokens == pytest.approx(1.0), "a token takes ten rounds"


def test_one_request_pays_the_mixture_of_its_rounds() -> None:
    """A step between 1 and 2 rows: the mean number of rows would be on the slope between."""
    steep = replace(
        pace(0.002), round_s=Grid(requests=(1.0,), per_request=(1.0, 1.01, 2.0), seconds=((0.01, 0.02, 0.02),))
    )
    found = running(survival_of(0.5, 2), 1, steep)
    assert found.round_s == pytest.approx(0.01 + 0.01 * found.ready, rel=1e-3)
    assert found.round_s < steep.round_s.at(1, 1.0 + found.window)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0, 1), min_size=5, max_size=5), st.integers(1, 5), st.floats(1e-4, 0.05), st.integers(1, 40))
def test_a_round_emits_no_less_than_plain_and_no_more_than_coupled(
    steps: list[float], window: int, token_s: float, requests: int
) -> None:
    survival = tuple(accumulate(steps, mul))
    at = pace(token_s, requests)
    found = running(survival, window, at)
    assert 1.0 <= found.tokens <= coupled_tokens(survival, window) * (1 + 1e-9)
    assert found.tokens - 1.0 <= found.window + 1e-9
    least, most = (at.round_s.at(requests, k) for k in (1.0, 1.0 + window))
    assert least * (1 - 1e-9) <= found.round_s <= most * (1 + 1e-9)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(AssertionError, match="3"):
        running((0.5, 0.2), 3, pace(0.001))
    with pytest.raises(AssertionError, match=r"token_s=0\.0"):
        running((0.5, 0.2), 1, pace(0.0))
    with pytest.raises(PlanError, match="survival: got"):
        running((0.5, 0.6), 1, pace(0.001))
