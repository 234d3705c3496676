"""Engines that die while they are started again. No engine is started; `test_pool` kills real ones."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from specactor.config import EngineConfig
from specactor.errors import EngineError
from specactor.rollout import frames
from specactor.rollout import pool as pool_module
from specactor.rollout.child_process import StartRefusedError
from specactor.rollout.frames import Failed
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang import engine_server
from specactor.rollout.sglang.engine_client import EngineSpec
from specactor.rollout.sglang.engine_protocol import FROM_ENGINE


class Scripted:
    """An engine that starts, or dies while it starts, as its index has it next."""

    outcomes: dict[int, Iterator[bool | type[EngineError]]]
    full = 0  # starts that a full disk will refuse

    def __init__(self, spec: EngineSpec) -> None:
        if Scripted.full:
            Scripted.full -= 1
            raise OSError("no space left")
        self.spec, self.index = spec, spec.index
        self.ready: object = None
        self.alive = True

    @classmethod
    def start(cls, spec: EngineSpec) -> Scripted:
        return cls(spec)

    def wait_ready(self, timeout_s: float) -> None:
        outcome = next(self.outcomes[self.index])
        if outcome is not True:
            self.kill()
            raise (outcome or EngineError)("did not start")
        self.ready = SimpleNamespace(kv_tokens=self.spec.kv_tokens or 5000 + self.index)

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


def make_pool(outcomes: dict[int, list[bool]], **named: Any) -> EnginePool:
    """Engines that are all ready, once, before what is to come."""
    pool = starting({index: [True, *later] for index, later in outcomes.items()}, **named)
    pool.wait_ready()
    return pool


def starting(
    outcomes: Mapping[int, list[bool | type[EngineError]]], *, max_restarts: int = 3, **named: Any
) -> EnginePool:
    Scripted.outcomes = {index: iter(of) for index, of in outcomes.items()}
    config = EngineConfig(max_restarts=max_restarts)
    common: dict[str, Any] = {"model_dir": "m", "dtype": "float32", "devices": (0,), "context_length": 8}
    specs = [EngineSpec(index=i, log_file=f"engine-{i}.log", config=config, **common) for i in outcomes]
    return EnginePool(specs, **named)


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


def test_a_replacement_has_a_kv_pool_of_the_same_size(pauses: list[float]) -> None:
    """Then the trainer's parameters are on the device, and SGLang would make it smaller, or find no room at all."""
    pool = make_pool({0: [True, True], 1: [False, True]})
    assert [engine.spec.kv_tokens for engine in pool.engines] == [0, 0]
    for _ in range(2):
        pool.engines[0].kill()
        if pool.engines[1].spec.kv_tokens == 0:
            pool.engines[1].kill()
        pool.restart_lost()
        assert [engine.spec.kv_tokens for engine in pool.engines] == [5000, 5001]


def test_each_engine_is_tried_until_it_starts(pauses: list[float]) -> None:
    pool = make_pool({0: [False, True], 1: [True]})
    kill_all(pool)
    assert pool.restart_lost() == (0, 1)
    assert pauses == [1.0]
    assert not pool.lost()


