"""A short run of the main job that can be killed in a chosen phase, and what it leaves behind.

Processes are found by descent from the launcher, by session, and by a mark in their environment: a process whose
parent died, or that left the session, is still found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]

from specactor.metrics import Value, read_metrics
from specactor.rollout import warm_starter
from specactor.run_folder import RunFolder, Status

ROOT = Path(__file__).resolve().parent.parent
SHORT = (
    *("--warmup.steps", "20", "5", "--eval.problems", "16", "--checkpoint.every", "1", "--checkpoint.export", "False"),
    *("--rollout.prompts-per-step", "8", "--data.params", "min_n=1", "max_n=9999", "size=1000"),
)
"""The quickstart, cut short: it need not learn."""
ENGINE_SERVER = "specactor.rollout.sglang.engine_server"
_MARK = "SPECACTOR_DISTURBED_RUN"
_POLL_S = 0.0003  # phases may last a few milliseconds; a rollout lasts longer, and is what precedes them
_ROLLOUT_POLL_S = 0.02
_APPEARS_S = 60.0
_UNCOMPARED = ("time/", "memory/", "speculation/", "drafter/accept_length", "drafter/pushed_bytes", "sync/buckets")
_RATES = ("_per_s",)


@dataclass
class Belongings:
    """What a run held at some moment: nothing of it may be there after the run."""

    processes: set[psutil.Process] = field(default_factory=set)
    sessions: set[int] = field(default_factory=set)
    shared: set[Path] = field(default_factory=set)
    listening: set[str] = field(default_factory=set)
    """Sockets, by their inodes: another process may be given the same port later."""


class Launcher(Protocol):
    """A process, as `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


Launch = Callable[[Sequence[str], Mapping[str, str], Path], Launcher]


def by_torchrun(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Launcher:
    """Start two ranks. Args: a script and its arguments; where its words are written."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with log.open("w") as file:
        return subprocess.Popen(
            [*torchrun, *command], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )


class Job:
    """One launch. Rank 0 writes ``status.json``, by which phases are recognised."""

    def __init__(
        self, base: Path, name: str, *options: str, script: str = "launch/train_moe.py", launch: Launch = by_torchrun
    ) -> None:
        self.folder = RunFolder(root=base / "runs" / name)
        self.log = base / f"{name}-{uuid.uuid4().hex[:6]}.log"
        self.belongings = Belongings()
        self._mark = uuid.uuid4().hex
        self.folder.status.unlink(missing_ok=True)
        command = (
            *(str(ROOT / script), "quickstart_plain", "--name", name, "--output-dir", str(base / "runs")),
            *(*SHORT, *options),
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", _MARK: self._mark}
        environment[warm_starter.NAME] = ""  # its engines descend from it
        self.launcher = launch(command, environment, self.log)

    def wait_for(self, phase: str, step: int, *, timeout_s: float = 600.0) -> Status:
        """Until the run is in `phase` of RL step `step` (1 is the first) or of a later one.

        Raises RuntimeError when the run ends before, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.folder.read_status()
            if status is not None and status.phase == phase and status.step >= step - 1:
                return status
            if self.launcher.poll() is not None:
                raise RuntimeError(f"ended before {phase} of step {step}:\n{self.output()}")
            time.sleep(_ROLLOUT_POLL_S if phase == "rollout" else _POLL_S)
        raise RuntimeError(f"{phase} of step {step} was not reached within {timeout_s:g} s:\n{self.output()}")

    def record(self) -> None:
        """Add what the run holds now to its belongings. It stands still meanwhile: however long this takes on a busy
        machine, the phase that follows has not begun, and nothing starts or ends."""
        stopped: set[psutil.Process] = set()
        try:
            while new := set(self._find()) - stopped:  # what these had started before they stood still
                for process in new:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.suspend()
                self.belongings.processes |= new
                stopped |= new
            self._list()
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    def _find(self) -> list[psutil.Process]:
        """The run's processes. A pid or a session of a process that ended may by now be another one's."""
        living = {p.pid: p for p in self.belongings.processes if p.is_running()}
        sessions = {sid for sid in self.belongings.sessions if sid in living or not psutil.pid_exists(sid)}
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(psutil.Error, OSError):
                process = living.get(pid) or psutil.Process(pid)
                if (
                    pid in living
                    or pid == self.launcher.pid
                    or process.ppid() in living
                    or os.getsid(pid) in sessions
                    or process.environ().get(_MARK) == self._mark
                ):
                    found.append(process)
        return found

    def _list(self) -> None:
        """Add the run's processes and what they hold to its belongings."""
        mine = self.belongings
        for process in self._find():
            mine.processes.add(process)
            try:
                if process.pid == os.getsid(process.pid):
                    mine.sessions.add(process.pid)
                mine.listening |= set(_listening(process.net_connections("inet"), process.pid))
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            except (psutil.Error, OSError):
                continue
            mine.shared |= {Path(line.split()[5]) for line in maps if " /dev/shm/" in line and "deleted" not in line}

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        """Exit code of the launcher. Raises TimeoutExpired when the run goes on for longer, after ending it."""
        try:
            return self.launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise

    def end(self) -> None:
        """Kill whatever is left of the run: for runs that failed their test."""
        self._list()
        for process in self.belongings.processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
                process.kill()
        self.launcher.wait(10)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def messages(self) -> list[str]:
        """The lines by which the job itself reports a failure."""
        return [line for line in self.output().splitlines() if line.startswith("specactor:")]

    def left(self, within_s: float) -> list[str]:
        """What of the belongings is still there when the time is over."""
        deadline = time.monotonic() + within_s
        while True:
            left = self._left()
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)

    def victim(self, name: str) -> int:
        """Process of: scheduler, engine server, rank 0, rank 1, launcher."""
        if name == "launcher":
            return self.launcher.pid
        status = self.folder.read_status()
        assert status is not None
        if name.startswith("rank "):
            return status.rank_pids[int(name.removeprefix("rank "))]
        rank = psutil.Process(status.rank_pids[0])
        deadline = time.monotonic() + _APPEARS_S
        while time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                below = [
                    p for p in rank.children(recursive=True) if ENGINE_SERVER in " ".join(p.cmdline())
                ]  # one text in a fork
                servers = [s for guard in below if os.getsid(guard.pid) == guard.pid for s in guard.children()]
                found = (
                    servers
                    if name == "engine server"
                    else [p for s in servers for p in s.children(recursive=True) if _schedules(p)]
                )
                if found:
                    return int(found[0].pid)
            time.sleep(_ROLLOUT_POLL_S)
        raise RuntimeError(f"no {name} within {_APPEARS_S:g} s:\n{self.output()}")

    def _left(self) -> list[str]:
        self._list()
        mine = self.belongings
        alive = [about for process in mine.processes if (about := _living(process))]
        pids = {str(p.pid) for p in mine.processes}
        named = [p for p in Path("/dev/shm").iterdir() if pids & set(p.name.split("_"))]
        folders = [p for p in Path("/tmp").glob("specactor-*") if pids & set(p.name.split("-"))]
        listening = _listening(psutil.net_connections("tcp"))
        return [
            *alive,
            *(str(path) for path in {*named, *folders, *(p for p in mine.shared if p.exists())}),
            *(f"port {listening[inode]}" for inode in mine.listening & listening.keys()),
        ]


def _listening(connections: Iterable[Any], owner: int | None = None) -> dict[str, int]:
    """Ports of those of psutil's connections that listen, by the inodes of their sockets. Args: whose they are, where
    they do not say it."""
    found = {}
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN:
            with contextlib.suppress(OSError):  # it has just been closed
                pid = getattr(connection, "pid", owner)
                found[os.readlink(f"/proc/{pid}/fd/{connection.fd}")] = connection.laddr.port
    return found


def _schedules(process: psutil.Process) -> bool:
    return "scheduler" in process.name() + " ".join(process.cmdline())


def _living(process: psutil.Process) -> str:
    """What the process is; empty when it has ended, or ends while it is looked at."""
    try:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return f"process {process.pid} {' '.join(process.cmdline())[:80]}"
    except psutil.Error:
        pass
    return ""


def compared(folder: RunFolder) -> list[dict[str, Value]]:
    """The lines of metrics.jsonl without what a clock or a memory counter says, and by which way weights went."""
    return [
        {k: v for k, v in line.items() if not k.startswith(_UNCOMPARED) and not k.endswith(_RATES)}
        for line in read_metrics(folder.root)
    ]
