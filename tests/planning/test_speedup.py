"""What a draft method buys, by hand: its best window, its speed-up, and its rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.speculation.decoupled_rounds import LiveCosts
from specactor.rollout.speculation.fastest_of_n import best_window, ranked, speedup

WINDOWS = 4


def costs(row_s: float, step_s: float, *, plain_s: float = 1.0) -> LiveCosts:
    """A round of w draft tokens takes `plain_s` and `row_s` for each, drafting them `step_s` for each and one more."""
    return LiveCosts(
        plain_s=plain_s,
        verify_s=plain_s + row_s * np.arange(WINDOWS + 1.0),
        draft_s=step_s * np.arange(2.0, WINDOWS + 2),
    )


def test_by_hand() -> None:
    """All is accepted: w + 1 tokens a round, which takes max(1, step (w + 1))."""
    assert best_window(1.0, costs(0.0, 0.1)) == 4
    assert speedup(1.0, costs(0.0, 0.1)) == pytest.approx(5.0)
    assert speedup(1.0, costs(0.0, 0.1, plain_s=2.0)) == pytest.approx(5.0), "plain rounds are as much slower"
    assert speedup(1.0, costs(0.0, 0.5)) == pytest.approx(2.0), "as fast as the drafter"
    assert speedup(0.0, costs(0.0, 0.1)) == 1.0
    assert speedup(0.5, costs(5.0, 0.1)) < 1.0, "rows that cost more than they bring"


def test_a_method_that_errs_by_hand() -> None:
    """p = .5: .4, .36, .35 of rounds have windows of 1, 2, 3, and emit 1.5, 1.75, 1.875; they take .8, 1.2, 1.6 s."""
    assert speedup(0.5, costs(0.0, 0.4)) == pytest.approx(1.2)
    slow = costs(0.0, 0.4, plain_s=0.5)
    assert best_window(0.5, slow) == 1
    assert speedup(0.5, slow) == pytest.approx(0.5 * 1.2 / 0.8)


def test_the_cheaper_method_wins_until_the_other_is_accepted_more() -> None:
    live = {"cheap": costs(0.0, 0.1), "good": costs(0.0, 0.4)}
    assert ranked({"cheap": 0.5, "good": 0.6}, live) == ["cheap", "good"]
    assert ranked({"cheap": 0.3, "good": 0.95}, live) == ["good", "cheap"]
    same = {"b": costs(0.0, 0.1), "a": costs(0.0, 0.1)}
    assert ranked({"b": 0.5, "a": 0.5}, same) == ["a", "b"], "names decide among equals"


def test_rare_drafts_want_short_windows() -> None:
    dear = costs(0.2, 0.01)
    assert best_window(0.3, dear) < best_window(0.95, dear)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 2), st.floats(0, 1))
def test_better_drafters_gain_more(one: float, other: float, step: float, row: float) -> None:
    """Where drafts pay at all: those that do not may be ignored."""
    low, high = sorted((one, other))

    def gain(rate: float, step_s: float) -> float:
        return max(1.0, speedup(rate, costs(row, step_s)))

    assert gain(low, step) <= gain(high, step) + 1e-9
    assert gain(high, 2 * step) <= gain(high, step) + 1e-9
