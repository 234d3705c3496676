"""Problems that get harder: as many as a run draws, in order, right, and none that is held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import drafter_refresh_curriculum as module
from benchmarks.drafter_refresh_curriculum import FIRST, LAST, RISE, numbers, rising, write_problems
from examples import quickstart


def test_numbers_rise_and_then_stay() -> None:
    largest = rising(20)
    assert len(largest) == 20
    assert (largest[0], largest[-1]) == (FIRST, LAST)
    assert largest == sorted(largest)
    assert largest.count(LAST) == 1 + round((1 - RISE) * 20)
    assert rising(1) == [FIRST]


def test_every_step_has_its_problems(tmp_path: Path) -> None:
    usual = quickstart.plain()
    each, held_out = usual.rollout.prompts_per_step, numbers(usual.data.eval_sources(usual.eval.problems)["eval"])
    assert len(held_out) > 100
    largest = [40, FIRST, LAST]
    rows = [json.loads(line) for line in write_problems(tmp_path / "p.jsonl", largest).read_text().splitlines()]
    found = [int(row["prompt"].removesuffix("=")) for row in rows]
    assert len(found) == each * len(largest)
    assert all(number <= most for i, most in enumerate(largest) for number in found[i * each : (i + 1) * each])
    assert not held_out & set(found)
    assert [row["answer"] for row in rows] == [str(bin(number).count("1")) for number in found]
    assert write_problems(tmp_path / "q.jsonl", largest).read_text() == (tmp_path / "p.jsonl").read_text()


def test_the_recipe_draws_in_order_and_does_not_warm_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "task_target", lambda task: tmp_path / task)
    config = module.recipe()
    assert config.data.order == "source"
    assert config.model.path == str(tmp_path / "A")
    assert not config.warmup.solver
    assert config.data.eval_sources(9)["eval"] == quickstart.plain().data.eval_sources(9)["eval"]
    assert config.data.train_source.path
