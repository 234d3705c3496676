"""What a drafter usually promises is a ratio of averages, and passes when it stops drafting."""

from __future__ import annotations

import pytest

from specactor.rollout.speculation.planner import USUAL_ROUNDS as ROUNDS
from specactor.rollout.speculation.planner import Planner
from tests.rollout.speculation.world import World, auto


def planner() -> Planner:
    return World(auto(), requests=1).speculator.planner


def test_the_same_in_every_round_is_usual() -> None:
    of = planner()
    for _ in range(3 * ROUNDS):
        assert of.usual_gain("d", tokens=3.0, rounds=1.5) == pytest.approx(2.0)


def test_drafts_that_come_and_go_are_averaged_by_time() -> None:
    """4 tokens in 2 rounds' time, then 1 in 1, and so on: 5 in 3."""
    of = planner()
    found = [of.usual_gain("d", tokens=4.0 - 3 * (k % 2), rounds=2.0 - k % 2) for k in range(20 * ROUNDS)]
    assert sum(found[-2:]) / 2 == pytest.approx(5 / 3, rel=0.02)


def test_one_that_has_stopped_drafting_promises_plain_steps() -> None:
    of = planner()
    of.usual_gain("d", tokens=8.0, rounds=2.0)
    assert of.usual_gain("d", tokens=1.0, rounds=1.0) > 3.0, "it may have some again in the next round"
    for _ in range(6 * ROUNDS):
        found = of.usual_gain("d", tokens=1.0, rounds=1.0)
    assert found == pytest.approx(1.0, abs=0.01)
    assert of.usual_gain("another", tokens=2.0, rounds=1.0) == 2.0
