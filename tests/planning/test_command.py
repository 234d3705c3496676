"""specactor plan: ranked plans for built-in shapes, a folder or a measured table; errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specactor.cli import main
from specactor.errors import ConfigError
from specactor.planning.command import acceptance_at, plans
from specactor.rollout.speculation.costs import CostTable, Grid, ProcessCosts

SMALL = ["--model", "Qwen2.5-7B", "--devices", "8", "--requests", "64", "--max-window", "4"]


def ranked(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["plan", *words, "--json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_plans_are_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    found = ranked(capsys, *SMALL)
    speeds = [plan["tokens_per_s"] for plan in found]
    assert speeds == sorted(speeds, reverse=True)  # type: ignore[type-var]
    assert {plan["mode"] for plan in found} == {"off", "coupled", "decoupled"}  # type: ignore[index]
    assert len(ranked(capsys, *SMALL, "--top", "2")) == 2
    assert ranked(capsys, *SMALL, "--acceptance", "0")[0]["mode"] == "off"


def test_engines_are_of_sizes_that_a_run_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {plan["verifiers"]["devices_each"] for plan in ranked(capsys, *SMALL, "--top", "1000")}  # type: ignore[index]
    assert sizes == {1, 2, 4}, "28 heads are not to be divided by 8"


def test_the_table_says_why(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    words = [
        "--devices",
        "16",
        "--requests",
        "64",
        "--engine-devices",
        "4",
    ]
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "Qwen2.5-32B on H100, published figures: 16 devices, 64 requests" in said
    assert "tokens per round of" in said
    assert "1 token per" in said
    assert "windows in" in said


def test_a_folder_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model", str(tmp_path), *SMALL[2:]]
    folder = ranked(capsys, *words, "--drafters", "Qwen2.5-0.5B")
    assert folder == ranked(capsys, *SMALL)
    assert {plan["mode"] for plan in ranked(capsys, *words)} == {"off"}, "no drafter is known for it"  # type: ignore[index]


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    axis = (1.0, 32.0)
    table = CostTable(
        model="tiny",
        device="2 x core",
        date="",
        verify=Grid(requests=axis, per_request=(1.0, 9.0), seconds=((0.010, 0.012), (0.020, 0.060))),
        plain=Grid(requests=axis, per_request=(1.0,), seconds=((0.009,), (0.018,))),
        drafters={
            "suffix": Grid(requests=axis, per_request=(1.0,), seconds=((1e-4,), (1e-3,))),
            "model": Grid(requests=axis, per_request=(1.0, 9.0), seconds=((0.001, 0.009), (0.002, 0.018))),
        },
    )
    file = tmp_path / "costs.json"
    file.write_text(table.to_json())
    return file


def test_a_measured_table_takes_the_place_of_figures(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cost-table", str(measured), "--devices", "4", "--requests", "16"]
    found = ranked(capsys, *words, "--acceptance", "suffix=0.2", "model=0.9")
    assert {(plan["mode"], plan["drafter"]) for plan in found} == {
        ("off", "off"),
        ("coupled", "suffix"),
        ("coupled", "model"),
        ("decoupled", "model"),
    }
    assert found[0]["drafter"] == "model"  # type: ignore[index]
    only = ranked(capsys, *words, "--drafters", "suffix")
    assert {plan["drafter"] for plan in only} == {"off", "suffix"}  # type: ignore[index]
    pairs = ranked(capsys, *words, "--engine-devices", "2")
    assert all(plan["verifiers"]["devices_each"] == 2 for plan in pairs)  # type: ignore[index]


def test_a_measured_drafter_process_is_what_drafts_elsewhere(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its own pace: nobody waits for a window, and what it costs the engine is charged."""

    def elsewhere(token_s: float, ahead_s: float) -> list[dict[str, object]]:
        axis = (1.0, 32.0)
        token, ahead = (Grid(requests=axis, per_request=(1.0,), seconds=((s,), (s,))) for s in (token_s, ahead_s))
        table = CostTable.from_json(measured.read_bytes())
        file = tmp_path / "with_process.json"
        file.write_text(replace(table, process=ProcessCosts(token_s=token, ahead_s=ahead)).to_json())
        words = ["--cost-table", str(file), "--devices", "2", "--requests", "4"]
        found = ranked(capsys, *words, "--acceptance", "suffix=0.2", "model=0.5", "decoupled=0.9")
        return [plan for plan in found if plan["mode"] == "decoupled"]  # type: ignore[index]

    [quick], [slow], [dear] = elsewhere(1e-4, 1e-5), elsewhere(0.02, 1e-5), elsewhere(1e-4, 0.01)
    assert quick["drafter"] == "decoupled"  # type: ignore[index]
    assert "tokens are drafted" in str(quick["reason"])
    assert quick["tokens_per_s"] > 1.2 * slow["tokens_per_s"]  # type: ignore[operator]
    assert slow["round_s"] < 5 * 0.02, "of five tokens and an exchange, if it were waited for"  # type: ignore[operator]
    assert dear["tokens_per_s"] < 0.9 * quick["tokens_per_s"]  # type: ignore[operator]
    found = ranked(
        capsys, "--cost-table", str(tmp_path / "with_process.json"), "--drafters", "decoupled", "--devices", "2"
    )
    assert {plan["mode"] for plan in found} == {"off", "decoupled"}  # type: ignore[index]


