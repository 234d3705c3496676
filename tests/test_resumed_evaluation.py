"""A run that ends in an evaluation loses no step: the checkpoint is whole before, and a resume evaluates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specactor import run
from specactor.actor import SpecActor
from specactor.metrics import Tracker, Value, read_metrics
from specactor.progress import Progress
from specactor.recipes import load, to_json
from specactor.run_folder import RunFolder
from specactor.trainer import checkpoint

WORDS = ("quickstart_plain", "--train.steps", "4", "--eval.every", "2", "--checkpoint.every", "2")
CONFIG = load([*WORDS, "--checkpoint.export", "False", "--tracking.wandb", "off"])


class Killed(BaseException):
    pass


class Job:
    """Starts of a run whose steps and evaluations are made up."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.evaluated = RunFolder(root=root), list[int]()
        self.in_evaluation: Callable[[int], object] = lambda step: None
        self.asked = False
        monkeypatch.setattr(run, "_evaluate", self._evaluate)
        monkeypatch.setattr(checkpoint, "write", self._write)
        monkeypatch.setattr(run, "is_end_asked", lambda: self.asked)

    def start(self, *, asked_in: int = 0) -> bool:
        """Return whether all steps were taken; SIGUSR1 comes in step `asked_in`."""
        newest = checkpoint.latest(self.folder.checkpoints)
        done = int(newest.name.removeprefix("step-")) if newest is not None else 0
        self.asked = False

        def step(save: Callable[[], None]) -> dict[str, float]:
            actor.steps_done += 1
            self.asked |= actor.steps_done == asked_in
            save()
            return {"reward/mean": actor.steps_done / 7, "weights/version": actor.steps_done}

        actor = SimpleNamespace(
            config=CONFIG,
            progress=Progress(4, quiet=True),
            recorder=SimpleNamespace(written_bytes=0),
            rollouts=SimpleNamespace(digest=None),
            collective=SimpleNamespace(
                rank=0, any=bool, together=lambda phase, work: work(), gather=lambda value, kind: [value]
            ),
            pool=SimpleNamespace(engines=[]),
            devices=SimpleNamespace(used_bytes={}),
            distillation=None,
            trainer=None,
            state=dict,
            steps_done=done,
            version=done,
            step=step,
        )
        with Tracker(self.folder.root, to_json(CONFIG), CONFIG.tracking, resume_step=done) as tracker:
            return run._train(cast("SpecActor", actor), self.folder, tracker)

    def lines(self) -> list[dict[str, Value]]:
        uncompared = ("time/", "memory/")
        return [{k: v for k, v in x.items() if not k.startswith(uncompared)} for x in read_metrics(self.folder.root)]

    def _evaluate(self, actor: Any, folder: RunFolder) -> dict[str, float]:
        with actor.progress.phase("eval"):
            self.evaluated.append(actor.steps_done)
            self.in_evaluation(actor.steps_done)
        return {"accuracy/eval": actor.steps_done / 10}

    def _write(self, trainer: object, root: Path, step: int, state: object, **_: object) -> Callable[[], Path]:
        def commit() -> Path:
            (root / f"step-{step:06}").mkdir(parents=True)
            return root

        return commit


@pytest.fixture
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Value]]:
    job = Job(tmp_path / "undisturbed", monkeypatch)
    assert job.start()
    assert job.evaluated == [0, 2, 4]
    assert [line["step"] for line in job.lines() if "accuracy/eval" in line] == [0, 2, 4]
    assert [line["step"] for line in read_metrics(job.folder.root) if "time/eval_s" in line] == [0, 2, 4]
    return job.lines()


@pytest.mark.parametrize("last", [2, 4])
def test_a_run_that_is_killed_in_an_evaluation_resumes_after_its_step(
    last: int, undisturbed: list[dict[str, Value]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path / "killed", monkeypatch)

    def kill(step: int) -> None:
        if step == last:
            raise Killed

    job.in_evaluation = kill
    with pytest.raises(Killed):
        job.start()
    assert sorted(path.name for path in job.folder.checkpoints.iterdir())[-1] == f"step-{last:06}"
    assert job.lines()[-1] == {k: v for k, v in undisturbed[last].items() if k != "accuracy/eval"}
    job.in_evaluation, job.evaluated = lambda step: None, []
    assert job.start()
    assert job.evaluated[0] == last
    assert job.lines() == undisturbed


def test_a_run_that_is_asked_to_end_leaves_the_evaluation_to_the_resume(
    undisturbed: list[dict[str, Value]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm gives it minutes, which an evaluation may take."""
    job = Job(tmp_path / "asked", monkeypatch)
    assert not job.start(asked_in=2)
    assert job.evaluated == [0]
    assert job.start()
    assert job.evaluated == [0, 2, 4]
    assert job.lines() == undisturbed


def test_a_run_that_is_asked_to_end_in_an_evaluation_makes_no_further_step(
    undisturbed: list[dict[str, Value]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path / "asked", monkeypatch)

    def ask(step: int) -> None:
        job.asked |= step == 2

    job.in_evaluation = ask
    assert not job.start()
    assert job.lines() == undisturbed[:3]
    job.in_evaluation = lambda step: None
    assert job.start()
    assert job.evaluated == [0, 2, 4]
    assert job.lines() == undisturbed


def test_a_run_elsewhere_that_only_exports_evaluates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder has no line of the step that it was resumed from."""
    job = Job(tmp_path / "export", monkeypatch)
    (job.folder.checkpoints / "step-000004").mkdir(parents=True)
    assert job.start()
    assert job.evaluated == []
