"""Tokens per round equal a simulation of the two states, and never fall when drafts get better."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_algorithms import tau
from specactor.errors import PlanError
from specactor.planning.plans import coupled_tokens
from specactor.rollout.speculation.acceptance import checked, survival_of
from tests.lib.pipelined import pipelined

SURVIVAL = st.lists(st.floats(0, 1), min_size=1, max_size=6).map(lambda steps: tuple(accumulate(steps, mul)))


def simulated(p: float, window: int, rounds: int, rng: random.Random) -> float:
    """Tokens per round of a drafter that is right with probability p at each token."""
    ready, emitted = False, 0
    for _ in range(rounds):
        right = 0
        while right < (window if ready else 0) and rng.random() < p:
            right += 1
        emitted += right + 1
        went_on = right == window if ready else True
        ready = went_on and rng.random() < p
    return emitted / rounds


def by_the_model(p: float, window: int) -> float:
    return pipelined(survival_of(p, window + 1), window).tokens


def always_ready(p: float, window: int) -> float:
    """Wrong: nothing is lost by a rejection."""
    return coupled_tokens(survival_of(p, window), window)


def check_simulation(of: Callable[[float, int], float]) -> None:
    rng = random.Random(0)
    for p, window in ((0.8, 4), (0.5, 2), (0.9, 8), (0.6, 1)):
        assert of(p, window) == pytest.approx(simulated(p, window, 40_000, rng), rel=0.02)


def test_tokens_per_round_are_those_of_a_simulation() -> None:
    check_simulation(by_the_model)
    with pytest.raises(AssertionError):
        check_simulation(always_ready)


def test_by_hand() -> None:
    """p = .5, w = 1: ready rounds emit 1.5 and stay with .25; others emit 1 and return with .5: .5 / 1.25 ready."""
    found = pipelined(survival_of(0.5, 2), 1)
    assert (found.ready, found.tokens) == pytest.approx((0.4, 1.2))
    assert coupled_tokens((0.5, 0.25), 2) == 1.75


def test_at_the_ends() -> None:
    assert pipelined(survival_of(0.0, 4), 4).tokens == 1.0
    perfect = pipelined(survival_of(1.0, 4), 4)
    assert (perfect.ready, perfect.tokens) == (1.0, 5.0)
    assert tau(4, 1.0) == 4, "the paper's does not count the target's own token"


@settings(deadline=None)
@given(SURVIVAL, st.floats(0, 1), st.integers(1, 6))
def test_better_drafts_never_emit_less(survival: tuple[float, ...], share: float, window: int) -> None:
    window = min(window, len(survival))
    better = tuple(accumulate((s + share * (1 - s) for s in survival), min))  # rounding may make it rise
    plain, improved = pipelined(survival, window), pipelined(better, window)
    assert improved.tokens >= plain.tokens * (1 - 1e-12)
    assert 1.0 <= plain.tokens <= coupled_tokens(survival, window) * (1 + 1e-12)


def test_what_cannot_be_is_refused() -> None:
    for wrong in ((), (1.1,), (0.5, 0.6), (0.5, -0.1), (float("nan"),)):
        with pytest.raises(PlanError, match="survival: got"):
            checked(wrong)
    with pytest.raises(AssertionError, match=r"1\.5"):
        survival_of(1.5, 2)
