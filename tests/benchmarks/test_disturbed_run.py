"""What a run held is recorded while it stands still, and nothing of another process is taken for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.disturbed_run import Belongings, Job

RESTLESS = """
import subprocess, sys
while True:
    subprocess.run([sys.executable, "-S", "-c", "import subprocess; subprocess.run(['sleep', '0.01'])"])
    print(end="x", file=open(sys.argv[1], "a"))
"""
WAIT_S = 60.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A process that starts and ends others all the time stands for a run."""
    job = Job.__new__(Job)
    job.log, job.belongings, job._mark = tmp_path / "log", Belongings(), "none"
    job.launcher = subprocess.Popen([sys.executable, "-S", "-c", RESTLESS, str(job.log)], start_new_session=True)
    yield job
    job.end()


def wait_for_more(job: Job, than: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while not job.log.exists() or job.log.stat().st_size <= than:
        assert time.monotonic() < deadline, "it stands"
        time.sleep(0.01)


def test_a_run_stands_still_while_it_is_recorded(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_more(job, than=0)
    listing, seen = job._list, []

    def slowly() -> None:
        for _ in range(2):
            seen.append((job.log.stat().st_size, {process.pid for process in job._find()}))
            time.sleep(0.3)
        listing()

    monkeypatch.setattr(job, "_list", slowly)
    job.record()
    monkeypatch.undo()
    assert seen[0] == seen[1]
    wait_for_more(job, than=seen[0][0])
    job.launcher.kill()
    job.launcher.wait()
    assert job.left(WAIT_S) == []


def test_another_process_with_a_recorded_pid_is_not_left(job: Job) -> None:
    reused = psutil.Process(job.launcher.pid)
    reused._ident = (reused.pid, 0.0)  # one that began earlier
    other, job.launcher = job.launcher, subprocess.Popen(["true"])
    job.launcher.wait()
    job.belongings = Belongings({reused}, {reused.pid})
    try:
        assert job.left(0.0) == []
    finally:
        other.kill()
        other.wait()
