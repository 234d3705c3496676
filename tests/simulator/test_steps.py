"""Phases follow each other, every device-second is accounted for, and refreshing pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specactor.simulator.engine import Policy
from specactor.simulator.requests import Lengths
from specactor.simulator.rollout import Job, Run, run
from tests.simulator.small import W, candidates, world

FOUND = candidates(0.8)
JOB = Job(
    devices=8,
    prompts=6,
    group_size=4,
    lengths=Lengths(median=200, sigma=0.7, longest=1000),
    options=FOUND,
    world=world(0.8, staleness=0.3),
    policy=Policy(mode="coupled", max_window=W),
    train_tokens_per_s=500.0,
    steps=3,
)


def check(of: Run) -> None:
    assert len(of.steps) == of.job.steps
    assert 0.0 <= of.idle < 1.0


def test_a_step_is_the_sum_of_its_phases() -> None:
    of = run(JOB)
    check(of)
    for step in of.steps:
        tokens = step.outcome.tokens + 24 * 512
        assert step.train_s == pytest.approx(tokens / (500 * 8))
        assert step.seconds == pytest.approx(step.rollout_s + step.train_s + step.sync_s + step.refresh_s)
    assert (run(JOB).seconds, run(JOB).idle) == (of.seconds, of.idle), "equal input, equal bits"
    assert run(replace(JOB, seed=1)).seconds != of.seconds


def test_a_step_that_is_not_accounted_for_is_caught() -> None:
    of = run(JOB)
    with pytest.raises(AssertionError):
        check(replace(of, steps=[of.steps[0], *of.steps[2:]]))
    first = of.steps[0].outcome
    busier = replace(first, busy_device_s=first.busy_device_s + 8 * of.seconds)
    with pytest.raises(AssertionError):
        check(replace(of, steps=[replace(of.steps[0], outcome=busier), *of.steps[1:]]))


def test_a_stale_drafter_slows_rollouts_and_a_refreshed_one_does_not() -> None:
    rates = {}
    for refresh in (False, True):
        of = run(replace(JOB, refresh=refresh))
        check(of)
        rates[refresh] = [step.outcome.accepted / step.outcome.drafted for step in of.steps]
        assert {step.refresh_s for step in of.steps} == {512.0 / 8 if refresh else 0.0}
    assert rates[False][2] < 0.7 * rates[False][0]
    assert rates[True][2] > 0.9 * rates[True][0]