def test_acceptance_by_drafter() -> None:
    assert acceptance_at(["0.8"], "x") == 0.8
    assert acceptance_at(["0.8", "a=0.6"], "a") == 0.6
    assert acceptance_at(["0.8", "a=0.6"], "b") == 0.8
    with pytest.raises(ConfigError, match="expected a number for b"):
        acceptance_at(["a=0.6"], "b")
    for wrong in ("1.2", "x", "a=0:0.5", "-0.1", ""):
        with pytest.raises(ConfigError, match="acceptance: got "):
            acceptance_at([wrong], "a")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--device", "A100"], 2, "device: got 'A100', expected one of H100, H200, H20, B200. For others measure"),
        (["--devices", "0"], 2, "devices: got 0, expected >= 1"),
        (["--devices", "many"], 2, "devices: got 'many', expected INT"),
        (["--max-window", "0"], 2, "max_window: got 0, expected 1..16."),
        (["--max-window", "17"], 2, "max_window: got 17, expected 1..16."),
        (["--engine-devices", "3"], 2, "engine_devices: got 3, expected a divisor of the 40 heads of Qwen2.5-32B."),
        (["--engine-devices", "16"], 2, "engine_devices: got 16, expected 1..8 (a node of H100)."),
        (["--gpus", "8"], 2, "unknown setting --gpus"),
        (["--model", "nowhere"], 2, "model: got 'nowhere', expected a folder with config.json or one of Qwen2.5-0.5B"),
        (["--drafters", "nobody"], 2, "drafters: got 'nobody'"),
        (["--acceptance", "2"], 2, "acceptance: got '2', expected NUMBER or NAME=NUMBER"),
        (["--cost-table", "gone.json"], 1, "cost_table: got 'gone.json', expected a file that specactor profile wrote"),
        (["--devices", "1"], 1, "cluster: got 1 devices"),
        (["--model", "Qwen3-235B-A22B", "--engine-devices", "4"], 1, "got 470 GB of weights"),
    ],
)
def test_errors_are_one_line(words: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = [] if "--model" in words else ["--model", "Qwen2.5-32B"]
    sizes = [] if {"--model", "--engine-devices"} & {*words} else ["--engine-devices", "2"]
    assert main(["plan", *model, *sizes, *words]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    assert text in said.err


def test_wrong_names_and_tables(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cost-table", str(measured), "--drafters", "other"]) == 2
    assert "drafters: got ['other'], expected names in the table: ['model', 'suffix']" in capsys.readouterr().err
    assert main(["plan", "--cost-table", str(measured), "--engine-devices", "1", "2"]) == 2
    assert "expected one number with --cost-table" in capsys.readouterr().err
    assert main(["plan", "--cost-table", str(measured), "--host-ms", "1", "2"]) == 2
    assert "host_ms: got (1.0, 2.0), expected 0 0 with --cost-table" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("{}")
    assert main(["plan", "--cost-table", str(tmp_path / "other.json")]) == 1
    assert capsys.readouterr().err.startswith("error: cost table: ")


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "usage: specactor plan" in said
    for flag in ("--cost-table", "--acceptance", "--json"):
        assert flag in said


def test_needs_no_torch() -> None:
    script = (
        "import sys; from specactor.cli import main; code = main(['plan', '--model', 'Qwen2.5-7B', '--devices', '2', "
        "'--requests', '4']); print('torch' in sys.modules, 'sglang' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False False"


def test_options_as_values() -> None:
    """The search as a function, for other programs."""
    options, found = plans([*SMALL, "--max_window", "2"])
    assert options.max_window == 2
    assert all(plan.window <= 2 for plan in found)
