"""One failure, one report."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from specactor.errors import EngineError, PeerFailedError
from specactor.parallel import collective, failure
from specactor.parallel.failure import Member, failure_guard
from specactor.waits import LATE_S

TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train_moe.py"


class Tickets:
    """A store in memory."""

    def __init__(self, taken: int = 0) -> None:
        self.taken = taken

    def add(self, key: str, amount: int) -> int:
        self.taken += amount
        return self.taken


def leave(rank: int, store: Tickets | None, error: BaseException) -> int:
    with pytest.raises(SystemExit) as exit_, failure_guard(rank, store):
        raise error
    return int(str(exit_.value.code))


def test_the_first_failing_rank_reports_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    store = Tickets()
    assert leave(1, store, EngineError("gone")) == 1
    assert leave(0, store, EngineError("gone too")) == 1
    assert capsys.readouterr().err == "specactor: rank 1: EngineError: gone\n"


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        (
            "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL 2.28",
            True,
        ),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)", True),
        ("NCCL communicator was aborted on rank 0.", True),
        ("[3] Connection closed by peer [127.0.0.1]:4711", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage (run with NCCL_DEBUG=WARN for details)", False),
        ("CUDA error: out of memory", False),
    ],
)
def test_what_a_collective_says_of_a_rank_that_is_gone(
    said: str, lost: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gloo's words, NCCL's and torch's; then the report names the rank, and else the error."""
    monkeypatch.setattr(failure.Failures, "lost", lambda _: "rank 1 (process 7)")
    monkeypatch.setattr(failure, "LATE_S", 0.0)
    assert leave(0, Tickets(), RuntimeError(said)) == 1
    told = capsys.readouterr().err
    assert ("rank 1 (process 7) was killed or crashed" in told) is lost
    assert (f"RuntimeError: {said}" in told) is not lost


SCRIPT = """
import os
from specactor.errors import DataError, PeerFailedError
from specactor.parallel.failure import failure_guard, launcher_store
rank, store = int(os.environ["RANK"]), launcher_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
with failure_guard(rank, store):
    raise PeerFailedError("rank 1 failed") if rank == 0 else DataError("verifier v: problem 7")
"""


NCCL = """
import importlib.util, os, sys, time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

spec = importlib.util.spec_from_file_location("train_moe", sys.argv[1])
train_moe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train_moe)
train_moe.die_with_launcher = lambda: None  # there is none
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}

from specactor.cpu import megatron
megatron.install()
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from specactor import recipes, run
from specactor.errors import DataError
from specactor.parallel import failure, meeting
from specactor.rollout import warm_starter

def init(*_, **__):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return SimpleNamespace(type="cpu")

def fail():
    raise DataError("problem 7")

class Waits:
    def __del__(self, sleep=time.sleep):
        sleep(600)

dist.destroy_process_group = lambda *_: time.sleep(600)
dist.distributed_c10d.as_a_group_that_is_destroyed_at_the_end = Waits()
config = SimpleNamespace(parallel=None, seed=0)
nothing = lambda *_, **__: nullcontext()
with (
    mock.patch.multiple(run, _checked=lambda *_: None, init_groups=init, Collective=fail),
    mock.patch.multiple(meeting, meet=lambda *_, **__: SimpleNamespace(open_store=lambda: None), HostWatch=nothing),
    mock.patch.multiple(recipes, load_or_exit=lambda *_, **__: config, to_json=lambda _: {}),
    mock.patch.object(failure, "launcher_store", lambda *_: None),
    mock.patch.object(warm_starter, "WarmStarter", nothing),
):
    sys.exit(train_moe.main())
"""


