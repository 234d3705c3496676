"""Processes of a run are killed: it goes on or resumes with identical metrics, says what happened, leaves nothing.

A draft model learns after every step, so its weights, optimizer and examples are resumed, too. The whole table, every
victim in every phase, is `make faults`.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from benchmarks.disturbed_run import ROOT, SHORT, Job, Launch, by_torchrun, compared
from specactor.data.tokenizer import VOCAB_SIZE
from specactor.metrics import Value
from specactor.parallel.failure import RESUME
from specactor.rollout.warm_starter import WarmStarter
from specactor.run_folder import RunFolder, Status
from tests.lib.ranks import Launcher, run_alone, torchrun

STEPS = ("--train.steps", "3", "--resume", "auto", "--tracking.wandb", "off")
LEARNING = (
    *("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "model"),
    *("--rollout.speculation.window", "2", "--distillation.refresh", "inf"),
    *("--distillation.max-updates", "24"),
)
"""So many updates always fit, so the draft model's losses are reproducible; and they last long enough to be struck."""
RUN_S = 600.0
END_S = 60.0
LEFT_S = 30.0
"""Longest waits: for a whole run, for the end of one that was struck, and for all that it leaves."""
STILL_S = 1.0
"""Of hardly any work, after which a rank is taken to wait."""

Start = Callable[..., Job]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs share one cache of warmed-up models."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def options(base: Path) -> list[str]:
    draft = str(base / "draft")
    run_alone("tests.rollout.sglang.make_dense", draft, f"vocab_size={VOCAB_SIZE}", "max_position_embeddings=512")
    return [*STEPS, *LEARNING, "--rollout.speculation.draft-model", draft]


@pytest.fixture(scope="module")
def undisturbed(warm_starter: WarmStarter, base: Path, options: list[str]) -> list[dict[str, Value]]:
    """Its ranks and its engine are forked by processes that have imported what they need; torchrun starts what is
    struck first."""
    command = ("quickstart_plain", "--name", "undisturbed", "--output-dir", str(base / "runs"), *SHORT, *options)
    code, said = torchrun(2, str(ROOT / "launch" / "train_moe.py"), *command, folder=base, WANDB_MODE="offline")
    assert code == 0, said
    lines = compared(RunFolder(root=base / "runs" / "undisturbed"))
    assert [line["drafter/version"] for line in lines[1:]] == [1, 2, 2]
    assert lines[1]["drafter/loss"] != lines[2]["drafter/loss"]
    return lines


@pytest.fixture
def start(base: Path, options: list[str], undisturbed: list[dict[str, Value]]) -> Iterator[Start]:
    jobs: list[Job] = []

    def go(name: str, *further: str, launch: Launch = by_torchrun) -> Job:
        jobs.append(Job(base, name, *options, *further, launch=launch))
        return jobs[-1]

    yield go
    for job in jobs:
        if job.launcher.poll() is None:
            job.end()


def strike(job: Job, victim: str, phase: str, step: int) -> int:
    """SIGKILL in that phase; returns the process. "everyone": the launcher and all ranks.

    "push" is the part of "sync" in which an engine is brought weights, which it cannot take before the strike: it is
    stopped.
    """
    job.wait_for("rollout", step)
    victims = ("launcher", "rank 0", "rank 1") if victim == "everyone" else (victim,)
    pids, scheduler = [job.victim(each) for each in victims], job.victim("scheduler")
    job.record()
    job.wait_for("sync" if phase == "push" else phase, step)
    if phase == "push":
        os.kill(scheduler, signal.SIGSTOP)
        wait_until_ranks_wait(job)
    for pid in pids:
        job.kill(pid)
    return pids[0]


def wait_until_ranks_wait(job: Job) -> None:
    """In a sync ranks pack, or wait for each other; both at once wait only while one waits for its engine."""
    status = status_of(job)
    ranks = [psutil.Process(pid) for pid in status.rank_pids]
    while status_of(job) == status:
        before_s = [sum(rank.cpu_times()[:2]) for rank in ranks]
        time.sleep(STILL_S)
        if all(sum(rank.cpu_times()[:2]) - s < STILL_S / 10 for rank, s in zip(ranks, before_s, strict=True)):
            return
    raise AssertionError(f"{status.phase} ended before its engine had answered")


def status_of(job: Job) -> Status:
    status = job.folder.read_status()
    assert status is not None
    return status


@pytest.mark.deep
def test_an_engine_whose_scheduler_dies_is_replaced(start: Start, undisturbed: list[dict[str, Value]]) -> None:
    job = start("scheduler")
    strike(job, "scheduler", "rollout", 2)
    assert job.wait(RUN_S) == 0, job.output()
    assert "engine 0 had died and was started again" in job.output()
    assert compared(job.folder) == undisturbed
    assert job.left(LEFT_S) == []


