"""Requests that are moved, replicated and stopped, on two real engines at temperature 1: the responses do not change.

What is moved when is decided by the tokens that were emitted, and by chance, and not by time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from specactor.rollout.driver import TailCounts
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine import Engine
from specactor.rollout.tail_plan import Planned
from specactor.types import RolloutRequest, Trajectory
from tests.rollout.conftest import request
from tests.rollout.driver_cases import AtRandom

BATCH = [request(i, new=30 + 13 * i % 60, ignore_eos=i % 3 > 0) for i in range(24)]
QUEUED = [replace(request(i, new=100), group_id=0) for i in range(48)]
"""All on one engine, more than it decodes together, and long enough to be moved on a busy machine."""


@pytest.fixture
def pool(engines: tuple[Engine, Engine]) -> EnginePool:
    """Of one and of two tensor-parallel ranks; their caches are empty."""
    pool = EnginePool([], report_tokens=3)
    pool.engines = list(engines)
    pool.set_version(0)
    pool.flush()
    return pool


def assert_same(ours: Sequence[Trajectory], expected: Sequence[Trajectory]) -> None:
    assert [(t.request_id, t.token_ids, t.finish_reason) for t in ours] == [
        (t.request_id, t.token_ids, t.finish_reason) for t in expected
    ]
    for mine, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-5, rtol=0)
        assert mine.spans == other.spans


def undisturbed(engine: Engine, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
    engine.flush()
    return engine.generate(requests)


def test_moves_and_replicas_at_random(pool: EnginePool, engines: tuple[Engine, Engine]) -> None:
    expected = undisturbed(engines[0], BATCH)
    total = TailCounts()
    for seed in range(8):  # few are enough, unless the machine lets responses end before they can be moved
        pool.tail = AtRandom(seed, share=0.2)
        outcome = pool.generate(BATCH)
        assert_same(outcome.finished, expected)
        assert outcome.tail.differing == 0
        total += outcome.tail
        with_tokens = total.moved_tokens > total.moved * max(len(r.prompt_ids) for r in BATCH)
        if total.moved > 10 and total.replicas > 10 and with_tokens:
            break
    assert total.moved > 10
    assert total.replicas > 10
    assert total.lost_tokens > 0
    assert with_tokens, "requests were moved with what they had emitted"


def test_a_queue_is_shared(pool: EnginePool, engines: tuple[Engine, Engine]) -> None:
    """By the policy that ships."""
    expected = undisturbed(engines[0], QUEUED)
    pool.tail = Planned(migrate=True, replicas=2)
    before = engines[1].stats()["requests"]
    outcome = pool.generate(QUEUED)
    assert_same(outcome.finished, expected)
    assert outcome.tail.moved + outcome.tail.replicas > 0
    assert engines[1].stats()["requests"] > before
    assert outcome.tail.differing == 0


def test_enough_groups_and_the_rest_later(pool: EnginePool, engines: tuple[Engine, Engine]) -> None:
    """What was stopped goes on at the next policy version; with equal weights its tokens are the same."""
    expected = undisturbed(engines[0], BATCH)
    outcome = pool.generate(BATCH, enough_groups=2)
    assert not outcome.unfinished
    assert len(outcome.finished) + len(outcome.stopped) == len(BATCH)
    groups = {r.group_id for r in BATCH} - {r.group_id for r in outcome.stopped}
    assert len(groups) >= 2
    pool.set_version(7)
    pool.flush()
    rest = pool.generate(outcome.stopped)
    pool.set_version(0)
    found = {t.request_id: t for t in [*outcome.finished, *rest.finished]}
    for r, whole in zip(BATCH, expected, strict=True):
        assert found[r.request_id].token_ids == whole.token_ids
        np.testing.assert_allclose(found[r.request_id].logprobs, whole.logprobs, atol=1e-5, rtol=0)
    stopped = {r.request_id: len(r.begun.token_ids) for r in outcome.stopped if r.begun is not None}
    for name, count in stopped.items():
        assert found[name].spans[-1].version == 7
        assert found[name].spans[-1].start == count
