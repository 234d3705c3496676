"""Drafters on freed devices by hand: the best window, what it gains, and that waking is charged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import PlanError
from specactor.rollout.planning.freed import best_window, gain, gain_after
from specactor.rollout.planning.reconfiguration import LiveCosts

WINDOWS = 4


def costs(row_s: float, step_s: float, *, plain_s: float = 1.0) -> LiveCosts:
    """A round of w draft tokens takes `plain_s` and `row_s` for each, drafting them `step_s` for each and one more."""
    return LiveCosts(
        plain_s=plain_s,
        verify_s=plain_s + row_s * np.arange(WINDOWS + 1.0),
        coupled_draft_s=None,
        decoupled_draft_s=step_s * np.arange(2.0, WINDOWS + 2),
    )


def test_by_hand() -> None:
    """All is accepted: w + 1 tokens a round, which takes max(1, step (w + 1))."""
    assert best_window(1.0, costs(0.0, 0.1)) == 4
    assert gain(1.0, costs(0.0, 0.1)) == pytest.approx(5.0)
    assert gain(1.0, costs(0.0, 0.1, plain_s=2.0)) == pytest.approx(5.0), "plain rounds are as much slower"
    assert gain(1.0, costs(0.0, 0.5)) == pytest.approx(2.0), "as fast as the drafter"
    assert gain(0.0, costs(0.0, 0.1)) == 1.0
    assert gain(0.5, costs(5.0, 0.1)) == 1.0, "rows that cost more than they bring are left out"


def test_rare_drafts_want_short_windows() -> None:
    dear = costs(0.2, 0.01)
    assert best_window(0.3, dear) < best_window(0.95, dear)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 2), st.floats(0, 1))
def test_better_drafters_gain_more(one: float, other: float, step: float, row: float) -> None:
    low, high = sorted((one, other))
    assert 1.0 <= gain(low, costs(row, step)) <= gain(high, costs(row, step)) + 1e-9
    assert gain(high, costs(row, 2 * step)) <= gain(high, costs(row, step)) + 1e-9


def test_waking_is_charged() -> None:
    assert gain_after(0.0, 100.0, 2.0) == 2.0
    assert gain_after(50.0, 100.0, 2.0) == pytest.approx(100 / 75)
    assert gain_after(100.0, 100.0, 2.0) == gain_after(1e9, 100.0, 2.0) == 1.0
    for waking, left, faster in ((-1.0, 1.0, 1.0), (0.0, 0.0, 1.0), (0.0, 1.0, 0.5)):
        with pytest.raises(PlanError, match="gain_after: got"):
            gain_after(waking, left, faster)


@given(st.floats(0, 1e4), st.floats(1, 1e4), st.floats(1, 9))
def test_nobody_is_slowed_down(waking: float, left: float, faster: float) -> None:
    assert 1.0 - 1e-9 <= gain_after(waking, left, faster) <= faster + 1e-9
