"""A draft model of the warm-up: made once, and good at what the policy was shown. And the model that a run began with:
the same in all its resumes and replays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specactor.trainer.model  # noqa: F401  # first of what imports Megatron
from specactor.config.speculation import MADE_BY_WARM_UP
from specactor.data.tiny_model import make_tiny_model
from specactor.errors import ConfigError
from specactor.parallel.layout import Layout
from specactor.recipes import load
from specactor.run_folder import WARM_UPS, RunFolder
from specactor.trainer import warmup
from tests.lib.ranks import run_ranks
from tests.trainer.conftest import has_deep

WANTED: tuple[str, ...] = ("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "model")
WANTED += ("--rollout.speculation.draft-model", "warm-up")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the kinds of draft models that are asked for, made by the same two ranks."""
    kinds = MADE_BY_WARM_UP if has_deep(request) else MADE_BY_WARM_UP[:1]
    folder = tmp_path_factory.mktemp("warm-up")
    tiny = load(["quickstart"]).model.tiny
    assert tiny is not None
    make_tiny_model(replace(tiny, num_layers=2), 0, folder / "policy")
    run_ranks(2, "tests.trainer.warmup_script", folder, " ".join(kinds), *WANTED[:-1], folder=folder)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found | {"folder": folder}


@pytest.mark.parametrize(
    "kind", [MADE_BY_WARM_UP[0], *(pytest.param(kind, marks=pytest.mark.deep) for kind in MADE_BY_WARM_UP[1:])]
)
def test_a_draft_model_is_made_once_and_knows_the_worked_solutions(results: dict[str, Any], kind: str) -> None:
    found = results[kind]
    first, second = found["folders"]
    assert first == second
    assert Path(first).parent == results["folder"] / ".warm-up"
    assert found["else_as_asked"]
    assert found["told"] == 1, "the second time it is read"
    learned, fresh = found["entropy"] if kind == "warm-up" else [1 - share for share in found["overlap"]]
    assert learned < 0.7 * fresh
    for said, response in zip(found["not_learned"], found["responses"], strict=True):
        question, _, rest = response.partition("=")
        a, b = map(int, question.split("*"))
        assert (said, rest) == (f"{a * b};", f"{a * b};#{a * b}<eos>"), "what an environment says is not learned"
    assert found["left_alone"] == [True, True, True], "without speculation, with a folder, and for nobody"


def test_it_takes_worked_solutions() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.draft_model: got \('warm-up',\), expected a folder where"):
        load(["quickstart", *WANTED, "--warmup.solver", ""])


def test_a_head_is_not_made_for_drafter_processes() -> None:
    with pytest.raises(ConfigError, match=r"draft_model: got .*warm-up-head.*have no hidden states .* Use warm-up, or"):
        load(["quickstart", "--rollout.speculation.mode", "decoupled", "--parallel.drafters", "1"])
    load(["quickstart", "--rollout.speculation.mode", "decoupled", *WANTED[4:], "--parallel.drafters", "1"])


class One:
    """A job of one rank."""

    rank, world = 0, 1

    def together(self, phase: str, work: Callable[[], Any]) -> Any:
        return work()

    path_of_first = together

    def gather(self, value: Any, kind: Any) -> list[Any]:
        return [value]


