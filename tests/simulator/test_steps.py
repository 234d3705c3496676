"""Phases follow each other, every device-second is accounted for, and refreshing pays."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import PlanError
from specactor.simulator.decide import Policy
from specactor.simulator.requests import Lengths
from specactor.simulator.steps import Job, Phases, Run, run, scored_s
from tests.simulator.small import W, candidates, world

FOUND = candidates(0.8)
PHASES = Phases(
    train_tokens_per_s_per_device=500.0, prompt_tokens=10, reward_s=0.01, reward_workers=2, sync_s=0.5, refresh="never"
)
JOB = Job(
    devices=8,
    prompts=6,
    group_size=4,
    lengths=Lengths(median=200, sigma=0.7, longest=1000),
    options=FOUND,
    world=world(0.8, staleness=0.3),
    policy=Policy(mode="coupled", max_window=W),
    phases=PHASES,
    steps=3,
)


def check(of: Run) -> None:
    assert len(of.steps) == of.job.steps
    assert sum(of.shares.values()) == pytest.approx(1.0)
    assert min(of.shares.values()) >= -1e-9


def test_a_step_is_the_sum_of_its_phases() -> None:
    of = run(JOB)
    check(of)
    for step in of.steps:
        tokens = step.outcome.tokens + 24 * 10
        assert step.train_s == pytest.approx(tokens / (500 * 8))
        phases = step.rollout_s + step.reward_s + step.train_s + step.sync_s + step.refresh_s
        assert step.seconds == pytest.approx(phases)
    assert (run(JOB).seconds, run(JOB).shares) == (of.seconds, of.shares), "equal input, equal bits"
    assert run(replace(JOB, seed=1)).seconds != of.seconds


def test_a_step_that_is_not_accounted_for_is_caught() -> None:
    of = run(JOB)
    with pytest.raises(AssertionError):
        check(replace(of, steps=[of.steps[0], *of.steps[2:]]))
    first = of.steps[0].outcome
    twice = replace(first, busy_s={kind: 20 * spent for kind, spent in first.busy_s.items()})
    with pytest.raises(AssertionError):
        check(replace(of, steps=[replace(of.steps[0], outcome=twice), *of.steps[1:]]))


def test_a_stale_drafter_slows_rollouts_and_a_refreshed_one_does_not() -> None:
    rates = {}
    for refresh in ("never", "after"):
        of = run(replace(JOB, phases=replace(PHASES, refresh=refresh, refresh_device_s=2.0)))  # type: ignore[arg-type]
        check(of)
        rates[refresh] = [step.outcome.accepted / step.outcome.drafted for step in of.steps]
        assert all((step.refresh_s > 0) == (refresh == "after") for step in of.steps), refresh
        assert ("refresh" in of.shares) == (refresh != "never")
    assert rates["never"][2] < 0.7 * rates["never"][0]
    assert rates["after"][2] > 0.9 * rates["after"][0]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.floats(0.0, 3.0), st.integers(1, 4))
def test_scoring_is_that_of_a_queue(ends: list[float], each_s: float, workers: int) -> None:
    free = [0.0] * workers
    last = 0.0
    for end in sorted(ends):
        last = max(end, heapq.heappop(free)) + each_s
        heapq.heappush(free, last)
    assert scored_s(np.array(ends), each_s=each_s, workers=workers) == pytest.approx(last)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="job: got 0 steps"):
        replace(JOB, steps=0)
    with pytest.raises(PlanError, match="phases"):
        replace(PHASES, train_tokens_per_s_per_device=0.0)