def test_a_rank_that_fails_waits_for_no_other_to_leave_its_groups(tmp_path: Path) -> None:
    """NCCL ends a communicator when all of its ranks do, and those may be in the middle of a collective. "fake" stands
    for it: its end, and a destructor when the process ends, wait for ten minutes."""
    (tmp_path / "script.py").write_text(NCCL)
    command = [sys.executable, str(tmp_path / "script.py"), str(TRAIN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "specactor: rank 0: DataError: problem 7")


@pytest.mark.parametrize(("code", "status"), [(130, 130), (None, 0), ("data: no rows are left", 1)])
def test_a_rank_that_exits_in_its_groups_says_what_python_would(
    code: object, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's function may call sys.exit with a text."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    collective.end_in_groups(code)
    assert not ended, "it is in no group"
    monkeypatch.setattr(collective, "ends_with_peers", lambda: True)
    collective.end_in_groups(code)
    assert ended == [status]
    assert capsys.readouterr().err == (f"{code}\n" if isinstance(code, str) else "")


def test_torchruns_own_report_ends_with_ours(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    last = [line for line in done.stderr.splitlines() if line.strip("= ")][-1]
    assert last == "  traceback : specactor: rank 1: DataError: verifier v: problem 7"


def test_each_start_of_torchrun_reports_its_own_failure(tmp_path: Path) -> None:
    """Also before its ranks have met: torchrun's store, where tickets are taken until then, outlives a start."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("if rank == 0", "if rank == 1"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--max-restarts", "1"]
    command = [sys.executable, *launcher, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    said = "specactor: rank 0: DataError: verifier v: problem 7"
    assert [line for line in done.stderr.splitlines() if line.startswith("specactor: ")] == [said, said]
    last = [line for line in done.stderr.splitlines() if line.strip("= ")][-1]
    assert (done.returncode, last) == (1, f"  traceback : {said}")


def test_a_rank_told_of_a_peers_failure_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(0, Tickets(taken=1), PeerFailedError("rank 1 failed")) == 1
    assert capsys.readouterr().err == ""


def test_it_speaks_for_a_peer_that_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "LATE_S", 0.2)
    assert leave(0, Tickets(), PeerFailedError("data: rank 1 failed: x")) == 1
    assert capsys.readouterr().err == "specactor: rank 0: data: rank 1 failed: x\n"


def test_a_bug_is_reported_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(0, None, ZeroDivisionError("x")) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("specactor: rank 0: ZeroDivisionError: x\n")


LOST = RuntimeError("Connection closed by peer [127.0.0.1]")


def test_a_full_disk_is_reported_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(0, Tickets(), OSError(errno.ENOSPC, "No space left on device")) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "specactor: rank 0: OSError: [Errno 28] No space left on device. Free disk space, or quota, where the run's "
        f"folder and /tmp are. {failure.RESUME}"
    )


def test_a_rank_that_lost_its_peer_lets_the_peer_report(capsys: pytest.CaptureFixture[str]) -> None:
    store = Tickets()
    peer = threading.Timer(0.3, store.add, ("", 1))
    peer.start()
    started = time.monotonic()
    assert leave(0, store, LOST) == 1
    assert 0.25 < time.monotonic() - started < LATE_S / 2
    assert capsys.readouterr().err == ""


def test_a_killed_peer_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "LATE_S", 0.2)
    monkeypatch.setattr(failure, "GRACE_S", 0.0)
    here = Member.here()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as peer:
        peer.kill()  # stays a zombie until it is waited for: gone all the same
        members = [here, Member(machine=here.machine, pid=peer.pid), Member(machine="elsewhere", pid=peer.pid)]
        with pytest.raises(SystemExit), failure_guard(0, Tickets()) as failures:  # noqa: PT012
            failures.know(members)
            raise LOST
    message = f"specactor: rank 0: rank 1 (process {peer.pid}) was killed or crashed. {failure.RESUME}\n"
    assert capsys.readouterr().err == message


class Closing(Tickets):
    """The store of a launcher that ends when it has been asked so many times."""

    def __init__(self, taken: int, answers: int) -> None:
        super().__init__(taken)
        self._left = answers

    def add(self, key: str, amount: int) -> int:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("Connection reset by peer")
        return super().add(key, amount)


@pytest.mark.parametrize(
    ("rank", "store", "reports"),
    [
        (1, Tickets(), True),
        (1, Tickets(taken=1), False),
        (1, Closing(0, 0), True),
        (1, Closing(0, 2), True),
        (1, Closing(1, 1), False),  # it was told in time
        (2, Closing(0, 0), False),  # the first rank of its host says it
        (2, Tickets(), True),
    ],
)
def test_a_peer_that_is_killed_on_another_host_is_said_to_be_there_once(
    rank: int, store: Tickets, reports: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's store goes with the host of rank 0."""
    for name, value in (("LATE_S", 0.3), ("MOMENT_S", 0.1), ("GRACE_S", 0.0)):
        monkeypatch.setattr(failure, name, value)
    with pytest.raises(SystemExit), failure_guard(rank, store) as failures:  # noqa: PT012
        failures.know([Member(machine="elsewhere", pid=1), Member.here(), Member.here()])
        raise LOST
    saw = "a rank of another host was killed or crashed, or is cut off (RuntimeError: Connection closed by peer"
    said = f"specactor: rank {rank}: {saw} [127.0.0.1]). {failure.RESUME}\n"
    assert (said in capsys.readouterr().err) is reports


def test_a_rank_that_is_ended_while_it_waits_says_what_it_saw(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher of a host ends its ranks where that of rank 0, and with it the store, is gone."""
    for name, value in (("LATE_S", 1.0), ("MOMENT_S", 0.0), ("GRACE_S", 0.0)):
        monkeypatch.setattr(failure, name, value)
    ended = threading.Event()
    monkeypatch.setattr(failure.os, "_exit", lambda code: ended.set())
    with pytest.raises(SystemExit), failure_guard(1, Tickets()) as failures:  # noqa: PT012
        failures.know([Member(machine="elsewhere", pid=1), Member.here()])
        threading.Timer(0.3, failures.on_sigterm).start()
        raise LOST
    assert ended.wait(60), "later it would end the process of the tests"
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("specactor: rank")]
    assert "a rank of another host was killed or crashed" in line


def test_a_rank_that_is_ended_says_where_the_launchers_store_is_gone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MOMENT_S", 0.0), ("GRACE_S", 0.0)):
        monkeypatch.setattr(failure, name, value)
    monkeypatch.setattr(failure.os, "_exit", lambda code: None)
    with failure_guard(1, Closing(0, 0)) as failures:
        failures.know([Member(machine="elsewhere", pid=1), Member.here()])
        failures.on_sigterm()
    ended = f"ended by SIGTERM: the launcher of rank 0 is gone. {failure.RESUME}"
    assert capsys.readouterr().err == f"specactor: rank 1: {ended}\n"


@pytest.mark.parametrize("heard", [True, False])
def test_of_three_hosts_one_says_that_another_is_lost(
    heard: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second hears that the first has reported the third, before the first's launcher, and its store, are gone."""
    for name, value in (("LATE_S", 0.0), ("MOMENT_S", 0.0), ("GRACE_S", 0.0)):
        monkeypatch.setattr(failure, name, value)
    monkeypatch.setattr(failure.os, "_exit", lambda code: None)
    left = threading.Event()
    left.set()
    with pytest.raises(SystemExit), failure_guard(1, Closing(1, 0)) as failures:  # noqa: PT012
        failures.know([Member(machine="a", pid=1), Member.here(), Member(machine="c", pid=1)])
        if heard:
            failures.on_reported(left)
        failures.on_sigterm()
        raise LOST
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("specactor: rank")]
    assert len(said) == (not heard)


@pytest.mark.parametrize(("rank", "launched"), [(0, True), (1, True), (1, False)])
def test_a_launcher_whose_store_is_on_a_lost_host_is_ended(
    rank: int, launched: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for an answer; that of rank 0 has its store itself."""
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(failure.os, "kill", lambda *of: ended.append(of))
    monkeypatch.setattr(failure.os, "_exit", lambda code: None)
    if launched:  # else the parent is whatever started the tests
        monkeypatch.setattr(failure, "_is_launcher", lambda pid: pid == os.getppid())
    failure.Failures(rank, Tickets()).on_silent("n1 has not answered.")
    assert capsys.readouterr().err == f"specactor: rank {rank}: n1 has not answered. {failure.RESUME}\n"
    assert ended == ([(os.getppid(), signal.SIGKILL)] if rank and launched else [])


def test_over_hosts_the_launchers_store_stays_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "GRACE_S", 0.5)
    started = time.monotonic()
    with pytest.raises(SystemExit), failure_guard(0, Tickets()) as failures:  # noqa: PT012
        failures.know([Member.here(), Member(machine="elsewhere", pid=1)])
        raise EngineError("gone")
    assert time.monotonic() - started >= 0.5


@pytest.mark.parametrize("has_left", [True, False])
def test_a_rank_that_has_left_ends_by_itself_when_another_one_has_reported(
    has_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(failure, "LATE_S", 0.0)
    monkeypatch.setattr(failure.os, "_exit", ended.append)
    left = threading.Event()
    if has_left:
        left.set()
    failure.Failures(1, Tickets()).on_reported(left)
    assert ended == ([] if has_left else [1])


def test_the_end_waits_for_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(failure.os, "_exit", ended.append)
    failures, answers = failure.Failures(0, Tickets()), threading.Event()
    failures.on_end = lambda: answers.wait() and None
    failures.on_lost_folder("owner.json is gone")
    assert ended == [1]
    answers.set()


@pytest.mark.parametrize("space", ["pid", "net"])
def test_containers_of_one_kernel_are_machines_of_their_own(space: str) -> None:
    """They do not know each other by pid, nor meet on loopback."""
    say = "from specactor.parallel.failure import Member; print(Member.here().machine)"
    apart = ["unshare", f"--{space}", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("namespaces need root")
    there, again = (
        subprocess.run([*inside, sys.executable, "-c", say], capture_output=True, text=True, check=True).stdout.strip()
        for inside in (apart, [])
    )
    here = Member.here().machine
    assert there.split()[0] == here.split()[0], "one kernel"
    assert there != here == again


STUCK = """
import ctypes, threading
from specactor.parallel.failure import Member, failure_guard
with failure_guard(0, None):
    print("in", flush=True)
    ctypes.CDLL(None).pause() if {library} else threading.Event().wait()
"""


@pytest.mark.parametrize("library", [True, False])
def test_sigterm_is_reported_also_from_within_a_library_call(library: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK.format(library=library)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "in\n"
        rank.terminate()
        _, err = rank.communicate(timeout=60)
    assert (rank.returncode, err) == (143, f"specactor: rank 0: ended by SIGTERM. {failure.RESUME}\n")


def test_ctrl_c_says_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(0, Tickets(), KeyboardInterrupt()) == 130
    assert "--resume auto" in capsys.readouterr().err


def test_a_rank_ends_though_nobody_can_read_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its terminal is gone, or what torchrun's output went through: else the thread dies, and the rank hangs."""
    read, write = os.pipe()
    os.close(read)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with suppress(BrokenPipeError), os.fdopen(write, "w") as nobody:  # it cannot be closed without one, either
        monkeypatch.setattr(sys, "stderr", nobody)
        failure.Failures(0, None).on_sigterm()
        failure.Failures(0, None).on_lost_folder("lost")
    assert ended == [128 + signal.SIGTERM, 1]
