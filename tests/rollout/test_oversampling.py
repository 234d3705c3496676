"""Requests that are stopped and gone on with later, on two real engines at temperature 1: tokens do not change."""

from __future__ import annotations

import numpy as np
import pytest

from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine_client import Engine
from tests.rollout.conftest import request
from tests.rollout.driver_cases import enough

BATCH = [request(i, new=30 + 13 * i % 60, ignore_eos=i % 3 > 0) for i in range(24)]


@pytest.fixture
def pool(engines: tuple[Engine, Engine]) -> EnginePool:
    """Of one and of two tensor-parallel ranks; their caches are empty."""
    pool = EnginePool([], report_tokens=3)
    pool.engines = list(engines)
    pool.set_version(0)
    pool.flush()
    return pool


def test_enough_groups_and_the_rest_later(pool: EnginePool, engines: tuple[Engine, Engine]) -> None:
    """What was stopped goes on at the next policy version; with equal weights its tokens are the same."""
    engines[0].flush()
    expected = engines[0].generate(BATCH)
    outcome = pool.generate(BATCH, is_enough=enough(2))
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
