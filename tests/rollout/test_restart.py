"""Engines that die while they are started again. No engine is started; `test_pool` kills real ones."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from specactor.config import EngineConfig
from specactor.errors import EngineError
from specactor.rollout import pool as pool_module
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine_client import EngineSpec


class Scripted:
    """An engine that starts, or dies while it starts, as its index has it next."""

    outcomes: dict[int, Iterator[bool]]

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.index = spec, spec.index
        self.ready: object = None
        self.alive = True

    @classmethod
    def start(cls, spec: EngineSpec) -> Scripted:
        return cls(spec)

    def wait_ready(self, timeout_s: float) -> None:
        if not next(self.outcomes[self.index]):
            self.kill()
            raise EngineError("did not start")
        self.ready = object()

    def kill(self) -> None:
        self.alive = False

    stop = kill

    def with_log(self, what: str) -> str:
        return f"engine {self.index} {what} The end of its log, {self.spec.log_file}:\n  | the log"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each pause; nothing waits, and no time passes but in pauses."""
    slept: list[float] = []
    monkeypatch.setattr(pool_module, "Engine", Scripted)
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept)))
    return slept


def make_pool(outcomes: dict[int, list[bool]], *, max_restarts: int = 3, **named: Any) -> EnginePool:
    """Engines that are all ready, once, before what is to come."""
    Scripted.outcomes = {index: iter([True, *later]) for index, later in outcomes.items()}
    config = EngineConfig(max_restarts=max_restarts)
    common: dict[str, Any] = {"model_dir": "m", "dtype": "float32", "devices": (0,), "context_length": 8}
    specs = [EngineSpec(index=i, log_file=f"engine-{i}.log", config=config, **common) for i in outcomes]
    pool = EnginePool(specs, **named)
    pool.wait_ready()
    return pool


def kill_all(pool: EnginePool) -> None:
    for engine in pool.engines:
        engine.kill()


def test_a_replacement_that_dies_is_replaced_after_longer_and_longer_pauses(pauses: list[float]) -> None:
    pool = make_pool({0: [True], 1: [False, False, True]})
    first = pool.engines[0]
    pool.engines[1].kill()
    assert pool.restart_lost() == (1,)
    assert pool.engines[0] is first, "an engine that lives is left alone"
    assert all(engine.alive and engine.ready is not None for engine in pool.engines)
    assert pauses == [1.0, 2.0]


def test_each_engine_is_tried_until_it_starts(pauses: list[float]) -> None:
    pool = make_pool({0: [False, True], 1: [True]})
    kill_all(pool)
    assert pool.restart_lost() == (0, 1)
    assert pauses == [1.0]
    assert not pool.any_lost()


def test_an_engine_that_is_first_lost_meanwhile_is_named_too(pauses: list[float]) -> None:
    pool = make_pool({0: [True], 1: [False, True]})
    first = pool.engines[0]
    pool.engines[1].kill()
    Scripted.outcomes[1] = map(lambda started: (first.kill(), started)[1], Scripted.outcomes[1])
    assert pool.restart_lost() == (0, 1)
    assert not pool.any_lost()


def test_it_gives_up_before_other_ranks_do(pauses: list[float]) -> None:
    """They wait in a collective meanwhile; pauses of 1, 2, 4, 8, .. seconds outlast any limit."""
    pool = make_pool({0: [False] * 20}, max_restarts=20, restart_limit_s=10.0)
    kill_all(pool)
    with pytest.raises(
        EngineError, match=r"(?s)engine 0 .* replaced within 10 s, half of what other ranks wait.*the log"
    ):
        pool.restart_lost()
    assert sum(pauses) < 10


def test_deaths_at_the_start_count_as_restarts(pauses: list[float]) -> None:
    pool = make_pool({0: [False, True, False]}, max_restarts=3)
    kill_all(pool)
    assert pool.restart_lost() == (0,)
    kill_all(pool)
    with pytest.raises(EngineError, match=r"(?s)max_restarts: engine 0 died 4 times, allowed are 3 .*the log"):
        pool.restart_lost()


def test_the_first_start_of_a_run_is_not_tried_again(pauses: list[float]) -> None:
    """What is wrong then is wrong in the configuration."""
    Scripted.outcomes = {0: iter([False])}
    spec = EngineSpec(index=0, model_dir="m", dtype="float32", devices=(0,), context_length=8, log_file="l")
    pool = EnginePool([spec])
    with pytest.raises(EngineError, match="did not start"):
        pool.wait_ready()
    assert pauses == []
