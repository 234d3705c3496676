"""Requests end as early or late as their luck says, and never faster than rounds allow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paced_prediction import luck
from specactor.rollout.speculation.acceptance import survival_of
from specactor.simulator.requests import COUPLED, Progress, Round, round_of
from tests.simulator.small import W, table

ONE = np.array([0])


def of(p: float, window: int) -> Round:
    survival = np.array([survival_of(p, W + 1)])
    return round_of(survival, np.array([COUPLED]), np.array([window]), table=table(), drafter="small")


@given(st.floats(0, 1), st.integers(0, W), st.integers(1, 400), st.floats(-5, 5), st.floats(0, 1))
def test_rounds_emit_one_token_or_more_and_no_more_than_a_window_and_one(
    p: float, window: int, length: int, lucky: float, share: float
) -> None:
    progress, made = Progress(np.array([length]), np.array([lucky])), of(p, window)
    total = float(progress.rounds_left(ONE, made)[0])
    assert length / (window + 1) - 1e-6 <= total <= length + 1e-6
    progress.add(ONE, made, share * total)
    left = float(progress.rounds_left(ONE, made)[0])
    assert left == pytest.approx((1.0 - share) * total, abs=1e-3), "halts change no end"


@given(st.integers(1, 400), st.floats(-5, 5))
def test_without_drafts_there_is_no_luck(length: int, lucky: float) -> None:
    assert Progress(np.array([length]), np.array([lucky])).rounds_left(ONE, of(0.5, 0))[0] == pytest.approx(length)


def test_the_luck_of_coins_needs_the_rounds_of_the_coins() -> None:
    rng = np.random.default_rng(0)
    for p, window in ((0.0, 2), (0.5, 2), (0.8, 4), (0.9, 3), (1.0, 4)):
        right = (rng.random(95) < p).tolist()
        at = rounds = 0
        while at < len(right):
            accepted = 0
            while accepted < window and at + accepted < len(right) and right[at + accepted]:
                accepted += 1
            at, rounds = at + accepted + 1, rounds + 1
        progress = Progress(np.array([95]), np.array([luck(right, p, window)]))
        assert progress.rounds_left(ONE, of(p, window))[0] == pytest.approx(rounds, abs=0.01)
