"""Where a draft model is written: nothing but a model is ever replaced, and that only by a whole one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specactor.errors import ConfigError
from specactor.trainer.drafter import command, init
from specactor.trainer.drafter.buffer import RolloutLine
from specactor.trainer.drafter.init import TargetStart, make_draft_model, read_model, write_model
from tests.trainer.drafter import cases
from tests.trainer.drafter.cases import write_rollouts

Write = Callable[..., None]
NOTHING_TO_READ = ("--target", "nowhere", "--draft", "nowhere", "--rollouts", "nowhere")


def content(folder: Path) -> dict[str, bytes]:
    """Of all files below, those in hidden folders too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def precious(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work\n")
    return folder


def trained_to(out: Path, *inputs: str) -> None:
    command.train(command.parse(["train", *(inputs or NOTHING_TO_READ), "--out", str(out)]))  # type: ignore[arg-type]


def test_only_a_model_or_nothing_is_replaced(tmp_path: Path, targets: dict[str, Path]) -> None:
    """Before any work: what is to be read does not even exist."""
    other = precious(tmp_path / "other")
    (other / "config.json").write_text("{}")
    file = tmp_path / "file"
    file.write_text("x")
    before = content(tmp_path)
    for out in (other, file):
        with pytest.raises(
            ConfigError, match=r"out: got .* expected a path that does not exist, an empty folder or a mo"
        ):
            trained_to(out)
        with pytest.raises(ConfigError, match=r"out: got .* expected a path that does not exist or an empty folder"):
            make_draft_model(tmp_path / "nowhere", out, TargetStart())
        with pytest.raises(ConfigError, match="what is there would be lost"):
            write_model(cases.model(), out, tokenizer=targets["dense"])
    with pytest.raises(ConfigError, match=f"expected a path that can be made, which {file} forbids"):
        trained_to(file / "draft")
    assert content(tmp_path) == before


def test_what_is_read_is_not_replaced(tmp_path: Path, targets: dict[str, Path]) -> None:
    shutil.copytree(targets["dense"], tmp_path / "target")
    shutil.copytree(targets["dense"], tmp_path / "target" / "draft")
    write_rollouts(tmp_path / "target" / "r.jsonl", [RolloutLine(prompt_ids=[3], token_ids=[4])] * 9)
    (tmp_path / "link").symlink_to("target")
    before = content(tmp_path)
    folder, draft = tmp_path / "target", tmp_path / "target" / "draft"
    elsewhere = str(targets["dense"])
    inputs = {
        "the target": ("--target", str(folder), "--draft", elsewhere, "--rollouts", elsewhere),
        "the draft below": ("--target", elsewhere, "--draft", str(draft), "--rollouts", elsewhere),
        "the rollouts": ("--target", elsewhere, "--draft", elsewhere, "--rollouts", str(folder / "r.jsonl")),
    }
    for read in inputs.values():
        for out in (folder, tmp_path / "link", draft / ".."):
            with pytest.raises(ConfigError, match=r"expected a folder without .*, which is read"):
                trained_to(out, *read)
    assert content(tmp_path) == before


def test_a_model_takes_the_place_of_another_or_of_nothing(tmp_path: Path, targets: dict[str, Path]) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copytree(targets["dense"], tmp_path / "model")
    (tmp_path / "link").symlink_to("linked")
    for name in ("empty", "model", "new/folder", "link"):
        write_model(cases.model(), tmp_path / name, tokenizer=targets["dense"])
        written = dict(read_model(tmp_path / name).named_parameters())
        assert all(written[n].equal(p) for n, p in cases.model().named_parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "linked", "model", "new"]
    assert make_draft_model(targets["dense"], precious(tmp_path / "x").parent / "y", TargetStart()) > 0


# ------------------------------------------------------------------------------------------- nothing is lost


def deletes_first(model: Any, folder: Path, *, tokenizer: Path) -> None:
    """A wrong version."""
    shutil.rmtree(folder)
    write_model(model, folder, tokenizer=tokenizer)


def no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return tmp_path / "nowhere"


def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As safetensors says it."""

    def save(self: Any, folder: str, **_: Any) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half of a")
        raise init.SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(type(cases.model()), "save_pretrained", save)
    return tmp_path


def no_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The new folder does not get its name, when the old one has lost it."""
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if target.name == "model" and (source / "config.json").stat().st_ino != was:
            raise OSError("Input/output error")
        rename(source, target)

    was = (tmp_path / "model" / "config.json").stat().st_ino
    monkeypatch.setattr(os, "rename", failing)
    return tmp_path / "model"


FAILURES = (no_tokenizer, full_disk, no_rename)


@pytest.mark.parametrize("fail", FAILURES)
@pytest.mark.parametrize("write", [write_model, deletes_first])
def test_a_model_stays_when_the_next_cannot_be_written(
    tmp_path: Path,
    targets: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    write: Write,
    fail: Callable[[Path, pytest.MonkeyPatch], Path],
) -> None:
    shutil.copytree(targets["dense"], tmp_path / "model")
    before = content(tmp_path)
    tokenizer = fail(tmp_path, monkeypatch)
    with pytest.raises(OSError, match=r"nowhere|No space left|Input/output|model"):
        write(cases.model(), tmp_path / "model", tokenizer=tokenizer)
    assert (content(tmp_path) == before) == (write is write_model)
