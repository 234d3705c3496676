"""What tests ask of a running engine, and how its answers are compared."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from specactor.rollout.conversations import Conversations
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine_client import Engine
from specactor.types import RolloutRequest, Trajectory


def probe(engine: Engine, name: str, argument: object = None) -> Any:
    return json.loads(engine.rank_call(f"probe.{name}", json.dumps(argument).encode(), timeout_s=60)[0])


def all_of(pool: EnginePool, requests: Sequence[RolloutRequest], conversations: Conversations) -> list[Trajectory]:
    """All conversations to their end, in their order; engines that die are started again."""
    finished: list[Trajectory] = []
    pending = list(requests)
    while pending:
        outcome = pool.generate(pending, conversations=conversations)
        finished += outcome.finished
        pending = outcome.unfinished
        pool.restart_lost()
    by_id = {t.request_id: t for t in finished}
    assert len(by_id) == len(finished) == len(requests)
    return [by_id[request.request_id] for request in requests]


def in_background(engine: Engine, requests: Sequence[RolloutRequest]) -> tuple[threading.Thread, list[Trajectory]]:
    answers: list[Trajectory] = []
    thread = threading.Thread(target=lambda: answers.extend(engine.generate(requests)))
    thread.start()
    return thread, answers


def wait_for_tokens(engine: Engine, count: int) -> None:
    """Until each running request has emitted that many."""
    deadline = time.monotonic() + 60
    while min(probe(engine, "lengths"), default=0) < count:
        assert time.monotonic() < deadline


def assert_same(ours: Sequence[Trajectory], expected: Sequence[Trajectory]) -> None:
    assert [(t.token_ids, t.finish_reason) for t in ours] == [(t.token_ids, t.finish_reason) for t in expected]
    for mine, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-5, rtol=0)


def differs(ours: Sequence[Trajectory], expected: Sequence[Trajectory]) -> bool:
    return [t.token_ids for t in ours] != [t.token_ids for t in expected]
