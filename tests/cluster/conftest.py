"""Hosts of this machine's own, and jobs that run on them as on a cluster. Root and namespaces are needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.disturbed_run import SHORT, compared
from benchmarks.virtual_hosts import VirtualHosts, environment, why_not
from specactor.metrics import Value
from specactor.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = (*SHORT, "--train.steps", "3", "--tracking.wandb", "off", "--parallel.engines", "2")
"""The quickstart in small: one engine per rank."""
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
    """One job over the first hosts, one rank on each; started host by host, as an operator or a scheduler would."""

    def __init__(
        self,
        hosts: VirtualHosts,
        base: Path,
        name: str,
        *options: str,
        restarts: int = 0,
        environ: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        """
        Args:
            restarts: of each host's share.
            environ: settings of single hosts.
        """
        self.hosts, self.base = hosts, base
        self.folder = RunFolder(root=base / "runs" / name)
        self._options = ["quickstart_plain", "--name", name, "--output-dir", str(base / "runs"), *JOB, *options]
        self._restarts = restarts
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(len(hosts.hosts)):
            self.start(number, **(environ or {}).get(number, {}))

    def start(self, number: int, **environ: str) -> None:
        """Start a host's share of the job, or start it again."""
        numbers = {"NODES": str(len(self.hosts.hosts)), "HEAD": "n0:29500", "GPUS": "1"}
        settings = environment(**numbers, MAX_RESTARTS=str(self._restarts), **environ)
        with self.log(number).open("a") as log:
            command = [str(ROOT / "launch" / "multi_node.sh"), *self._options]
            self._started[number] = self.hosts[number].start(command, log=log, env=settings)

    def log(self, number: int) -> Path:
        return self.base / f"{self.folder.root.name}-n{number}.log"

    def messages(self, number: int) -> list[str]:
        """What the ranks of a host reported themselves."""
        lines = [line.partition("]:")[2] or line for line in self.log(number).read_text(errors="replace").splitlines()]
        return [line for line in lines if line.startswith("specactor: rank")]

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
        """What is still there on any host when it had time to go."""
        deadline = time.monotonic() + LEFT_S
        while left := [what for host in self.hosts.hosts for what in host.left()]:
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
    """The metrics of the job on one host with as many ranks."""
    run = ["quickstart_plain", "--name", "one", "--output-dir", str(base / "runs"), *JOB]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (base / "one.log").open("w") as log:
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
    assert code == 0, (base / "one.log").read_text()
    return compared(RunFolder(root=base / "runs" / "one"))


@pytest.fixture
def two_hosts() -> Iterator[VirtualHosts]:
    with VirtualHosts(2) as hosts:
        yield hosts
