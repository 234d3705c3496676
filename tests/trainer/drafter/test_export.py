"""The draft model at the end of a run: all ranks write it, or all say why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specactor.errors import CheckpointError
from specactor.parallel.collective import Collective
from specactor.trainer.drafter.init import read_model
from tests.trainer.drafter.ranks import run_ranks
from tests.trainer.drafter.refresh_cases import World


def test_what_is_exported_is_the_draft_model_as_it_has_become(
    collective: Collective, draft_dir: Path, tmp_path: Path
) -> None:
    world = World(collective, draft_dir)
    for number in (1, 2):
        world.step(number)
        assert world.it.export(tmp_path / "draft_model")
        written = {n: p.flatten().tolist() for n, p in read_model(tmp_path / "draft_model").named_parameters()}
        assert written == world.weights()


def test_weights_that_are_not_finite_are_not_exported(collective: Collective, draft_dir: Path, tmp_path: Path) -> None:
    world = World(collective, draft_dir)
    with world.it._on_device(), torch.no_grad():
        next(world.it.drafter.model.parameters()).view(-1)[0] = torch.nan
    assert not world.it.export(tmp_path / "draft_model")
    assert list(tmp_path.iterdir()) == []
    assert "neither pushed, saved nor exported" in world.notes[-1]


def test_a_full_disk_is_an_error_that_names_the_way_out(
    collective: Collective, draft_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(collective, draft_dir)

    def full(*args: object, **settings: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(type(world.it.drafter.model), "save_pretrained", full)
    with pytest.raises(CheckpointError, match=r"draft_model: could not be written: no space left\. Free disk space"):
        world.it.export(tmp_path / "draft_model")


@pytest.mark.parametrize("wrong", ["", "alone"])
def test_what_fails_on_one_rank_is_said_on_all(tmp_path: Path, wrong: str) -> None:
    run_ranks("export_rank", tmp_path / "store", tmp_path, wrong)
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert all(text.startswith("CheckpointError: ") for text in said) == (not wrong)
    if not wrong:
        assert "could not be written" in said[0]
        assert "draft model export: rank 0 failed" in said[1]
    assert (tmp_path / "first" / "model.safetensors").is_file()
    assert not (tmp_path / "second").exists()
