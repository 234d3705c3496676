"""The ladder ranks methods by what they buy at their acceptance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import PlanError
from specactor.rollout.planning.ladder import POINTS, Ladder
from specactor.rollout.planning.reconfiguration import LiveCosts


def live(draft_s: float, verify_s: float = 1.0, window: int = 4) -> LiveCosts:
    """A verify of any window takes as long as a plain step."""
    return LiveCosts(
        plain_s=verify_s,
        verify_s=np.full(window + 1, verify_s),
        coupled_draft_s=draft_s * np.arange(1, window + 1),
        decoupled_draft_s=None,
    )


def test_a_rung_by_hand() -> None:
    """p = .5: windows 1, 2, .. emit 1.5, 1.75, 1.875 in 1.1, 1.2, 1.3 s; the best is 1.75 / 1.2."""
    ladder = Ladder.of({"a": live(0.1)})
    assert ladder.speedups["a"][POINTS.index(0.5)] == pytest.approx(1.75 / 1.2)
    between = (ladder.speedups["a"][10] + ladder.speedups["a"][11]) / 2
    assert ladder.rank({"a": 0.525})[0].speedup == pytest.approx(between)


def test_the_cheaper_method_wins_until_the_other_is_accepted_more() -> None:
    ladder = Ladder.of({"cheap": live(0.01), "good": live(0.2)})
    assert [r.method for r in ladder.rank({"cheap": 0.5, "good": 0.6})] == ["cheap", "good"]
    assert [r.method for r in ladder.rank({"cheap": 0.3, "good": 0.95})] == ["good", "cheap"]
    same = Ladder.of({"b": live(0.1), "a": live(0.1)})
    assert [r.method for r in same.rank({"b": 0.5, "a": 0.5})] == ["a", "b"], "names decide among equals"


@given(st.floats(1e-4, 2.0), st.floats(0, 1), st.floats(0, 1))
def test_more_acceptance_never_ranks_lower(draft_s: float, p: float, q: float) -> None:
    ladder = Ladder.of({"a": live(draft_s)})
    low, high = (ladder.rank({"a": x})[0].speedup for x in sorted((p, q)))
    assert low <= high * (1 + 1e-12)
    assert ladder.rank({"a": 0.0})[0].speedup <= 1.0


def test_what_is_not_on_the_ladder_is_refused() -> None:
    with pytest.raises(PlanError, match="expected methods in it"):
        Ladder.of({"a": live(0.1)}).rank({"b": 0.5})
    with pytest.raises(PlanError, match="rising acceptances"):
        Ladder(acceptances=(0.0, 1.0), speedups={"a": (1.0,)})
