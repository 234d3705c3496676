"""The page of fresh and frozen draft models, from metrics and rollouts written by hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import drafter_refresh, drafter_refresh_runs
from benchmarks.drafter_refresh import KINDS
from benchmarks.drafter_refresh_runs import Run, differences
from specactor.replay import records

OPTIONS = argparse.Namespace(steps=2, window=4, share=0.03, start="cut")


def response(*tokens: int) -> records.SampleRecord:
    return records.SampleRecord.of(
        request_id="0.0.0",
        group=0,
        sample=0,
        problem=0,
        seed=0,
        spans=(),
        finish_reason="stop",
        score=1.0,
        reward=1.0,
        advantage=0.0,
        prompt_ids=[1],
        token_ids=tokens,
        logprobs=[-1.0] * len(tokens),
        routed_experts=b"",
        is_whole=False,
    )


def write_run(folder: Path, *, token: int = 7, loss: float = 0.5, length: float | None = None) -> Path:
    """Two RL steps of 3 s with 100 tokens each, after each of which 0.25 s went into a refresh."""
    lines: list[dict[str, object]] = [{"step": 0, "accuracy/eval": 0.5}]
    for step in (1, 2):
        records.write(folder, records.StepRecord(step=step, samples=(response(token, step),)))
        times = {"time/rollout_s": 2.0, "time/train_s": 0.75, "time/refresh_s": 0.25}
        lines.append({"step": step, "policy/loss": loss, "rollout/tokens": 100, **times})
        if length is not None:
            lines[-1] |= {drafter_refresh_runs.LENGTH: length + step, "drafter/refreshed": 1, "drafter/updates": 4}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    lengths = (None, 1.0, 2.0)
    return [
        Run.read(name, write_run(tmp_path / name, length=length)) for name, length in zip(KINDS, lengths, strict=True)
    ]


def test_runs_may_differ_in_their_drafters_alone(runs: list[Run], tmp_path: Path) -> None:
    assert differences(runs) == []
    other = Run.read("every step", write_run(tmp_path / "other", token=8, length=2.0))
    assert differences([*runs[:2], other]) == ["every step: responses or rewards differ from those of no drafter"]
    other = Run.read("every step", write_run(tmp_path / "third", loss=0.75, length=2.0))
    assert differences([*runs[:2], other]) == ["every step, step 1: policy/loss", "every step, step 2: policy/loss"]


def test_the_table(runs: list[Run]) -> None:
    rows = [drafter_refresh.row(run)[:-1] for run in runs]
    assert rows[0] == ["no drafter", "-", "-", "-", "50", "2.00", "-", "-", "-"]
    assert rows[1][1:4] == ["2.00", "3.00", "2.50"]
    assert rows[2] == ["every step", "3.00", "4.00", "3.50", "50", "2.00", "2", "8", "8.3 %"]
    assert all(len(row) == len(drafter_refresh.COLUMNS) - 1 for row in rows)


def test_every_aim_is_judged(runs: list[Run]) -> None:
    """All rise by 1 from 2 or 3, and refreshing takes a twelfth of the time."""
    found = drafter_refresh.aims({run.name: run for run in runs})
    assert [line.partition(":")[0] for line in found] == ["- MISSED", "- Met", "- Met", "- MISSED"]
    assert found[0].endswith("2.00 to 3.00.")
    assert found[1].endswith("3.00, at least 3.00, at the end 4.00.")
    assert found[2].endswith("33%.")
    assert found[3].endswith("8.3%.")


def test_a_page_says_when_runs_differ(runs: list[Run], tmp_path: Path) -> None:
    assert "identical in the three runs" in drafter_refresh.page(runs, [], OPTIONS).notes
    assert "which they must not" in drafter_refresh.page(runs, ["every step, step 1: policy/loss"], OPTIONS).notes
    drafter_refresh.draw(runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
