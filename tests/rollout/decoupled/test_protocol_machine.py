"""Both ends and a bad network as one state machine; and that its checks see wrong ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from specactor.rollout.decoupled.drafter_side import MirroredRequests
from specactor.rollout.decoupled.engine_side import Tails
from tests.rollout.decoupled import wrong_ends
from tests.rollout.decoupled.machine import Protocol
from tests.rollout.decoupled.walk import Walk

WALKS = 300
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_ends_agree_whatever_the_network_does() -> None:
    run_state_machine_as_test(
        Protocol, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=QUIET)
    )


WRONG = [
    value
    for value in vars(wrong_ends).values()
    if isinstance(value, type)
    and issubclass(value, MirroredRequests | Tails)
    and value not in (MirroredRequests, Tails, wrong_ends.ForeignTaken, wrong_ends.ArrivedKept)  # seen in test_tails
]


def walk(**kinds: type) -> None:
    for seed in range(WALKS):
        Walk(seed, **kinds).run()


def test_random_walks_of_the_right_ends() -> None:
    walk()


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_end_is_seen(wrong: type) -> None:
    kinds = {"tails" if issubclass(wrong, Tails) else "mirrors": wrong}
    with pytest.raises((AssertionError, KeyError)):
        walk(**kinds)
