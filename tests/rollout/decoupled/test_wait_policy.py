"""Waiting is bounded, and only where it wins."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.decoupled.remote_drafter import LINK_S, MAX_WAIT_S, MIN_SAMPLES, Patience


def taught(*, round_s: float, answers_s: list[float], right: list[int], samples: int = 64) -> Patience:
    patience = Patience()
    for _ in range(samples):
        patience.rounds(round_s)
        patience.answers(answers_s)
        patience.judged(right)
    return patience


def test_knows_nothing_in_the_beginning() -> None:
    assert Patience().bound(8, 8) == (0.0, 0.0)
    few = taught(round_s=0.1, answers_s=[0.001], right=[2], samples=MIN_SAMPLES - 1)
    assert few.bound(8, 8) == (0.0, 0.0)


def test_waits_for_quick_answers_in_long_rounds() -> None:
    patience = taught(round_s=0.1, answers_s=[0.004], right=[3])
    wait_s, arriving = patience.bound(8, 4)
    assert wait_s == pytest.approx(0.004 + LINK_S)
    assert arriving == pytest.approx(4)
    assert patience.bound(8, 0) == (0.0, 0.0), "all have a draft"


@pytest.mark.parametrize(
    ("round_s", "answer_s", "right"),
    [
        (0.005, 0.004, [3]),  # for as long as a round takes
        (0.1, 0.08, [3]),  # longer than any wait
        (0.1, 0.004, [0]),  # for drafts that are never right
    ],
)
def test_does_not_wait_where_that_would_lose(round_s: float, answer_s: float, right: list[int]) -> None:
    assert taught(round_s=round_s, answers_s=[answer_s], right=right).bound(8, 1) == (0.0, 0.0)


@pytest.mark.parametrize(("missing", "waits"), [(1, False), (17, False), (18, True), (100, True)])
def test_waits_from_the_least_gain_on(missing: int, waits: bool) -> None:
    """m drafts of 100 add m tokens to 100 + 3 (100 - m): 4.9 % for 17, 5.2 % for 18."""
    patience = taught(round_s=10.0, answers_s=[0.004], right=[3])
    assert (patience.bound(100, missing)[0] > 0) == waits


def test_a_few_late_answers_are_not_waited_for() -> None:
    answers_s = [0.002] * 9 + [0.04]
    wait_s, arriving = taught(round_s=0.05, answers_s=answers_s, right=[1]).bound(8, 8)
    assert wait_s == pytest.approx(0.002 + LINK_S)
    assert arriving == pytest.approx(7.2, abs=0.3)


def test_promises_that_are_not_kept() -> None:
    patience = taught(round_s=0.1, answers_s=[0.004], right=[3])
    for _ in range(40):
        patience.kept(expected=4, arrived=0)
    assert patience.bound(8, 4) == (0.0, 0.0)
    for _ in range(3000):
        patience.bound(8, 4)
    assert patience.bound(8, 4)[0] > 0, "it tries again later"


@given(st.integers(0, 10_000), st.integers(1, 64), st.integers(0, 64))
def test_never_more_than_the_bound_and_never_without_a_gain(seed: int, requests: int, missing: int) -> None:
    rng = random.Random(seed)
    patience = Patience()
    for _ in range(40):
        patience.rounds(rng.uniform(1e-4, 0.3))
        patience.answers([rng.expovariate(100)])
        patience.judged([rng.randrange(5)])
    wait_s, arriving = patience.bound(requests, min(missing, requests))
    assert 0 <= wait_s <= MAX_WAIT_S
    assert 0 <= arriving <= min(missing, requests)
    assert (wait_s > 0) == (arriving > 0)
