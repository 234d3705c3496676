"""`launch/slurm.sh` on a Slurm cluster of three nodes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.disturbed_run import compared
from benchmarks.virtual_hosts import VirtualHosts, environment
from specactor.metrics import Value
from specactor.run_folder import RunFolder
from tests.cluster.conftest import END_S, JOB, LEFT_S, ROOT
from tests.cluster.slurm import SlurmCluster, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with VirtualHosts(3) as hosts, tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        Path(folder).chmod(0o755)
        yield SlurmCluster(hosts, Path(folder))


def submit(cluster: SlurmCluster, base: Path, name: str, path: str = "") -> str:
    """Two of three nodes with one rank each; returns the job's number. Programs of `path` come first."""
    here = ["--nodes", "2", "--gpus-per-node", "0", "--cpus-per-task", "1", f"--output={base}/{name}.log"]
    job = ["quickstart_plain", "--name", name, "--output-dir", str(base / "runs"), *JOB]
    settings = environment(GPUS="1", PATH=f"{path}{environment()['PATH']}:/usr/sbin")
    settings = {k: v for k, v in settings.items() if k != "SLURM_CONF"}
    return cluster.ask("sbatch", "--parsable", *here, "launch/slurm.sh", *job, cwd=ROOT, **settings)


def wait_until(cluster: SlurmCluster, there: Callable[[], bool], what: str, log: Path, limit_s: float = END_S) -> None:
    deadline = time.monotonic() + limit_s
    while not there():
        output = log.read_text(errors="replace")[-8000:] if log.exists() else "no log"
        assert time.monotonic() < deadline, f"{what} was not reached:\n{output}\nSlurm: {cluster.told()}"
        time.sleep(0.3)


def wait_until_gone(cluster: SlurmCluster) -> None:
    deadline = time.monotonic() + LEFT_S
    while left := cluster.left():
        assert time.monotonic() < deadline, left
        time.sleep(0.3)


def is_at(folder: RunFolder, phase: str, step: int) -> bool:
    status = folder.read_status()
    return status is not None and status.phase == phase and status.step >= step - 1


@pytest.mark.deep
def test_a_job_that_loses_a_node_goes_on_with_another_one_and_a_cancelled_one_leaves_nothing(
    base: Path, one_host: list[dict[str, Value]], cluster: SlurmCluster
) -> None:
    """The metrics are those of one host without a scheduler, to the bit."""
    name, log = "slurm", base / "slurm.log"
    folder = RunFolder(root=base / "runs" / name)
    job = submit(cluster, base, name)
    wait_until(cluster, lambda: is_at(folder, "rollout", 2), "step 2", log)
    assert cluster.state(job) == "RUNNING n[0-1]"
    cluster.hosts.kill(1)
    wait_until(cluster, lambda: not cluster.state(job).startswith("RUNNING"), "that Slurm notices", log)
    wait_until_gone(cluster)
    wait_until(cluster, lambda: cluster.state(job).startswith("PENDING"), "that it is requeued", log)
    cluster.ask("scontrol", "update", f"jobid={job}", "starttime=now")  # Slurm itself would wait two minutes
    wait_until(cluster, lambda: cluster.state(job).startswith("RUNNING"), "that it is started again", log)
    assert cluster.state(job) == "RUNNING n[0,2]"
    wait_until(cluster, lambda: not cluster.state(job).startswith(("RUNNING", "COMPLETING")), "its end", log)
    assert cluster.state(job) == "COMPLETED n[0,2]", log.read_text()
    assert compared(folder) == one_host
    wait_until_gone(cluster)

    cancelled = submit(cluster, base, "cancelled")
    folder, log = RunFolder(root=base / "runs" / "cancelled"), base / "cancelled.log"
    wait_until(cluster, lambda: is_at(folder, "rollout", 1), "step 1", log)
    cluster.ask("scancel", cancelled)
    wait_until_gone(cluster)
    wait_until(
        cluster, lambda: not cluster.state(cancelled).startswith("COMPLETING"), "its end", log
    )  # after its processes'
    assert cluster.state(cancelled).startswith("CANCELLED")


ENDS_WHEN_ASKED = """#!/usr/bin/env bash
echo start >> {starts}
if (($(wc -l < {starts}) <= 2)); then # of two nodes
    env --default-signal=USR1 bash -c 'trap "exit 0" USR1; while :; do sleep 0.1; done'
fi
"""
"""In torchrun's place, with a rank that ends after SIGUSR1, at the first start."""


def test_a_job_that_is_preempted_and_ends_in_its_grace_time_goes_on_later(base: Path, cluster: SlurmCluster) -> None:
    starts, log = base / "starts", base / "preempted.log"
    (base / "bin").mkdir()
    (base / "bin" / "torchrun").write_text(ENDS_WHEN_ASKED.format(starts=starts))
    (base / "bin" / "torchrun").chmod(0o755)
    job = submit(cluster, base, "preempted", f"{base / 'bin'}:")
    wait_until(cluster, lambda: starts.exists() and starts.read_text() == 2 * "start\n", "the start", log, LEFT_S)
    cluster.ask("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_until(cluster, lambda: cluster.state(job).startswith("PENDING"), "that it is requeued", log, LEFT_S)
    assert f"specactor: job {job} was pre-empted" in log.read_text()
    wait_until_gone(cluster)
    cluster.ask("scontrol", "update", f"jobid={job}", "starttime=now")  # Slurm itself would wait two minutes
    wait_until(cluster, lambda: cluster.state(job).startswith("COMPLETED"), "its end", log, LEFT_S)
    assert starts.read_text() == 4 * "start\n"
    assert log.read_text().count("was pre-empted") == 1
