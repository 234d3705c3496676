"""What a draft model could have reached, offline, on a run's folder made by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from benchmarks import drafter_refresh_ceiling as module
from benchmarks.drafter_refresh_ceiling import ceilings
from specactor.trainer.distillation.acceptance import accept_length
from specactor.trainer.distillation.refresh import FOLDER
from specactor.trainer.distillation.rollout_files import RolloutLine
from specactor.trainer.distillation.train import DrafterTrainer
from tests.trainer.distillation import cases

WINDOW = 4
LESSONS = [x for x in cases.lessons(30) if x.response_len > 1]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A policy of seed 1; a draft model of seed 2 at the jump, which learned nothing until the end."""
    (tmp_path / "rollouts").mkdir()
    for step, count in ((8, 1), (9, len(LESSONS))):
        lines = [
            RolloutLine(prompt_ids=x.token_ids[: x.prompt_len].tolist(), token_ids=x.token_ids[x.prompt_len :].tolist())
            for x in LESSONS[:count]
        ]
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        (tmp_path / "rollouts" / f"step-00000{step}.jsonl").write_bytes(text)
    cases.model(seed=1).save_pretrained(tmp_path / "export")
    cases.model(seed=0).save_pretrained(tmp_path / "draft")
    for step, seed in ((5, 2), (9, 2)):
        folder = tmp_path / "checkpoints" / f"step-00000{step}" / FOLDER
        folder.mkdir(parents=True)
        DrafterTrainer(cases.config(), cases.model(seed=seed), seed=0).save(folder)
    return tmp_path


def test_ceilings_of_a_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(target: Path, folder: Path, shape: object, task: str) -> None:
        assert target == root / "export"
        cases.model(seed=1).save_pretrained(folder)

    monkeypatch.setattr(module, "distil", copied)
    found = ceilings(root, root / "draft", jump_step=5, window=WINDOW)
    most = accept_length([[True] * x.response_len for x in LESSONS], WINDOW)
    assert found.policy == found.anew == most, "all of the last rollout, by the policy that wrote it"
    assert found.taught == found.untaught < 0.8 * most, "this run taught nothing"
    assert f"{found.anew:.2f} with one" in found.text()


def test_the_draft_model_is_that_of_the_checkpoint(root: Path) -> None:
    made = module.of_checkpoint(root / "draft", root / "checkpoints" / "step-000005")
    expected = dict(cases.model(seed=2).named_parameters())
    assert all(parameter.equal(expected[name]) for name, parameter in made.named_parameters())


def test_all_figures_are_said() -> None:
    figures = {field.name: 1.25 + i for i, field in enumerate(dataclasses.fields(module.Ceilings))}
    assert all(f"{value:.2f}" in module.Ceilings(**figures).text() for value in figures.values())
