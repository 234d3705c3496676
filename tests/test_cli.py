"""The specactor command."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from specactor.cli import main
from specactor.recipes import load, to_json


def test_version_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.split() == ["specactor", metadata.version("specactor")]
    assert main(["recipes"]) == 0
    assert "quickstart" in capsys.readouterr().out
    assert main(["recipes", "quickstart", "--seed", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == to_json(load(["quickstart", "--seed", "3"]))


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--help"], 0, "Say whether a run could start here"),
        (["doctor", "--help"], 0, "usage: specactor doctor [RECIPE"),
        (["report", "--help"], 0, "usage: specactor report RUN [--out FILE]"),
        (["report"], 2, "required: RUN"),
        (["profile", "--help"], 0, "specactor profile RECIPE [--out FILE] [--limit SECONDS] [--key.path value ...]"),
        (["profile", "--help"], 0, "Ctrl-C leaves nothing behind"),
        (["profile"], 2, "expected the name of a recipe"),
        (["profile", "quikstart"], 2, "Did you mean quickstart?"),
        (["profile", "quickstart", "--limit", "0"], 2, "got 0, expected seconds > 0"),
        (["profile", "quickstart", "--model.path", "nowhere"], 2, "model.path: got 'nowhere', expected a folder"),
        (["profile", "quickstart", "--out"], 2, "expected one argument"),
        (["drafter", "--help"], 0, "Distil the target into a draft model"),
        (["drafter"], 2, "expected init, train or eval"),
        (["drafter", "init", "--target", "nowhere", "--out", "draft"], 2, "model: got 'nowhere', expected a folder"),
        (
            [
                "drafter",
                "train",
                "--target",
                "t",
                "--draft",
                "d",
                "--rollouts",
                "r",
                "--out",
                "o",
                "--distillation.max-updates",
                "1",
            ],
            2,
            "max_updates: got 1, expected 0 in specactor drafter train",
        ),
        (["train", "grpo"], 2, "Train with: torchrun --nproc-per-node N launch/train_moe.py grpo"),
        (["diff", "nowhere", "here"], 2, "RUN: got 'nowhere', expected the folder of a run"),
        (["replay", "nowhere", "--step", "3"], 2, "No such run."),
        (["plan", "--help"], 0, "specactor plan RECIPE"),
        ([], 2, "required: COMMAND"),
        (["docter"], 2, "invalid choice: 'docter'"),
        (["doctor", "quikstart"], 2, "Did you mean quickstart?"),
    ],
)
def test_what_the_command_says(words: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        got = main(words)
    except SystemExit as stop:
        got = int(stop.code or 0)
    assert got == code
    said = capsys.readouterr()
    assert text in said.out + said.err


def test_report_writes_a_page_and_prints_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    elsewhere = tmp_path / "pages" / "run.html"
    assert main(["report", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path), "--out", str(elsewhere)]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "report.html"), str(elsewhere)]
    assert elsewhere.read_text() == (tmp_path / "report.html").read_text()


def test_report_of_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith(f"error: {tmp_path}: got no metrics.jsonl, expected ")
