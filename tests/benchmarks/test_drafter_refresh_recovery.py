"""The section about recovery after a jump, from metrics written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import drafter_refresh_recovery as module
from benchmarks.drafter_refresh_curriculum import FIRST
from benchmarks.drafter_refresh_recovery import COLUMNS, ROLLOUTS_AFTER, STEPS_BEFORE, Recovery, jump, section, switch
from benchmarks.drafter_refresh_runs import LENGTH, Run

BEFORE = [1.5] * STEPS_BEFORE


def recovery(lengths: list[float], *, learns: bool = True) -> Recovery:
    """Steps of 4 s, after each of which 1 s went into a refresh of two updates."""
    lines: list[dict[str, object]] = [
        {
            "step": step,
            LENGTH: length,
            "accuracy/train": 0.75 if step <= STEPS_BEFORE + 1 else 0.25,
            "policy/entropy": 0.1 * step,
            "time/rollout_s": 3.0,
            "time/train_s": 1.0,
            **({"time/refresh_s": 1.0, "drafter/refreshed": 1, "drafter/updates": 2} if learns else {}),
        }
        for step, length in enumerate(lengths, 1)
    ]
    name = "every step, 3 %" if learns else "frozen"
    return Recovery(run=Run(name=name, lines=lines, tokens="00", facts=[]), learns=learns)  # type: ignore[arg-type]


def test_recovery_is_measured_against_the_rollout_before_the_jump() -> None:
    found = recovery([*BEFORE, 4.0, 2.0, 3.0, 3.7, 3.5])
    assert len(found.lengths()) == 1 + ROLLOUTS_AFTER
    assert found.best_share() == pytest.approx(3.7 / 4.0)
    assert found.row() == ["every step, 3 %", "4.00", "2.00", "3.00", "3.70", "3.50", "92 %", "2.0", "20.0 %"]
    assert recovery([*BEFORE, 4.0, 2.0, 2.1, 2.0, 2.0], learns=False).row()[-3:] == ["52 %", "-", "-"]


def test_the_rollout_just_after_the_jump_is_no_recovery() -> None:
    """A policy that hardly jumped would have recovered before any refresh."""
    found = recovery([*BEFORE, 4.0, 3.9, 2.0, 2.0, 2.0])
    assert found.best_share() == pytest.approx(0.5)


def test_a_section_says_what_was_missed() -> None:
    met, missed = recovery([*BEFORE, 4.0, 2.0, 3.0, 3.7, 3.5]), recovery([*BEFORE, 4.0, 2.0, 3.0, 3.5, 3.5])
    frozen = recovery([*BEFORE, 4.0, 2.0, 2.0, 2.0, 2.0], learns=False)
    text = section([frozen, met], [], jump(20))
    assert "every step, 3 %: met. Responses" in text
    assert "goes from 0.75 to 0.25" in text
    assert "| frozen | 4.00 | 2.00 |" in text
    assert "frozen: " not in text, "nobody expects it to recover"
    assert text.count("\n| ") == 4, "a header, a line, two rows"
    assert "missed" in section([frozen, missed], [], jump(20))
    assert section([frozen, met], [], jump(20), "Why.").endswith("\n\nWhy.")
    assert "which they must not" in section([frozen, met], ["frozen, step 1: policy/loss"], jump(20))


def test_legs_go_on_from_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps before at the usual rate, one at the larger one, and the rest as usual; settings of the user come first."""
    calls: list[list[str]] = []
    monkeypatch.setattr(module, "start", lambda root, settings, recipe: calls.append([*settings, recipe]))
    module._legs(tmp_path / "run", "frozen", jump(20), ["--seed", "1"])
    steps = [call[call.index("--train.steps") + 1] for call in calls]
    rates = [float(call[call.index("--train.learning-rate") + 1]) for call in calls]
    assert steps == [str(STEPS_BEFORE), str(STEPS_BEFORE + 1), str(STEPS_BEFORE + 1 + ROLLOUTS_AFTER)]
    assert rates[0] == rates[2]
    assert rates[1] == pytest.approx(20 * rates[0])
    assert ["--resume" in call for call in calls] == [False, True, True]
    assert all(call[:2] == ["--seed", "1"] for call in calls)
    assert all(call[-1] == "quickstart" for call in calls)
    assert ["--checkpoint.export" in call for call in calls] == [False, False, True], "what is measured offline"


def test_problems_switch_after_the_rollout_that_counts_as_before(tmp_path: Path) -> None:
    event = switch(tmp_path)
    [(steps, settings)] = event.legs
    assert steps == STEPS_BEFORE + 1 + ROLLOUTS_AFTER
    lines = Path(settings[1]).read_text().splitlines()
    each = len(lines) // steps
    asked = [int(json.loads(line)["prompt"].removesuffix("=")) for line in lines]
    largest = [max(asked[i * each : (i + 1) * each]) for i in range(steps)]
    assert max(largest[: STEPS_BEFORE + 1]) <= FIRST < min(largest[STEPS_BEFORE + 1 :])
    assert "digits until step 5" in section([recovery([*BEFORE, 4.0, 2.0, 3.0, 3.7, 3.5])], [], event)


def test_columns_fit_rows() -> None:
    assert len(recovery([*BEFORE, 4.0, 2.0, 3.0, 3.7, 3.5]).row()) == len(COLUMNS)
