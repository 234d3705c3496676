"""What a resume is told of the settings that it changes, and the status."""

from __future__ import annotations

import json
from pathlib import Path

from specactor.recipes import load, to_json
from specactor.run import _status_writer
from specactor.run_folder import RunFolder, changed_settings

WORDS = ("quickstart_plain", "--name", "a")


def test_a_resume_names_each_setting_that_it_changes(tmp_path: Path) -> None:
    checkpoint = tmp_path / "a" / "checkpoints" / "step-000010"
    checkpoint.mkdir(parents=True)
    assert changed_settings(checkpoint, to_json(load([*WORDS]))) == []
    file = tmp_path / "a" / "config.json"
    file.write_text(json.dumps(to_json(load([*WORDS, "--data.params", "size=50", "min_n=1"]))))
    same = ("--data.params", "size=50", "min_n=1")
    assert changed_settings(checkpoint, to_json(load([*WORDS, *same, "--resume", "auto", "--name", "b"]))) == []
    other = ("--train.learning-rate", "5e-7", "--data.params", "size=60", "--rollout.stop", "x")
    assert changed_settings(checkpoint, to_json(load([*WORDS, *other]))) == [
        "data.params.size 50 -> 60",
        "data.params.min_n 1 -> nothing",
        "rollout.stop [] -> ['x']",
        f"train.learning_rate {load([*WORDS]).train.learning_rate} -> 5e-07",
    ]
    for damaged in ("{", "[]", "null", '"x"', "\xff"):
        file.write_text(damaged)
        assert changed_settings(checkpoint, to_json(load([*WORDS]))) == []


def test_a_disk_that_fails_for_a_moment_ends_no_run(tmp_path: Path) -> None:
    """The status is for those who look; the next phase writes it again."""
    folder = RunFolder(root=tmp_path / "run")
    write = _status_writer(folder, 3, [])
    folder.root.write_text("in its place")
    write("rollout", 1)
    folder.root.unlink()
    write("train", 1)
    status = folder.read_status()
    assert status is not None
    assert status.phase == "train"
