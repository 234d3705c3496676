"""What a resume is told of the settings that it changes, and the status."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from specactor import run_folder
from specactor.recipes import load, to_json
from specactor.run import _status_writer
from specactor.run_folder import RunFolder, changed_settings, checkpoint_to_resume
from specactor.types import Problem, ScoredGroup, Trajectory

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


def test_a_run_that_began_from_a_path_goes_on_from_its_own_newest_checkpoint(tmp_path: Path) -> None:
    """A launcher gives the same command again after a failure."""
    start = tmp_path / "a" / "checkpoints" / "step-000010"
    start.mkdir(parents=True)
    words = ("quickstart_plain", "--output-dir", str(tmp_path), "--name", "b", "--resume", str(start))
    config = load(words)
    folder = RunFolder.of(config)
    assert checkpoint_to_resume(config, folder) == start
    folder.root.mkdir()
    (folder.root / "config.json").write_text(json.dumps(to_json(config)))
    assert checkpoint_to_resume(config, folder) == start, "it has none of its own yet"
    newest = folder.checkpoints / "step-000020"
    newest.mkdir(parents=True)
    other = load([*words[:-1], str(tmp_path / "a")])
    assert checkpoint_to_resume(other, folder) == tmp_path / "a", "another PATH is another start"
    start.rmdir()  # the other run has newer ones
    assert checkpoint_to_resume(load(words), folder) == newest


def test_of_each_held_out_set_the_first_and_the_newest_responses_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with each the prompt that the policy saw, which an environment may have made."""
    monkeypatch.setattr(run_folder, "KEPT_EVALUATIONS", 2)
    folder, decoder = RunFolder(root=tmp_path), SimpleNamespace(decode=lambda ids, **_: str(ids))
    problem = Problem(index=0, prompt="?", prompt_ids=(3, 4), answer="", verifier="", metadata={})
    rest = {"request_id": "", "group_id": 0, "logprobs": (), "finish_reason": "stop", "spans": ()}
    said = Trajectory(prompt_ids=(5,), token_ids=(6,), **rest)  # type: ignore[arg-type]
    groups = [ScoredGroup(problem=problem, trajectories=(said,), scores=(1.0,), rewards=(1.0,))]
    for step in (0, 5, 10, 15, 20):
        folder.write_evaluation(step, groups, decoder)  # type: ignore[arg-type]
        if step <= 5:
            folder.write_evaluation(step, groups, decoder, name="other")  # type: ignore[arg-type]
    kept = {file.name for file in (tmp_path / "evaluations").iterdir()}
    other = {"step-000000-other.jsonl", "step-000005-other.jsonl"}
    assert kept == {"step-000000.jsonl", "step-000015.jsonl", "step-000020.jsonl"} | other
    line = json.loads(folder.evaluation(20).read_text())
    assert (line["prompt_ids"], line["token_ids"]) == ([5], [6])


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
