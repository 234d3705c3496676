"""The specactor command."""

from __future__ import annotations

import json
from importlib import metadata

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