class Job:
    """Starts of runs whose warm-ups are counted, and take no time."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base, self.made, self.told = base, list[Path](), list[str]()
        self.model(base / "start")
        trainer = SimpleNamespace(supervised_step=lambda batch, learning_rate: 0.0, export_hf=self._export)
        monkeypatch.setattr(warmup, "PolicyTrainer", lambda *_: trainer)
        monkeypatch.setattr(warmup, "solved_batch", lambda *_, **__: [])

    def model(self, folder: Path, *, layers: int = 2, changed: bytes = b"") -> Path:
        """Write a model of 3 MiB."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers, "dtype": "float32"}))
        (folder / "model.safetensors").write_bytes(bytes(3 * 2**20 // 2) + changed + bytes(3 * 2**20 // 2))
        return folder

    def _export(self, folder: Path) -> None:
        self.made.append(self.model(folder))

    def start(
        self, *words: str, name: str = "a", resume: Path | None = None, world: int = 1, of: str = "start"
    ) -> Path:
        config = load(["quickstart_plain", "--output-dir", str(self.base / "runs"), "--name", name, *words])
        problems, told = SimpleNamespace(digest=""), SimpleNamespace(note=self.told.append, count=lambda *_, **__: None)
        self.told.clear()
        layout = Layout(world=world, tensor=world, pipeline=1, context=1, expert=1, expert_tensor=1)
        start, collective = self.base / of, One()
        return warmup.first_model(
            config,
            lambda: warmup.warmed_up_model(config, layout, start, problems, None, collective, told),  # type: ignore[arg-type]
            *(start, collective, told),  # type: ignore[arg-type]
            folder=RunFolder.of(config),
            resume=resume,
        )


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


LONGER = ("--rollout.max-new-tokens", "99")


def test_models_of_equal_sizes_and_other_bytes_have_warm_ups_and_draft_models_of_their_own(job: Job) -> None:
    models = [job.model(job.base / name, changed=changed) for name, changed in (("x", b"1"), ("y", b"2"), ("z", b"1"))]
    x, y, z = (job.start(of=model.name, name=model.name) for model in models)
    assert x == z != y
    assert job.made == [x, y]
    of_drafts = [warmup._key(model, One(), 0) for model in models]  # type: ignore[arg-type]
    assert of_drafts[0] == of_drafts[2] != of_drafts[1]


def test_a_resume_with_other_settings_keeps_the_model_that_the_run_started_from(job: Job) -> None:
    """The KL penalty's reference: also where another run goes on from the checkpoint, and runs have moved."""
    first = job.start()
    checkpoint = job.base / "runs" / "a" / "checkpoints" / "step-000010"
    assert job.start(*LONGER, resume=checkpoint) == first
    assert job.start(resume=checkpoint, world=2) == first
    assert job.start("--warmup.steps", "5", "5", resume=checkpoint) == first
    assert job.start(*LONGER, name="b", resume=checkpoint) == first
    elsewhere = str(job.base / "elsewhere")
    assert job.start(*LONGER, "--output-dir", elsewhere, resume=checkpoint) == first
    assert job.start(*LONGER, "--output-dir", elsewhere, resume=Path(elsewhere, "a", "checkpoints", "step-1")) == first
    linked = job.base / "another disk"
    (linked / checkpoint.name).mkdir(parents=True)
    checkpoint.parent.parent.mkdir(exist_ok=True)
    checkpoint.parent.symlink_to(linked)
    assert job.start(*LONGER, resume=checkpoint) == first
    assert job.start(*LONGER, name="b", resume=checkpoint) == first
    with chdir(checkpoint.parent):
        assert job.start(*LONGER, resume=Path(checkpoint.name)) == first
    assert (job.made, job.told) == ([first], [])
    (job.base / "runs").rename(job.base / "moved")
    moved = job.base / "moved" / WARM_UPS / first.name
    assert job.start(*LONGER, resume=job.base / "moved" / "a" / "checkpoints" / "step-000010") == moved
    assert (job.made, job.told) == ([first], [])


def test_a_start_without_a_checkpoint_takes_its_own_settings(job: Job) -> None:
    first = job.start()
    assert job.start(*LONGER) != first
    assert job.told == []


def test_a_model_that_is_gone_is_made_anew_and_said_so(job: Job) -> None:
    first = job.start()
    checkpoint = job.base / "runs" / "a" / "checkpoints" / "step-000010"
    shutil.rmtree(first)
    fresh = job.start(*LONGER, resume=checkpoint)
    assert fresh != first
    [told] = job.told
    assert told.startswith(f"The model that the run started from ({first}) is not there, or is another: ")
    assert told.endswith(" takes its place, also as the KL penalty's reference.")
    assert (job.start(resume=checkpoint), job.told) == (fresh, [])
    job.model(job.base / "deeper", layers=3)
    job.start(resume=checkpoint, of="deeper")
    assert len(job.told) == 1, "a checkpoint of another model is refused later"
    for damaged in ("{", "[]", "null", '{"model": 1}'):
        RunFolder(root=job.base / "runs" / "a").base.write_text(damaged)
        job.start(resume=checkpoint)
        assert "(not recorded)" in job.told[0]


def test_a_replay_of_the_first_steps_starts_from_the_runs_model(job: Job) -> None:
    first = job.start()
    source, target = (RunFolder(root=job.base / "runs" / name) for name in ("a", "a.replay-000001"))
    target.root.mkdir()
    target.replay.write_text('{"step": 1}')
    shutil.copy(source.base, target.base)
    assert job.start(*LONGER, name=target.root.name, world=2) == first
    assert job.made == [first]


def test_a_model_that_nothing_made_is_the_one_that_the_settings_name(job: Job) -> None:
    none = ("--warmup.solver", "", "--warmup.steps", "--warmup.learning-rates")
    assert job.start(*none) == job.base / "start"
    job.model(job.base / "copy")
    checkpoint = job.base / "runs" / "a" / "checkpoints" / "step-000010"
    assert (job.start(*none, resume=checkpoint, of="copy"), job.told) == (job.base / "copy", [])