@pytest.mark.parametrize(
    "strikes",
    [
        pytest.param([("rank 1", "refresh", 2)], id="refresh"),
        pytest.param([("rank 1", "refresh", 1), ("launcher", "checkpoint", 2)], id="twice", marks=pytest.mark.deep),
        pytest.param([("everyone", "push", 1), ("rank 1", "train", 2)], id="push", marks=pytest.mark.deep),
    ],
)
def test_after_deaths_resuming_gives_the_same_metrics(
    start: Start, undisturbed: list[dict[str, Value]], strikes: list[tuple[str, str, int]]
) -> None:
    """One run, struck each time that it is resumed: while the draft model learns or its weights are brought to the
    engine, before there is a checkpoint or with one. When it is resumed for good its engine dies, and is replaced."""
    name = f"killed-in-{'-'.join(f'{phase}-{step}' for _, phase, step in strikes)}"
    for victim, phase, step in strikes:
        job = start(name)
        pid = strike(job, victim, phase, step)
        if phase in ("refresh", "push"):
            during = "sync" if phase == "push" else phase
            assert (status_of(job).phase, status_of(job).step) == (during, step - 1), "it was struck too late"
        assert job.wait(END_S) != 0
        if victim == "rank 1":
            assert job.messages() == [f"specactor: rank 0: rank 1 (process {pid}) was killed or crashed. {RESUME}"]
        assert job.left(LEFT_S) == []
        log = (job.folder.root / "engines" / "engine-0.log").read_text()
        assert "forked by the warm starter" in log, "else it takes 11 s more"
    job = start(name, launch=partial(Launcher, 2))
    strike(job, "scheduler", "rollout", 3)
    assert job.wait(RUN_S) == 0, job.output()
    assert "engine 0 had died and was started again" in job.output()
    assert compared(job.folder) == undisturbed
    assert job.left(LEFT_S) == []


@pytest.mark.deep
def test_after_a_death_in_an_evaluation_resuming_evaluates_and_takes_no_step_again(
    start: Start, undisturbed: list[dict[str, Value]]
) -> None:
    job = start("killed-in-eval")
    job.wait_for("rollout", 3)
    job.record()
    job.wait_for("eval", 4)
    job.kill(job.victim("rank 1"))
    assert job.wait(END_S) != 0
    assert job.left(LEFT_S) == []
    [*before, last] = compared(job.folder)
    assert before == undisturbed[:-1]
    assert (job.folder.checkpoints / "step-000003").is_dir()
    assert {*undisturbed[-1]} - {*last} == {"accuracy/eval", "score/eval"}
    assert last.items() <= undisturbed[-1].items()
    job = start("killed-in-eval", launch=partial(Launcher, 2))
    assert job.wait(RUN_S) == 0, job.output()
    assert compared(job.folder) == undisturbed


@pytest.mark.deep
def test_ctrl_c_ends_the_run_and_says_how_to_continue(start: Start) -> None:
    job = start("interrupted")
    job.wait_for("rollout", 1)
    job.record()
    os.killpg(job.launcher.pid, signal.SIGINT)
    assert job.wait(END_S) != 0
    assert job.messages() == [f"specactor: rank 0: interrupted. {RESUME}"]
    assert job.left(LEFT_S) == []


@pytest.mark.deep
def test_a_run_that_is_asked_to_end_does_after_its_step_with_a_checkpoint(
    start: Start, undisturbed: list[dict[str, Value]]
) -> None:
    """All but the launcher are sent the signal, as by Slurm, and one rank alone; resumed, it is as if nothing was."""
    for name, step in (("asked", 1), ("asked", 2)):
        job = start(name, "--checkpoint.every", "0")
        job.wait_for("rollout", step)
        job.record()
        everyone = psutil.Process(job.launcher.pid).children(recursive=True)
        for process in everyone if step == 1 else [psutil.Process(job.victim("rank 1"))]:
            process.send_signal(signal.SIGUSR1)
        assert job.wait(RUN_S) == 0, job.output()
        assert job.output().count(f"Ended by SIGUSR1 after step {step}, with a checkpoint. {RESUME}") == 1
        assert status_of(job).phase != "done"
        assert job.left(LEFT_S) == []
    job = start("asked", launch=partial(Launcher, 2))
    assert job.wait(RUN_S) == 0, job.output()
    assert compared(job.folder) == undisturbed


@pytest.mark.deep
def test_an_engine_that_dies_too_often_ends_the_run_with_one_error(start: Start) -> None:
    job = start("too-often", "--rollout.engine.max-restarts", "0")
    strike(job, "engine server", "rollout", 1)
    assert job.wait(END_S) != 0
    [message] = job.messages()
    assert "rollout.engine.max_restarts: engine 0 died 1 times, allowed are 0 restarts" in message
    assert job.left(LEFT_S) == []


@pytest.mark.deep
def test_half_a_checkpoint_is_never_loaded(base: Path, start: Start, undisturbed: list[dict[str, Value]]) -> None:
    """A folder that was not renamed yet is removed; a file that was cut short is an error that names it."""
    folder = base / "runs" / "half"
    shutil.copytree(base / "runs" / "undisturbed", folder)
    checkpoints = folder / "checkpoints"
    newest = checkpoints / "step-000003"
    newest.rename(checkpoints / "step-000003.tmp")
    job = start("half")
    assert job.wait(RUN_S) == 0, job.output()
    assert compared(job.folder) == undisturbed  # step 3 was done again, from step 2
    largest = max(newest.iterdir(), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    job = start("half")
    assert job.wait(RUN_S) != 0
    [message] = job.messages()
    assert largest.name in message
    assert "The checkpoint is damaged: use an earlier one." in message
    assert job.left(LEFT_S) == []
