"""Hosts of this machine's own, and jobs that run on them as on a cluster. Root and namespaces are needed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.disturbed_run import SHORT, compared
from benchmarks.virtual_hosts import VirtualHosts, environment, why_not
from specactor.metrics import Value
from specactor.run_folder import RunFolder
from tests.ending import still_runs

ROOT = Path(__file__).resolve().parent.parent.parent
TRACKING = ("--tracking.wandb", "off", "--tracking.record", "full")
JOB = (*SHORT, *TRACKING, "--train.steps", "3", "--parallel.engines", "2")
"""The quickstart in small: one engine per rank."""
KEY = "the key that all hosts of a job have"
END_S = 600.0
LEFT_S = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("cluster")
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


class ClusterJob:
    """One job over the first hosts, started host by host, as an operator or a scheduler would."""

    def __init__(
        self,
        hosts: VirtualHosts,
        base: Path,
        name: str,
        *options: str,
        recipe: str = "quickstart_plain",
        ranks: int = 1,
        restarts: int = 0,
        environ: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        """
        Args:
            ranks: on each host.
            restarts: of each host's share.
            environ: settings of single hosts.
        """
        self.hosts, self.base = hosts, base
        self.folder = RunFolder(root=base / "runs" / name)
        self._options = [recipe, "--name", name, "--output-dir", str(base / "runs"), *JOB, *options]
        self._ranks, self._restarts = ranks, restarts
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(len(hosts.hosts)):
            self.start(number, **(environ or {}).get(number, {}))

    def start(self, number: int, **environ: str) -> None:
        """Start a host's share of the job, or start it again."""
        numbers = {"NODES": str(len(self.hosts.hosts)), "HEAD": "n0:29500", "GPUS": str(self._ranks)}
        settings = environment(**{**numbers, "SPECACTOR_KEY": KEY, "MAX_RESTARTS": str(self._restarts), **environ})
        with self.log(number).open("a") as log:
            command = [str(ROOT / "launch" / "multi_node.sh"), *self._options]
            self._started[number] = self.hosts[number].start(command, log=log, env=settings)

    def log(self, number: int) -> Path:
        return self.base / f"{self.folder.root.name}-n{number}.log"

    def messages(self, number: int) -> list[str]:
        """What the ranks of a host reported themselves."""
        said = self.log(number).read_text(errors="replace")  # torchrun may say before a line whose it is
        return re.findall(r"^(?:\[\w+\]:)?(specactor: rank .*)$", said, re.MULTILINE)

    def wait_for(self, phase: str, step: int) -> None:
        """Until rank 0 is in that phase of an RL step (1 is the first), or in a later step's."""

        def there() -> bool:
            status = self.folder.read_status()
            return status is not None and status.phase == phase and status.step >= step - 1

        self.wait_until(there, f"{phase} of step {step}")

    def wait_until(self, there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + END_S
        while not there():
            if time.monotonic() > deadline or all(each.poll() is not None for each in self._started.values()):
                raise AssertionError(f"{what} was not reached:\n{self.output()}")
            time.sleep(0.02)

    def kill_rank(self, rank: int) -> str:
        """End its process, at once, and wait until all that ran and all files in shared memory are gone, but for what
        starts the job again. Returns how ranks of its host call it."""
        status = self.folder.read_status()
        assert status is not None
        before, files, victim = list[psutil.Process](), list[Path](), 0
        for host in self.hosts.hosts:
            for pid in (pid for pid, what in host.processes().items() if "multi_node.sh" not in what):
                with suppress(OSError, psutil.NoSuchProcess):
                    before.append(psutil.Process(pid))
                    [inner] = re.findall(r"NSpid:.*\t(\d+)\n", Path(f"/proc/{pid}/status").read_text())
                    if host.number == rank // self._ranks and int(inner) == status.rank_pids[rank]:
                        victim = pid
            files += Path(f"/proc/{host.pid}/root/dev/shm").iterdir()
        assert victim
        os.kill(victim, signal.SIGKILL)
        left, deadline = ["all"], time.monotonic() + LEFT_S
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            left = [str(each) for each in before if still_runs(each)]
            left += [str(file) for file in files if file.exists()]
        assert not left, (left, self.output())
        return f"rank {rank} (process {status.rank_pids[rank]})"

    def wait(self) -> list[int]:
        """Exit codes of the hosts' shares."""
        deadline = time.monotonic() + END_S
        try:
            return [each.wait(max(0.0, deadline - time.monotonic())) for each in self._started.values()]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on and on:\n{self.output()}") from None

    def output(self) -> str:
        return "".join(f"== n{k}\n{self.log(k).read_text(errors='replace')[-6000:]}" for k in self._started)

    def left(self) -> list[str]:
        """What is still there on any host that is on when it had time to go."""
        deadline = time.monotonic() + LEFT_S
        living = [host for host in self.hosts.hosts if host.number not in self.hosts.cut]
        while left := [what for host in living for what in host.left()]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        return left


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all hosts share; so is what warm-ups make."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="session")
def one_host(base: Path) -> list[dict[str, Value]]:
    """The metrics of the job on one host with two ranks."""
    return undisturbed(base, 2)


@pytest.fixture(scope="session")
def four_ranks(base: Path) -> list[dict[str, Value]]:
    """The metrics of the job on one host with four ranks."""
    return undisturbed(base, 4)


def undisturbed(base: Path, ranks: int, *options: str) -> list[dict[str, Value]]:
    folder, log_file = RunFolder(root=base / "runs" / f"one-{ranks}"), base / f"one-{ranks}.log"
    run = ["quickstart_plain", "--name", folder.root.name, "--output-dir", str(base / "runs"), *JOB, *options]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with log_file.open("w") as log:
        started = subprocess.Popen(
            [*torchrun, str(ROOT / "launch" / "train_moe.py"), *run],
            cwd=ROOT,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = started.wait(END_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    assert code == 0, log_file.read_text()
    return compared(folder)


@pytest.fixture
def two_hosts() -> Iterator[VirtualHosts]:
    with VirtualHosts(2) as hosts:
        yield hosts
