"""Engines that die: no request is lost or doubled, the tokens are those of an undisturbed run, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from specactor.config import EngineConfig
from specactor.errors import EngineError
from specactor.rollout.pool import EnginePool, RolloutOutcome
from specactor.rollout.process_guard import descendants
from specactor.rollout.sglang.engine_client import Engine, EngineSpec
from specactor.rollout.warm_starter import NAME
from specactor.types import RolloutRequest, Trajectory
from tests.rollout.conftest import Footprint, heed_interrupts, request

BATCH = [request(i, new=30 + 13 * i % 60) for i in range(64)]
"""They end one by one, and last longer than three strikes, which end with more responses the faster the machine."""


@pytest.fixture(scope="module")
def pool(make_spec: Callable[..., EngineSpec]) -> Iterator[EnginePool]:
    config = EngineConfig(max_running_requests=8, max_total_tokens=4096, max_restarts=4)
    with pytest.MonkeyPatch.context() as patch, EnginePool([make_spec(2, config=config)]) as pool:
        patch.setattr(EngineConfig, "request_timeout_s", 20.0)
        pool.wait_ready()
        yield pool


def strike(
    pool: EnginePool, requests: list[RolloutRequest], victim: Callable[[Engine], int], by: signal.Signals
) -> tuple[RolloutOutcome, Footprint]:
    """Generate, and hit a process of the engine after the third response."""
    engine = pool.engines[0]
    seen: list[str] = []

    def on_finished(trajectory: Trajectory) -> None:
        seen.append(trajectory.request_id)
        if len(seen) == 3:
            os.kill(victim(engine), by)

    footprint = Footprint.of(engine.pid)
    assert len(footprint.pids) >= 3
    assert footprint.folders
    assert footprint.shared_files
    started = time.monotonic()
    outcome = pool.generate(requests, on_finished=on_finished)
    assert time.monotonic() - started < 60
    assert pool.lost() == (engine.index,)
    assert sorted(seen) == sorted(t.request_id for t in outcome.finished)
    return outcome, footprint


def kill_replacement(pool: EnginePool) -> Future[Footprint]:
    """Kill the engine that is started next as soon as it has a process to load in; what it had on the machine."""
    dead = pool.engines[0]

    def kill() -> Footprint:
        while pool.engines[0] is dead or len(descendants(pool.engines[0].pid)) == 0:
            time.sleep(0.01)
        engine = pool.engines[0]
        os.kill(descendants(engine.pid)[0], signal.SIGSTOP)  # a fork is ready within a second
        assert engine.ready is None, "it was ready too soon to be killed while it loads"
        footprint = Footprint.of(engine.pid)
        os.kill(descendants(engine.pid)[-1], signal.SIGKILL)
        return footprint

    return ThreadPoolExecutor(max_workers=1).submit(kill)


def test_deaths_in_mid_generation(pool: EnginePool, engine: Engine) -> None:
    """A dead scheduler, whose replacement is killed while it loads, a dead server, a hanging scheduler.

    Generated again, the rollout equals an undisturbed one.
    """
    want = {t.request_id: t for t in engine.generate(BATCH)}
    finished: list[Trajectory] = []
    pending = BATCH

    def scheduler(engine: Engine) -> int:
        assert engine.ready is not None
        return engine.ready.scheduler_pids[0]

    def server(engine: Engine) -> int:
        return descendants(engine.pid)[0]

    for victim, by in ((scheduler, signal.SIGKILL), (server, signal.SIGKILL), (scheduler, signal.SIGSTOP)):
        outcome, footprint = strike(pool, pending, victim, by)
        footprint.assert_gone()
        assert 3 <= len(outcome.finished) < len(pending)
        finished += outcome.finished
        pending = outcome.unfinished
        assert pool.lost()
        assert pool.generate(pending).unfinished == pending, "nobody is left to generate"
        killed = kill_replacement(pool) if victim is scheduler and by == signal.SIGKILL else None
        assert pool.restart_lost() == (2,)
        if killed is not None:
            killed.result().assert_gone()
    outcome = pool.generate(pending)
    assert not outcome.unfinished
    assert not pool.lost()
    finished += outcome.finished
    assert sorted(t.request_id for t in finished) == sorted(want)
    for trajectory in finished:
        assert trajectory.token_ids == want[trajectory.request_id].token_ids
        assert trajectory.logprobs == want[trajectory.request_id].logprobs

    _, footprint = strike(pool, BATCH, lambda engine: engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"(?s)max_restarts: engine 2 died 5 times.*engine-2.log:\n  \|"):
        pool.restart_lost()
    footprint.assert_gone()


def test_a_pool_of_two_uses_both(engines: tuple[Engine, Engine]) -> None:
    """Engines of different sizes in one pool: every request once, groups whole, tokens as from one engine."""
    pool = EnginePool([])
    pool.engines = list(engines)
    for version, engine in enumerate(engines):
        engine.flush()
        engine.version = version
    outcome = pool.generate(BATCH)
    assert [t.request_id for t in outcome.finished] == [r.request_id for r in BATCH]
    served_by = [t.spans[0].version for t in outcome.finished]
    assert min(served_by.count(version) for version in (0, 1)) >= len(BATCH) // 4
    pool.set_version(3)
    assert [engine.version for engine in engines] == [3, 3]
    pool.flush()
    alone = engines[0].generate(BATCH)
    assert [t.token_ids for t in alone] == [t.token_ids for t in outcome.finished]


def test_a_refused_request_is_an_error_and_hurts_no_engine(engines: tuple[Engine, Engine]) -> None:
    pool = EnginePool([])
    pool.engines = list(engines)
    with pytest.raises(EngineError, match="max_new_tokens"):
        pool.generate([*BATCH, request(99, new=1000)])
    assert not pool.lost()


def test_a_pool_without_engines_does_nothing() -> None:
    with EnginePool([]) as pool:
        pool.wait_ready()
        assert pool.generate([]) == RolloutOutcome(finished=[], unfinished=[])
        assert pool.restart_lost() == ()
        pool.release_memory()
        pool.resume_memory()


def test_failing_to_start_stops_the_others(make_spec: Callable[..., EngineSpec], tmp_path: Path) -> None:
    pool = EnginePool([make_spec(3), make_spec(4, model_dir=str(tmp_path))])
    footprints = [Footprint.of(engine.pid) for engine in pool.engines]
    with pytest.raises(EngineError, match="engine 4 did not start"):
        pool.wait_ready()
    for footprint in footprints:
        footprint.assert_gone()


def test_an_engine_that_is_killed_in_its_first_start_is_started_again(make_spec: Callable[..., EngineSpec]) -> None:
    with EnginePool([make_spec(3)]) as pool:
        footprint = Footprint.of(pool.engines[0].pid)
        os.kill(pool.engines[0].pid, signal.SIGKILL)
        pool.wait_ready()
        footprint.assert_gone()
        assert len(pool.generate(BATCH[:1]).finished) == 1


class Parent:
    """A process that owns an engine."""

    def __init__(self, spec: EngineSpec, folder: Path, *, warm: bool) -> None:
        folder.mkdir()
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rollout.parent_script", msgspec.json.encode(spec).decode(), str(folder)],
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if warm or name != NAME},
            preexec_fn=heed_interrupts,
        )

    def wait_for(self, name: str) -> str:
        deadline = time.monotonic() + 120
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.05)
        return (self.folder / name).read_text()


def test_parents_that_go_leave_nothing(make_spec: Callable[..., EngineSpec], tmp_path: Path) -> None:
    """kill -9 while the engine starts; kill -9 while it generates; Ctrl-C while it generates."""
    parents = [Parent(make_spec(5 + i), tmp_path / str(i), warm=i > 0) for i in range(3)]
    try:
        starting, busy, interrupted = parents
        guard = int(starting.wait_for("started"))
        deadline = time.monotonic() + 120
        while len((footprint := Footprint.of(guard)).pids) < 2:
            assert time.monotonic() < deadline
        time.sleep(1)  # amid the imports
        starting.process.kill()
        footprint.assert_gone()
        for parent, end in ((busy, signal.SIGKILL), (interrupted, signal.SIGINT)):
            guard = int(parent.wait_for("started"))
            parent.wait_for("busy")
            footprint = Footprint.of(guard)
            assert footprint.shared_files
            parent.process.send_signal(end)
            footprint.assert_gone()
            assert parent.process.wait(60) != 0
    finally:
        for parent in parents:
            parent.process.kill()
            parent.process.wait(10)
