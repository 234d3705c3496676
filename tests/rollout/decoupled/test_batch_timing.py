"""Batches of which sizes take hardly longer than others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specactor.rollout.decoupled.main import BatchTiming


def paced(seconds: Callable[[int], float], *, samples: int = 3) -> BatchTiming:
    timing = BatchTiming()
    for _ in range(samples):
        for lanes in (1, 4, 16, 64):
            timing.batch(lanes, seconds(lanes))
    return timing


def test_lanes_are_free_where_batches_take_as_long_with_them() -> None:
    free = paced(lambda lanes: 0.01)
    assert free.free(8, 256) == 120  # twice as many as were tried
    assert free.free(8, 100) == 92
    assert free.free(300, 256) == 0
    assert paced(lambda lanes: 0.01 + 1e-5 * lanes).free(8, 256) == pytest.approx(60, abs=10)
    assert paced(lambda lanes: 0.01 * lanes).free(1, 256) == 0
    assert BatchTiming().free(8, 256) == 0  # of nothing known


def test_a_batch_with_more_lanes_that_takes_longer_is_met_three_times() -> None:
    timing = BatchTiming()
    met = 0
    for _ in range(30):
        more = timing.free(2, 256)
        met += more > 0
        timing.batch(2 + more, 0.01 * (2 + more))
    assert met <= 3


def played(timing: BatchTiming, batches: int, lane_s: float) -> int:
    """How many batches of two requests have more lanes, as many as seem free."""
    met = 0
    for _ in range(batches):
        more = timing.free(2, 256)
        met += more > 0
        timing.batch(2 + more, 0.01 + lane_s * (2 + more))
    return met


def test_lanes_that_become_free_are_found_out_and_dear_ones_seldom_tried() -> None:
    """Also where larger batches were measured often: nobody makes them any more."""
    timing, batches = paced(lambda lanes: 0.01 * lanes, samples=15), 24 * 256
    assert played(timing, 256, 0.01) == 0
    assert 0 < played(timing, batches, 0.01) <= 4 * batches / 256
    played(timing, batches, 0.0)
    assert timing.free(2, 256) > 0
    assert played(timing, batches, 0.0) == batches