def test_an_engine_that_cannot_be_made_is_tried_again(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no process yet that could die, where there is no room for its log, or no process left."""
    pool = make_pool({0: [True]})
    kill_all(pool)
    monkeypatch.setattr(Scripted, "full", 2)
    assert pool.restart_lost() == (0,)
    assert pauses == [1.0, 2.0]
    assert not pool.lost()


def test_an_engine_that_is_first_lost_meanwhile_is_named_too(pauses: list[float]) -> None:
    pool = make_pool({0: [True], 1: [False, True]})
    first = pool.engines[0]
    pool.engines[1].kill()
    Scripted.outcomes[1] = map(lambda started: (first.kill(), started)[1], Scripted.outcomes[1])
    assert pool.restart_lost() == (0, 1)
    assert not pool.lost()


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


def test_restarts_of_long_ago_are_forgotten(pauses: list[float]) -> None:
    pool = make_pool({0: [True] * 99}, max_restarts=2)
    for step in (1, 60, 101, 160, 201):  # never three within a hundred
        pool.set_version(step)
        kill_all(pool)
        assert pool.restart_lost() == (0,)
    pool.set_version(259)
    kill_all(pool)
    with pytest.raises(EngineError, match="engine 0 died 3 times, allowed are 2 restarts in 100 steps"):
        pool.restart_lost()


def test_only_the_engine_that_died_uses_up_a_restart_where_a_failed_sync_ended_the_others(pauses: list[float]) -> None:
    pool = make_pool({0: [True] * 9, 1: [True] * 9}, max_restarts=3)
    for _ in range(3):
        kill_all(pool)
        assert pool.restart_lost(ended=(1,)) == (0, 1)
    kill_all(pool)
    with pytest.raises(EngineError, match="engine 0 died 4 times, allowed are 3"):
        pool.restart_lost(ended=(1,))


def test_a_first_start_that_fails_is_tried_again(pauses: list[float]) -> None:
    """The cause may pass: a GPU that the last job still holds, a port that another process took."""
    pool = starting({0: [True], 1: [False, False, True]})
    first = pool.engines[0]
    pool.wait_ready()
    assert pool.engines[0] is first
    assert all(engine.alive and engine.ready is not None for engine in pool.engines)
    assert pauses == [1.0, 2.0]


def test_a_first_start_that_fails_for_good_ends_the_run(pauses: list[float]) -> None:
    pool = starting({0: [True], 1: [False] * 9}, max_restarts=2)
    with pytest.raises(EngineError, match=r"(?s)max_restarts: engine 1 died 3 times.*the log"):
        pool.wait_ready()
    assert not any(engine.alive for engine in pool.engines)


def test_tries_of_a_first_start_take_no_longer_than_one_may(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineConfig, "start_timeout_s", 20.0)
    pool = starting({0: [False] * 99}, max_restarts=99)
    with pytest.raises(EngineError, match=r"engine 0 died and could not be replaced within 20 s\."):
        pool.wait_ready()
    assert sum(pauses) < 20


@pytest.mark.parametrize("tries", [0, 1])
def test_what_an_engine_itself_refuses_at_its_first_start_ends_the_run_at_once(pauses: list[float], tries: int) -> None:
    """It is wrong in the configuration. Later, where it has started before, the cause may pass."""
    pool = starting({0: [False] * tries + [StartRefusedError, True]})
    with pytest.raises(StartRefusedError, match="did not start"):
        pool.wait_ready()
    assert len(pauses) == tries
    pool = make_pool({0: [StartRefusedError, True]})  # type: ignore[list-item]
    kill_all(pool)
    assert pool.restart_lost() == (0,)


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (EngineError("no such model"), True),
        (ValueError("no such argument"), True),
        (OSError("port in use"), False),
        (EOFError("a scheduler died"), False),
        (RuntimeError("out of memory"), False),
        (NotImplementedError("no such kernel"), True),
        (RecursionError("nested too deep"), True),
    ],
)
def test_an_engine_refuses_what_will_not_pass_and_dies_of_the_rest(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_told: bool
) -> None:
    def start(spec: EngineSpec) -> NoReturn:
        raise error

    monkeypatch.setattr(engine_server, "_start", start)
    spec = EngineSpec(index=0, model_dir="m", dtype="float32", devices=(0,), context_length=8, log_file="l")
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(frames.pack(0, spec))
        with theirs:
            engine_server.run(theirs)
        frame = frames.read(ours, FROM_ENGINE)
    assert (frame is not None) == is_told
    if frame is not None:
        assert frame[2] == Failed(message=f"{type(error).__name__}: {error}")


def test_no_engine_is_started_after_the_end_of_the_run(pauses: list[float]) -> None:
    """Another rank has failed while this one tries again, in another thread."""
    pool = make_pool({0: [True]})
    pool.stop()
    with pytest.raises(EngineError, match="engine 0 is not started again: the run has ended"):
        pool.restart_lost()
