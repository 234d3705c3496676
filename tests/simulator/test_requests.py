"""Lengths have their distribution, and acceptance falls with position, age and tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import PlanError
from specactor.simulator.requests import Lengths, Method, draw, survivals


@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 9), st.floats(0, 2))
def test_equal_seeds_give_equal_requests_within_bounds(prompts: int, group_size: int, seed: int, sigma: float) -> None:
    lengths = Lengths(median=50, sigma=sigma, longest=100)
    one, same = (draw(lengths, prompts=prompts, group_size=group_size, seed=(seed,)) for _ in range(2))
    assert (one.lengths == same.lengths).all()
    assert (one.odds == same.odds).all()
    assert one.lengths.min() >= 1
    assert one.lengths.max() <= 100
    assert one.groups.tolist() == [g for g in range(prompts) for _ in range(group_size)]


def test_other_seeds_give_others() -> None:
    one, other = (draw(Lengths(), prompts=8, group_size=2, seed=(seed,)) for seed in (0, 1))
    assert (one.lengths != other.lengths).any()


def test_the_tail_is_heavy_and_groups_are_alike() -> None:
    drawn = draw(Lengths(median=1000, sigma=1.0, longest=10**6, alike=0.8), prompts=4000, group_size=2, seed=(0,))
    assert np.median(drawn.lengths) == pytest.approx(1000, rel=0.05)
    assert np.quantile(drawn.lengths, 0.95) == pytest.approx(1000 * np.exp(1.645), rel=0.1)
    pairs = np.log(drawn.lengths).reshape(-1, 2)
    assert np.corrcoef(pairs.T)[0, 1] == pytest.approx(0.8, abs=0.05)


def test_survival_by_hand() -> None:
    method = Method(rate=0.5, decay=0.8, spread=1.0, drift=0.1, staleness=0.2)
    assert method.survival(2) == pytest.approx((0.5, 0.5 * 0.4))
    aged = survivals(method, np.ones(1), np.full(1, 1000.0), window=1, age=1)
    assert aged[0] == pytest.approx((0.5 * 0.8 * 0.9,))
    found = survivals(method, np.array([1.0, 3.0]), np.array([0.0, 1000.0]), window=2, age=0)
    assert found[0] == pytest.approx((0.5, 0.2))
    assert found[1, 0] == pytest.approx(0.75 * 0.9), "odds 3 x 1"


@given(st.floats(0.05, 0.95), st.integers(0, 5), st.floats(0, 5000), st.floats(0.2, 5))
def test_survivals_never_rise(rate: float, age: int, tokens: float, odds: float) -> None:
    method = Method(rate=rate, drift=0.05, staleness=0.1)
    found = survivals(method, np.array([odds]), np.array([tokens]), window=6, age=age)[0]
    assert (np.diff(found) <= 0).all()
    older = survivals(method, np.array([odds]), np.array([tokens + 100]), window=6, age=age + 1)[0]
    assert (older <= found).all()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="lengths"):
        Lengths(median=0)
    with pytest.raises(AssertionError):
        draw(Lengths(), prompts=0, group_size=1, seed=(0,))
