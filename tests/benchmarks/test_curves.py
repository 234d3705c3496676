"""Figures of runs, against metrics written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import curves

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(folder: Path, *, seed: int, before: float = 0.5, after: float = 0.9) -> Path:
    """Two RL steps: 300 response tokens in 3 s of rollout; 10 s before the first step, 5 s afterwards."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"seed": seed, "train": {"max_logprob_gap": 1e-4}}))
    step: dict[str, object] = {"accuracy/train": 0.6, "response/length_mean": 20.0, "policy/entropy": 0.1}
    lines = [
        {"step": 0, "accuracy/eval": before, "time/data_s": 4.0, "time/warm-up_s": 6.0},
        step
        | {
            "step": 1,
            "agreement/logprob_gap_max": 3e-5,
            "rollout/tokens": 100,
            "time/rollout_s": 2.0,
            "time/train_s": 0.5,
        },
        step
        | {
            "step": 2,
            "accuracy/eval": after,
            "agreement/logprob_gap_max": None,
            "rollout/tokens": 200,
            "time/rollout_s": 1.0,
            "time/step_s": 2.5,
        },
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_row_holds_what_the_run_wrote(tmp_path: Path) -> None:
    row = curves.table_row(curves.read_run(write_run(tmp_path / "a", seed=3)))

    assert dict(zip(curves.COLUMNS, row, strict=True)) == {
        "run": "a",
        "seed": "3",
        "steps": "2",
        "held-out before": "0.500",
        "held-out after": "0.900",
        "gain": "+0.400",
        "wall time": "15 s",  # 10 + 2.5 + 2.5: time/step_s already contains the phases of its step
        "of it RL": "5 s",
        "rollout tokens/s": "100",
        "largest gap": "3.0e-05",
    }


def test_a_run_without_figures_gets_dashes(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time/data_s": 1.0}\n')

    row = dict(zip(curves.COLUMNS, curves.table_row(curves.read_run(tmp_path)), strict=True))

    assert {row[name] for name in ("seed", "held-out before", "gain", "rollout tokens/s", "largest gap")} == {"-"}


def test_the_moving_average_is_cut_at_the_ends() -> None:
    assert curves.smoothed([1.0, 2.0, 3.0, 4.0, 10.0], 3) == [1.5, 2.0, 3.0, 17 / 3, 7.0]


def test_writes_picture_and_table(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", seed=1, after=0.8)]
    out = tmp_path / "new" / "quickstart"

    curves.main([*map(str, folders), "--out", str(out)])

    assert (tmp_path / "new" / "quickstart.png").read_bytes().startswith(PNG)
    text = (tmp_path / "new" / "quickstart.md").read_text()
    assert "| a | 0 |" in text
    assert "| b | 1 |" in text
    assert "mean +0.350, smallest +0.300" in text
    assert "(quickstart.png)" in text


def test_every_run_has_its_colour(tmp_path: Path) -> None:
    runs = [curves.read_run(write_run(tmp_path / name, seed=0)) for name in "abc"]

    figure = curves.draw(runs)

    entropy = next(axes for axes in figure.axes if axes.get_title(loc="left") == "Entropy")
    assert len({line.get_color() for line in entropy.lines}) == 3
    assert [list(line.get_xdata()) for line in entropy.lines] == [[1, 2]] * 3
    curves.plt.close(figure)


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"metrics\.jsonl"):
        curves.read_run(tmp_path)
