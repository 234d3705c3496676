"""Drafters that die are replaced on the side, at the same address, and not for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specactor.errors import EngineError
from specactor.rollout import drafter_pool
from specactor.rollout.decoupled import supervisor
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.driver import BorrowedDevices
from specactor.rollout.sglang.engine_client import Engine
from specactor.weights_sync.draft_push import DraftSender
from tests.rollout.conftest import Footprint
from tests.rollout.decoupled.test_supervisor import PATIENCE_S, assert_drafts, child_of, is_listening, make_drafter_spec

__all__ = ["make_drafter_spec"]

PAUSE_S = 0.05


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_pool, "RETRY_PAUSE_S", PAUSE_S)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_dead_drafters_are_replaced(make_drafter_spec: Callable[..., DrafterSpec], tmp_path: Path) -> None:
    specs = [make_drafter_spec(index=i, log_file=str(tmp_path / f"{i}.log"), max_restarts=2) for i in range(2)]
    footprints = []
    with DrafterPool(specs) as pool:
        pool.wait_ready()
        for death in (1, 2):
            footprints += [Footprint.of(drafter.pid) for drafter in pool.drafters]
            os.kill(child_of(pool.drafters[0]), signal.SIGKILL)
            wait_until(lambda death=death: pool.restarts == death)  # type: ignore[misc]
            pool.drafters[0].wait_ready()
            assert_drafts(specs[0])
        assert_drafts(specs[1])
        footprints += [Footprint.of(drafter.pid) for drafter in pool.drafters]
        os.kill(child_of(pool.drafters[0]), signal.SIGKILL)
        wait_until(lambda: not pool.drafters[0].alive)
        settled()
        assert not pool.drafters[0].alive, "it was restarted as often as is allowed"
        assert pool.restarts == 2
        assert_drafts(specs[1])
    for footprint in footprints:
        footprint.assert_gone(within_s=0.1)
    pool.stop()


def test_deaths_of_long_ago_are_forgotten(
    make_drafter_spec: Callable[..., DrafterSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_pool, "RESTARTS_WITHIN", 2)
    with DrafterPool([make_drafter_spec(max_restarts=1)]) as pool:
        pool.wait_ready()
        for death in (1, 2, 3):
            os.kill(child_of(pool.drafters[0]), signal.SIGKILL)
            wait_until(lambda death=death: pool.restarts == death)  # type: ignore[misc]
            pool.drafters[0].wait_ready()
            for _ in range(2):
                with pool.rollout():
                    pass
        os.kill(child_of(pool.drafters[0]), signal.SIGKILL)
        wait_until(lambda: pool.restarts == 4)
        pool.drafters[0].wait_ready()
        with pool.rollout():
            pass
        os.kill(child_of(pool.drafters[0]), signal.SIGKILL)
        wait_until(lambda: [len(died) for died in pool._died] == [2])
        settled()
        assert not pool.drafters[0].alive, "twice within two rollouts"
        assert pool.restarts == 4


def test_an_error_in_watching_one_ends_no_watch(
    make_drafter_spec: Callable[..., DrafterSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as of a shared disk, or no further process or thread."""
    specs = [make_drafter_spec(index=i, log_file=str(tmp_path / f"{i}.log")) for i in range(2)]
    with DrafterPool(specs) as pool:
        pool.wait_ready()
        raised = []

        def kill(drafter: DrafterProcess) -> None:
            if drafter.spec.index == 0 and not raised:
                raised.append(drafter)
                raise RuntimeError("can't start new thread")
            original(drafter)

        original = DrafterProcess.kill
        monkeypatch.setattr(DrafterProcess, "kill", kill)
        for drafter in pool.drafters:
            os.kill(child_of(drafter), signal.SIGKILL)
        wait_until(lambda: pool.restarts == 2)
        assert raised
        for drafter in pool.drafters:
            drafter.wait_ready()


