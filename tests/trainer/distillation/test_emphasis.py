"""Weights of response tokens by position and reward."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specactor.trainer.distillation.emphasis import MIN_WEIGHT, NUM_BINS, bin_of, bins_of, lost, token_weights


def test_bins_are_powers_of_two() -> None:
    assert [bin_of(p) for p in (0, 1, 2, 3, 6, 7, 14, 15)] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert bins_of(70_000).tolist() == [bin_of(p) for p in range(70_000)]


def test_nothing_is_emphasised_unless_asked() -> None:
    assert token_weights(5, lost=(0.1, 0.9), reward=1.0).tolist() == [1] * 5
    assert token_weights(5, position_emphasis=1.0).tolist() == [1] * 5
    assert token_weights(0).shape == (0,)


def test_positions_weigh_as_acceptance_is_lost_there() -> None:
    weights = token_weights(9, lost=(0.1, 0.3, 0.5), position_emphasis=1.0)
    np.testing.assert_allclose(weights, [1 / 3, 1, 1, *[5 / 3] * 6])
    half = token_weights(9, lost=(0.1, 0.3, 0.5), position_emphasis=0.5)
    np.testing.assert_allclose(half, (1 + weights) / 2)
    assert token_weights(3, lost=(0.0, 0.5), position_emphasis=1.0)[0] == MIN_WEIGHT
    assert token_weights(3, lost=(0.0, 0.0), position_emphasis=1.0).tolist() == [1] * 3


def test_rewards_tilt_by_a_bounded_factor() -> None:
    def weight(reward: float) -> float:
        return float(token_weights(1, reward=reward, mean_reward=0.5, reward_emphasis=2.0)[0])

    assert weight(0.5) == 1
    assert weight(1.0) == pytest.approx(math.e)
    assert weight(0.0) == pytest.approx(1 / math.e)
    assert weight(-100.0) == pytest.approx(math.exp(-3))


def test_lost_acceptance_by_position() -> None:
    assert lost([0.0] * 4, [0.0] * 4) == ()
    assert lost([4, 0, 4, 0], [3, 0, 1, 0]) == (0.25, 0.5, 0.75), "where nothing is known it is that of all"
    assert lost([2, 2], [2 + 1e-9, 1]) == (0.0, 0.5), "in half precision an overlap may be a little more than 1"
    assert bin_of(2**31 - 2) < NUM_BINS, "there is a bin for every position"
