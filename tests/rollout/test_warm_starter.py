"""Processes that the warm starter forks are like processes that were started; it ends with its owner."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specactor.cpu import sglang as cpu
from specactor.rollout import warm_starter as warm
from specactor.rollout.sglang.engine_client import Engine, EngineSpec
from specactor.rollout.warm_starter import NAME, Forked, WarmStarter
from tests.rollout.conftest import process_exists, request

pytestmark = pytest.mark.skipif(cpu.has_gpu(), reason="engines are not forked where there is a GPU")
CHILD = "tests.rollout.warm_child"


@pytest.fixture
def environment(warm_starter: WarmStarter) -> dict[str, str]:
    """Of an engine's process."""
    return cpu.process_environment((0,)) | {"SGLANG_EAGER_INPUT_NO_COPY": "1"}


class Child:
    """One forked `warm_child`, if the starter forks it."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs, log.open("wb") as file:
            self.forked = warm.fork(CHILD, ("word",), (theirs.fileno(), file.fileno()), environment)

    def about(self) -> dict[str, Any]:
        self.connection.settimeout(60)
        found: dict[str, Any] = json.loads(self.connection.makefile().readline())
        return found


def gone(forked: Forked) -> bool:
    forked.wait(30)
    deadline = time.monotonic() + 30
    while process_exists(forked.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return forked.poll() == 0


def test_a_forked_process_is_like_a_started_one(environment: dict[str, str], tmp_path: Path) -> None:
    child = Child(environment | {"EXTRA": "1"}, tmp_path / "log")
    assert child.forked is not None
    about = child.about()
    assert about["pid"] == about["session"] == child.forked.pid
    assert about["name"] == "__main__"
    assert about["folder"] == os.getcwd()
    assert about["environment"] == {k: v for k, v in environment.items() if k != NAME} | {"EXTRA": "1"}
    assert about["warm"]
    assert about["threads"] == 1
    assert sum(file.startswith("socket:") for file in about["files"]) == 1, "one is of the starter"
    assert f"-m {CHILD} word --fd" in about["title"]
    forked, own = (tmp_path / "log").read_text().splitlines()
    assert "forked by the warm starter" in forked
    assert own == "this is the log"
    assert child.forked.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.forked.wait(0.01)
    child.connection.close()  # no copy of it is left in the starter
    assert gone(child.forked)


def test_children_are_told_apart_and_end_by_signals(environment: dict[str, str], tmp_path: Path) -> None:
    children = [Child(environment, tmp_path / str(i)) for i in range(3)]
    for child in children:
        assert child.forked is not None
        assert child.about()["pid"] == child.forked.pid
    assert children[1].forked is not None
    children[1].forked.send_signal(signal.SIGKILL)
    assert gone(children[1].forked)
    assert [child.forked is not None and child.forked.poll() for child in children] == [None, 0, None]
    for child in children:
        child.connection.close()


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONPATH", "SGLANG_PLUGINS", "TORCHDYNAMO_DISABLE"])
def test_settings_that_were_read_on_import_are_not_passed_over(
    environment: dict[str, str], tmp_path: Path, name: str
) -> None:
    assert Child(environment | {name: environment[name] + "2"}, tmp_path / "log").forked is None
    del environment[name]
    assert Child(environment, tmp_path / "log").forked is None


def test_without_a_starter_nothing_is_forked(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "nobody listens here")
    assert Child(environment, tmp_path / "log").forked is None
    monkeypatch.delenv(NAME)
    assert Child(environment, tmp_path / "log").forked is None


def test_what_is_no_order_leaves_the_starter_alone(environment: dict[str, str], tmp_path: Path) -> None:
    for body in (
        b"",
        b"{}",
        b"\xff",
        b'{"module":"\xc1"}',
        b'{"module":"os","arguments":[],"environment":{},"folder":"/"}',
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect("\0" + os.environ[NAME])
            if body:
                connection.send(body)
                assert connection.recv(64) == b""
    child = Child(environment, tmp_path / "log")
    assert child.forked is not None
    child.connection.close()


def test_a_child_whose_caller_gave_up_ends_before_it_does_anything(environment: dict[str, str], tmp_path: Path) -> None:
    """Else two processes would talk on one socket: the caller starts another one."""
    ours, theirs = socket.socketpair()
    order = (CHILD, (), {k: v for k, v in environment.items() if k != NAME}, os.getcwd())
    with ours, theirs, (tmp_path / "log").open("wb") as log:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(60)
            connection.connect("\0" + os.environ[NAME])
            socket.send_fds(connection, [msgspec.json.encode(order)], (theirs.fileno(), log.fileno()))
            answer, files, _, _ = socket.recv_fds(connection, 64, 1)
        assert gone(Forked(int(answer), files[0]))
    assert "this is the log" not in (tmp_path / "log").read_text()


def test_a_starter_that_hangs_is_waited_for_once(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "ANSWER_S", 0.2)
    monkeypatch.setenv(NAME, f"specactor-hangs-{os.getpid()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + os.environ[NAME])
        listener.listen()
        assert Child(environment, tmp_path / "log").forked is None
        assert NAME not in os.environ, "the next one is started at once"


def test_a_name_that_is_taken_leaves_a_run_without_a_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind("\0specactor-taken")
        with WarmStarter("specactor-taken"):
            assert NAME not in os.environ


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_a_starter_ends_with_its_owner(pause_s: float) -> None:
    """Also amid its imports."""
    command = [sys.executable, "-m", "tests.rollout.warm_owner", f"specactor-test-warm-{os.getpid()}-{pause_s}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        starter = int(owner.stdout.readline())
        time.sleep(pause_s)
        assert process_exists(starter)
        owner.kill()
        owner.wait(30)
        deadline = time.monotonic() + 30
        while process_exists(starter):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def threads_of_gloo(engine: Engine) -> int:
    assert engine.ready is not None
    names = [
        file.read_text() for pid in engine.ready.scheduler_pids for file in Path(f"/proc/{pid}/task").glob("*/comm")
    ]
    return names.count("gloo_tcp_loop\n")


def test_an_engine_that_was_started_generates_what_forked_ones_do(
    engine: Engine, make_spec: Callable[..., EngineSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(i) for i in range(8)]
    expected = engine.generate(requests)
    monkeypatch.delenv(NAME)
    started = Engine(make_spec(60))
    try:
        started.wait_ready(300)
        found = started.generate(requests)
        assert threads_of_gloo(started) == threads_of_gloo(engine) == 1, "each takes a hundredth of a core"
    finally:
        started.stop()
    assert [t.token_ids for t in found] == [t.token_ids for t in expected]
    assert [t.logprobs for t in found] == [t.logprobs for t in expected]
