"""specactor simulate: modes on the same requests, JSON, a page that needs nothing, and errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specactor.cli import main
from specactor.errors import ConfigError
from specactor.rollout.speculation.costs import CostTable, Grid
from specactor.simulator.command import parsed

SMALL = ["--model", "Qwen2.5-7B", "--devices", "8", "--prompts", "6", "--group-size", "4", "--length-median", "300"]


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_modes_are_compared_on_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, *SMALL, "--steps", "2")
    assert list(found) == ["off", "coupled", "decoupled", "auto"]
    assert len({of["tokens"] for of in found.values()}) == 1
    for of in found.values():
        assert len(of["steps"]) == 2
        assert 0.0 <= of["idle"] < 1.0
    assert found["off"]["steps"][0]["drafted"] == 0
    assert found["coupled"]["steps"][0]["drafted"] > 0
    assert simulated(capsys, *SMALL, "--steps", "2") == found, "equal seeds"
    assert simulated(capsys, *SMALL, "--steps", "2", "--seed", "1") != found


def test_truth_is_set_apart_from_belief(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--modes", "coupled"]
    usual, changed = (simulated(capsys, *words, *more)["coupled"] for more in ((), ("--true-acceptance", "0.2")))
    assert changed["plan"] == usual["plan"]
    assert changed["seconds"] > usual["seconds"]


def test_a_measured_table_takes_the_place_of_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = Grid(requests=(1.0, 64.0), per_request=(1.0, 9.0), seconds=((0.01, 0.011), (0.02, 0.05)))
    table = CostTable(model="m", device="d", date="", verify=grid, plain=grid, drafters={"small": grid, "suffix": grid})
    file = tmp_path / "costs.json"
    file.write_text(table.to_json())
    words = ["--cost-table", str(file), "--devices", "4", "--prompts", "4", "--group-size", "2", "--train-tokens-per-s"]
    found = simulated(capsys, *words, "100", "--length-longest", "99", "--drafters", "small", "--modes", "off", "auto")
    assert found["off"]["tokens"] <= 8 * 99
    assert main(["simulate", "--cost-table", str(file)]) == 2
    assert "train_tokens_per_s: got 0, expected > 0 with --cost-table" in capsys.readouterr().err
    assert main(["simulate", "--cost-table", str(tmp_path / "none")]) == 1
    assert "specactor profile" in capsys.readouterr().err


def test_the_table_fits_and_says_what_was_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--modes", "off", "auto", "--refresh", "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "simulated" in said
    assert "8 devices, 2 steps of 6 x 4 requests" in said.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "0"], "devices: got 0"),
        (["--devices", "x"], "devices: got 'x'"),
        (["--nothing"], "unknown setting --nothing"),
        (["--train-tokens-per-s", "-1"], "train_tokens_per_s: got -1"),
    ],
)
def test_errors_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "specactor plan" not in str(caught.value)


def test_what_cannot_be_simulated_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--model", "nowhere"]) == 2
    assert "model: got 'nowhere'" in capsys.readouterr().err
    assert main(["simulate", "--schedule", "one-step-off"]) == 2
    assert "unknown setting --schedule" in capsys.readouterr().err
