"""Learning rates: pinned values, bounds, continuity."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.config import TrainConfig
from specactor.config.train import learning_rate, linear_decay


def rates(**settings: object) -> list[float]:
    train = TrainConfig(**settings)  # type: ignore[arg-type]
    return [learning_rate(step, train) for step in range(train.steps + 2)]


def test_constant() -> None:
    assert rates(steps=3, learning_rate=2e-4) == [2e-4] * 5
    assert rates(steps=4, learning_rate=1.0, warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear() -> None:
    got = rates(steps=6, learning_rate=1.0, warmup_steps=2, schedule="linear")
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_cosine() -> None:
    got = rates(steps=4, learning_rate=1.0, schedule="cosine")
    half = math.sqrt(0.5)
    assert got == pytest.approx([1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0, 0.0])


def test_it_begins_when_the_critic_has_learned_alone() -> None:
    """Wrong: a rise that is over before the policy learns."""
    train = TrainConfig(steps=9, learning_rate=1.0, warmup_steps=4, schedule="linear")
    got = [learning_rate(step, train, still=3) for step in range(10)]
    assert got == pytest.approx([0, 0, 0, 0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0])


@given(
    steps=st.integers(0, 50),
    warmup=st.integers(0, 60),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
)
def test_rises_then_falls_within_its_bounds(steps: int, warmup: int, schedule: str) -> None:
    got = rates(steps=steps, learning_rate=1e-3, warmup_steps=warmup, schedule=schedule)
    assert all(0 < rate <= 1e-3 * (1 + 1e-12) for rate in got[:steps])
    rise, fall = got[:warmup], got[warmup:]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert not fall or fall[0] <= 1e-3 or fall[0] == pytest.approx(1e-3)
    assert all(rate >= 0 for rate in fall)


def test_a_warmup_stage_decays_to_a_tenth() -> None:
    assert [linear_decay(step, 4, 1.0) for step in range(5)] == pytest.approx([1.0, 0.7, 0.4, 0.1, 0.1])
    assert linear_decay(0, 1, 3e-3) == 3e-3