@pytest.mark.parametrize("asleep", [False, True])
def test_one_that_hangs_is_replaced_and_one_that_is_slow_is_not(
    make_drafter_spec: Callable[..., DrafterSpec], monkeypatch: pytest.MonkeyPatch, asleep: bool
) -> None:
    """Nobody but the watcher asks it anything, and the test how long it has been silent."""
    for name in ("SIGN_OF_LIFE_S", "GRACE_S"):
        monkeypatch.setattr(supervisor, name, 0.1)
    spec = make_drafter_spec("Sleeping", engine=4 if asleep else None, max_restarts=1)
    with DrafterPool([spec]) as pool:
        pool.wait_ready()
        pool.free(4)
        first = pool.drafters[0]
        footprint = Footprint.of(first.pid)

        def silent_for(seconds: float) -> bool:
            with pool._lock:
                return first.hangs(seconds)

        os.kill(child_of(first), signal.SIGSTOP)
        wait_until(lambda: silent_for(1.0))
        os.kill(child_of(first), signal.SIGCONT)
        wait_until(lambda: not silent_for(0.0))
        assert first.alive, "it was late, and has answered since"
        os.kill(child_of(first), signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(drafter_pool, "ANSWER_S", 2.0)
            wait_until(lambda: pool.restarts == 1)
        footprint.assert_gone(within_s=0.1)
        assert [len(died) for died in pool._died] == [1]
        pool.drafters[0].wait_ready()
        if asleep:
            wait_until(lambda: pool.wake(4) or pool.any_awake())  # not while a sign of life is late
        assert_drafts(spec)


def lendable(make_drafter_spec: Callable[..., DrafterSpec], **more: object) -> DrafterSpec:
    return make_drafter_spec("Sleeping", engine=4, max_restarts=2, **more)


def test_those_on_devices_of_engines_are_awake_in_rollouts_alone(
    make_drafter_spec: Callable[..., DrafterSpec], tmp_path: Path
) -> None:
    spec, other = lendable(make_drafter_spec), make_drafter_spec(index=1, log_file=str(tmp_path / "1.log"))
    with DrafterPool([spec, other]) as pool:
        pool.wait_ready()
        assert pool.wake_s(3) is None, "nobody is on that engine's device"
        assert not is_listening(spec)
        for how in ("woken", "woken and sent away", "not woken"):
            with pool.rollout():
                assert pool.wake_s(4) is not None
                if how != "not woken":
                    pool.wake(4)
                    assert pool.any_awake()
                    assert pool.wake_s(4) is None
                if how == "woken":
                    assert_drafts(spec)
                elif how == "woken and sent away":
                    pool.sleep(4)
                    assert not pool.any_awake()
                    assert pool.wake_s(4) is None, "it has not woken yet"
                    wait_until(lambda: not pool.drafters[0].leaving and pool.wake_s(4) is not None)
                    assert not is_listening(spec)
            assert not pool.any_awake()
            assert not is_listening(spec)
            assert is_listening(other)
        assert pool.work().keys() == {"drafter 0", "drafter 1"}
        assert pool.restarts == 0


@pytest.mark.parametrize("fate", ["hangs", "is killed"])
def test_one_that_does_not_leave_is_ended_and_comes_back_when_its_engine_is_free(
    make_drafter_spec: Callable[..., DrafterSpec], monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    with DrafterPool([lendable(make_drafter_spec)]) as pool:
        pool.wait_ready()
        footprint = Footprint.of(pool.drafters[0].pid)
        with monkeypatch.context() as patch, pool.rollout():
            patch.setattr(drafter_pool, "LATE_S", 1.0)
            pool.wake(4)
            assert_drafts(pool.drafters[0].spec)
            os.kill(child_of(pool.drafters[0]), signal.SIGSTOP if fate == "hangs" else signal.SIGKILL)
        footprint.assert_gone()
        settled()
        assert pool.restarts == 0, "the device is the trainer's"
        assert pool.wake_s(4) is None
        with pool.rollout():
            pool.free(3)
            pool.free(4)
            pool.sleep(4)
            settled()
            assert pool.restarts == 0, "its engine has something to do"
            pool.free(4)
            wait_until(lambda: pool.wake_s(4) is not None)
            pool.wake(4)
            assert pool.any_awake()
            assert_drafts(pool.drafters[0].spec)
        assert pool.restarts == 1
        assert pool.drafters[0].alive
        assert not pool.any_awake()
        assert not pool.any_awake()


@pytest.mark.parametrize("what", ["end", "start"])
def test_nobody_waits_while_a_drafter_is_ended_or_started(
    make_drafter_spec: Callable[..., DrafterSpec], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Not who lends an engine's device, and not who takes it back before it sends to the engine."""
    spec = lendable(make_drafter_spec)
    hangs, goes_on = threading.Event(), threading.Event()
    kill, start = DrafterProcess.kill, DrafterProcess

    def hold(do: Callable[..., Any], *arguments: Any) -> Any:
        if threading.current_thread().name == "drafters":
            hangs.set()
            assert goes_on.wait(PATIENCE_S)
        return do(*arguments)

    with DrafterPool([spec]) as pool:
        pool.wait_ready()
        with pool.rollout():
            engines = cast("list[Engine]", [SimpleNamespace(index=4)])
            devices = BorrowedDevices(engines, pool)
            devices.lend([0], lambda: [(0, 10**12)], [], 8)
            assert devices.num_woken == 1
            if what == "start":
                monkeypatch.setattr(drafter_pool, "DrafterProcess", lambda spec: hold(start, spec))
            elif what == "end":
                monkeypatch.setattr(DrafterProcess, "kill", lambda self: hold(kill, self))
            os.kill(child_of(pool.drafters[0]), signal.SIGKILL)
            assert hangs.wait(PATIENCE_S)

            def take_back_and_lend() -> None:
                devices.give_back(0)
                devices.lend([0], lambda: [(0, 10**12)], [], 8)
                devices.give_back(0)

            driver = threading.Thread(target=take_back_and_lend, daemon=True)
            driver.start()
            driver.join(PATIENCE_S)
            waits = driver.is_alive()
            goes_on.set()
            assert not waits
            wait_until(lambda: pool._gone_s[0] is not None)
            assert pool.restarts == 0, "its engine was taken back meanwhile"
            pool.free(4)
            wait_until(lambda: pool.restarts == 1)
        assert [len(died) for died in pool._died] == [1]


def settled() -> None:
    """Whatever the watcher is about to do is done."""
    time.sleep(1.0)


def test_one_that_is_late_takes_no_other_with_it(
    make_drafter_spec: Callable[..., DrafterSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drafter_pool, "LATE_S", 0.5)
    monkeypatch.setattr(drafter_pool, "MOMENT_S", 5.0)
    specs = [lendable(make_drafter_spec), lendable(make_drafter_spec, index=1, log_file=str(tmp_path / "1.log"))]
    with DrafterPool(specs) as pool:
        pool.wait_ready()
        with pool.rollout():
            pool.wake(4)
            assert_drafts(specs[0])
            assert_drafts(specs[1])
            os.kill(child_of(pool.drafters[0]), signal.SIGSTOP)
        assert [drafter.alive for drafter in pool.drafters] == [False, True], "the whole wait was the first one's"
        assert pool.wake_s(4) is not None


@pytest.mark.parametrize("on_gpus", [False, True])
def test_the_end_of_a_rollout_is_no_death_for_one_that_is_starting(
    make_drafter_spec: Callable[..., DrafterSpec], on_gpus: bool
) -> None:
    """It died once, and rollouts are shorter than a start."""
    spec = make_drafter_spec("Slow", engine=4, max_restarts=1 if not on_gpus else 3)
    with DrafterPool([spec], on_gpus=on_gpus) as pool:
        pool.wait_ready()
        os.kill(child_of(pool.drafters[0]), signal.SIGKILL)
        wait_until(lambda: not pool.drafters[0].alive)
        for rollout in range(1, 4):
            with pool.rollout():
                pool.free(4)
                wait_until(lambda want=rollout if on_gpus else 1: pool.restarts == want)  # type: ignore[misc]
            assert pool.drafters[0].alive == (not on_gpus)
        with pool.rollout():
            pool.free(4)
            wait_until(lambda: pool.wake_s(4) is not None)
        assert [len(died) for died in pool._died] == [1]
        assert pool._late == [0], "it slept in time"
        assert pool.drafters[0].alive


def test_one_that_is_late_every_time_is_given_up(make_drafter_spec: Callable[..., DrafterSpec]) -> None:
    with DrafterPool([make_drafter_spec("Slow", engine=4, max_restarts=1)], on_gpus=True) as pool:
        with pool.rollout():
            pass  # it has not started yet
        assert not pool.drafters[0].alive
        pool._watcher = threading.Thread(target=pool._watch)
        pool._watcher.start()
        with pool.rollout():
            pool.free(4)
            wait_until(lambda: pool.restarts == 1)
        assert not pool.drafters[0].alive
        with pool.rollout():
            pool.free(4)
            settled()
            assert pool.restarts == 1
        assert [len(died) for died in pool._died] == [0]


def test_one_that_cannot_wake_dies_as_often_as_is_allowed(make_drafter_spec: Callable[..., DrafterSpec]) -> None:
    with DrafterPool([make_drafter_spec("Unwakeable", engine=4, max_restarts=1)]) as pool:
        pool.wait_ready()
        with pool.rollout():
            pool.free(4)
            for deaths in (1, 2):
                wait_until(lambda: pool.wake_s(4) is not None)
                pool.wake(4)
                wait_until(lambda want=deaths: [len(died) for died in pool._died] == [want])  # type: ignore[misc]
                assert not pool.any_awake()
            settled()
            assert pool.restarts == 1
            assert pool.wake_s(4) is None
            pool.wake(4)
        assert "MemoryError: no room" in pool.drafters[0].log_tail()


def test_failing_to_start_stops_the_others(make_drafter_spec: Callable[..., DrafterSpec]) -> None:
    pool = DrafterPool([make_drafter_spec(), make_drafter_spec("broken", index=1)])
    footprints = [Footprint.of(drafter.pid) for drafter in pool.drafters]
    with pytest.raises(EngineError, match="drafter 1 did not start: ValueError"):
        pool.wait_ready()
    for footprint in footprints:
        footprint.assert_gone(within_s=0.1)


def test_a_pool_without_drafters_does_nothing() -> None:
    with DrafterPool([]) as pool:
        pool.wait_ready()
        assert pool.restarts == 0


def test_drafters_tell_what_they_did_also_those_that_are_new(
    make_drafter_spec: Callable[..., DrafterSpec],
) -> None:
    spec = make_drafter_spec(max_restarts=1)
    with DrafterPool([spec]) as pool:
        assert pool.work() == {}, "it does not listen yet"
        pool.wait_ready()
        assert_drafts(spec)
        told = pool.work(trace=True)["drafter 0"]
        assert told.busy_s > 0
        assert told.spans == []
        assert_drafts(spec)
        assert any(span.name == "draft" for span in pool.work()["drafter 0"].spans)
        os.kill(child_of(pool.drafters[0]), signal.SIGKILL)
        wait_until(lambda: pool.restarts == 1)
        wait_until(lambda: pool.work().keys() == {"drafter 0"})
        assert_drafts(spec)
        assert pool.work()["drafter 0"].busy_s > 0


def test_those_that_hang_hold_a_push_once_and_not_for_long(
    make_drafter_spec: Callable[..., DrafterSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two of three stand still while they are brought new weights. When they go on they are like any others."""
    specs = [make_drafter_spec("Renewing", index=i, log_file=str(tmp_path / f"{i}.log")) for i in range(3)]
    sender = DraftSender(torch.float32)

    def push(version: int) -> tuple[list[str], float, float]:
        """What they say, when the last one answered, and what it took."""
        began_s = time.monotonic()
        said, answered_s = pool.renew(sender.pack([("norm", torch.full((5,), float(version)))], version=version))
        return said, answered_s, time.monotonic() - began_s

    monkeypatch.setattr(drafter_pool, "LATE_S", 60.0)
    with DrafterPool(specs) as pool:
        pool.wait_ready()
        assert push(1)[0] == []  # each imports torch for it
        monkeypatch.setattr(drafter_pool, "LATE_S", 5.0)
        hanging = [child_of(drafter) for drafter in pool.drafters[:2]]
        for pid in hanging:
            os.kill(pid, signal.SIGSTOP)
        try:
            said, answered_s, took_s = push(2)
            assert [problem[:9] for problem in said] == ["drafter 0", "drafter 1"]
            assert 5.0 <= took_s < 9.0, "they were waited for together"
            assert answered_s < 4.0, "what was waited for in vain is no part of a push"
            assert [drafter.version for drafter in pool.drafters] == [1, 1, 2]
            said, _, took_s = push(3)
            assert (said, pool.drafters[2].version) == ([], 3)
            assert took_s < 4.0, "who has not answered is not waited for again"
        finally:
            for pid in hanging:
                os.kill(pid, signal.SIGCONT)
        wait_until(lambda: all(drafter.wants(4) for drafter in pool.drafters))
        assert push(4)[0] == []
        assert [drafter.version for drafter in pool.drafters] == [4, 4, 4]
        assert pool.restarts == 0
    sender.close()
