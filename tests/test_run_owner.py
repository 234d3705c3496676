"""One job at a time in a run's folder: a live one is refused, and one that is over keeps nobody waiting."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from specactor import run_owner
from specactor.errors import ConfigError
from specactor.parallel.failure import Member
from specactor.run_owner import Owner, RunOwner

AWAY = Member(machine="another", pid=os.getpid())


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SIGN_OF_LIFE_S", 0.1), ("MOMENT_S", 0.2), ("ANSWER_S", 12.0)):
        monkeypatch.setattr(run_owner, name, value)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def made() -> Iterator[list[RunOwner]]:
    owners: list[RunOwner] = []
    yield owners
    for owner in owners:
        owner.close()


def on(folder: Path, made: list[RunOwner]) -> tuple[RunOwner, list[str]]:
    told: list[str] = []
    made.append(RunOwner(folder, told.append))
    return made[-1], told


def write(folder: Path, *, process: Member = AWAY, slurm_job: str = "", slurm_start: int = 0) -> Path:
    """As a job on another host that gives no sign."""
    of = Owner(host="n7", since="2026-01-01", process=process, slurm_job=slurm_job, slurm_start=slurm_start)
    file = folder / "owner.json"
    file.write_bytes(msgspec.json.encode(of))
    return file


def test_who_cannot_open_files_takes_nobodys_folder(tmp_path: Path, made: list[RunOwner]) -> None:
    file = write(tmp_path)
    owner, _ = on(tmp_path, made)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            owner.claim()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert file.exists()


def test_a_live_job_is_refused_and_the_next_one_comes_in_when_it_is_over(tmp_path: Path, made: list[RunOwner]) -> None:
    (first, told), (second, _) = on(tmp_path / "a", made), on(tmp_path / "a", made)
    first.claim()
    with pytest.raises(ConfigError) as refused:
        second.claim()
    assert str(refused.value) == (
        f"name: got 'a', expected a run that no other job is in: {tmp_path / 'a'} belongs to process {os.getpid()} on "
        f"{os.uname().nodename} since {first.own.since}. Choose another --name, or end that job."
    )
    second.close()
    assert (tmp_path / "a" / "owner.json").exists(), "who was refused takes nothing away"
    first.close()
    first.close()
    assert list((tmp_path / "a").iterdir()) == []
    second, _ = on(tmp_path / "a", made)
    second.claim()
    assert told == []


CLAIM = """
import sys
from pathlib import Path
from specactor.run_owner import RunOwner
RunOwner(Path(sys.argv[1]), on_lost=print).claim()
print("in", flush=True)
sys.stdin.read()
"""


def test_a_process_of_this_host_that_is_gone_keeps_nobody_waiting(
    tmp_path: Path, made: list[RunOwner], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", CLAIM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "in\n"
        killed.send_signal(signal.SIGKILL)
    owner, _ = on(tmp_path, made)
    owner.claim()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("years", [-50, 50])
def test_a_silent_host_is_waited_for_whatever_its_clock_says(
    tmp_path: Path,
    made: list[RunOwner],
    years: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_owner, "ANSWER_S", 0.6)
    file = write(tmp_path)
    os.utime(file, (time.time() + years * 3e7,) * 2)
    owner, told = on(tmp_path, made)
    owner.claim()
    expected = f"specactor: {tmp_path} belongs to process {AWAY.pid} on n7 since 2026-01-01; waiting 1 s at most for a"
    assert capsys.readouterr().err == f"{expected} sign of it\n"
    time.sleep(0.5)
    assert told == []
    owner.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("years", [-50, 50])
def test_a_host_that_beats_is_alive_whatever_its_clock_says(tmp_path: Path, made: list[RunOwner], years: int) -> None:
    file, stop, base = write(tmp_path), threading.Event(), time.time() + years * 3e7

    def beat() -> None:
        count = 0
        while not stop.wait(0.1):
            count += 1
            os.utime(file, (base + count,) * 2)

    beats = threading.Thread(target=beat)
    beats.start()
    try:
        with pytest.raises(ConfigError, match=r"belongs to process .* on n7 since 2026-01-01\. Choose"):
            on(tmp_path, made)[0].claim()
    finally:
        stop.set()
        beats.join()


def test_a_job_that_slurm_has_requeued_goes_on_at_once(
    tmp_path: Path, made: list[RunOwner], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, slurm_job="12", slurm_start=1)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    on(tmp_path, made)[0].claim()
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match="belongs to Slurm job 12 on "):  # the same start
        on(tmp_path, made)[0].claim()


@pytest.mark.parametrize("gone", [True, False])
def test_a_job_that_lost_its_folder_is_told_and_takes_nothing_away(
    tmp_path: Path, made: list[RunOwner], gone: bool
) -> None:
    owner, told = on(tmp_path, made)
    owner.claim()
    file = tmp_path / "owner.json"
    if gone:
        file.unlink()
    else:
        write(tmp_path)
    deadline = time.monotonic() + 60
    while not told:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    now = f"is gone from {tmp_path}" if gone else f"says that the folder belongs to process {AWAY.pid} on n7 since"
    assert told[0].startswith(f"owner.json {now}")
    owner.close()
    assert file.exists() is not gone
