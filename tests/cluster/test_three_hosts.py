"""The job on three hosts with one rank each, which has one stage of the model, of 1, 2 and 1 layers, and one engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.disturbed_run import compared
from benchmarks.virtual_hosts import VirtualHosts
from specactor.parallel.failure import RESUME
from tests.cluster.conftest import ClusterJob, undisturbed
from tests.cluster.test_two_hosts import SILENT

LAYOUT = ("--model.path", "tiny:4", "--parallel.pipeline", "3", "--parallel.expert", "1", "--parallel.engines", "3")
SHAPE = (*LAYOUT, "--train.steps", "2")


@pytest.fixture
def three_hosts() -> Iterator[VirtualHosts]:
    with VirtualHosts(3) as hosts:
        yield hosts


@pytest.mark.deep
def test_three_hosts_have_the_metrics_of_one(base: Path, three_hosts: VirtualHosts) -> None:
    job = ClusterJob(three_hosts, base, "three", *SHAPE)
    assert job.wait() == [0, 0, 0], job.output()
    assert compared(job.folder) == undisturbed(base, 3, *SHAPE)
    assert job.left() == []


@pytest.mark.deep
@pytest.mark.parametrize("victim", [2, 0])
def test_a_killed_host_of_three_is_reported_once(base: Path, three_hosts: VirtualHosts, victim: int) -> None:
    """By rank 0, which all others ask; where it was on that host, by each other host. All hosts end."""
    job = ClusterJob(three_hosts, base, f"three-{victim}", *SHAPE)
    job.wait_for("rollout", 2)
    three_hosts.kill(victim)
    assert all(code != 0 for code in job.wait())
    lost = f"n{victim}, the host of rank {victim}, {SILENT} {RESUME}"
    reporting = [1, 2] if victim == 0 else [0]
    wanted = [[f"specactor: rank {rank}: {lost}"] if rank in reporting else [] for rank in range(3)]
    said = [[each for each in job.messages(rank) if ": no beat: " not in each] for rank in range(3)]  # no report
    assert said == wanted
    assert job.left() == []
