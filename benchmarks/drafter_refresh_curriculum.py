"""Problems that change while a run goes on, for `benchmarks.drafter_refresh`: the quickstart's, short numbers first.

The policy is what the quickstart's warm-up leaves, so it has seen numbers of all lengths; the draft model is distilled
on its responses to numbers as the first step has, which is all that there is when such a run begins.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.trained_models import DraftShape, distil, task_recipe, task_target
from examples import quickstart
from specactor.config import Config, SourceConfig, WarmupConfig
from specactor.data.reasoning import create_task

FIRST, LAST = 999, 9999  # largest number of the first steps, and of the last ones
RISE = 0.5  # of the steps; from then on numbers are as long as they get


def rising(steps: int) -> list[int]:
    """The largest number of every step; it grows by the same factor in each, up to LAST."""
    last = max(1, round(RISE * steps) - 1)
    return [round(FIRST * (LAST / FIRST) ** min(1.0, step / last)) for step in range(steps)]


def write_problems(file: Path, largest: Sequence[int], *, seed: int = 0) -> Path:
    """As many steps as numbers are given, in their order; none of those that are held out."""
    chance, usual = random.Random(seed), quickstart.plain()
    held_out = numbers(usual.data.eval_sources(usual.eval.problems)["eval"])
    with file.open("w") as out:
        for most in largest:
            allowed = [number for number in range(1, most + 1) if number not in held_out]
            for number in chance.sample(allowed, usual.rollout.prompts_per_step):
                row = {"prompt": f"{number}=", "number": number, "answer": str(number.bit_count()), "verifier": "exact"}
                out.write(json.dumps(row) + "\n")
    return file


def numbers(source: SourceConfig) -> frozenset[int]:
    """Whose bits are counted."""
    task = create_task(source.task, source.params, size=source.size, seed=source.seed)
    return frozenset(int(task[i]["metadata"]["number"]) for i in range(source.size))


def make_draft(folder: Path, updates: int) -> None:
    """One layer, distilled on the policy at its start, on numbers as the first steps have."""
    source = replace(task_recipe("A").data.train_source, params={"min_n": 1, "max_n": FIRST})
    distil(task_target("A"), folder, DraftShape(steps=updates), "A", source)


def recipe() -> Config:
    """Of every run; data.train is to be set."""
    usual = quickstart.plain()
    return replace(
        usual,
        model=replace(usual.model, path=str(task_target("A"))),
        warmup=WarmupConfig(),
        data=replace(usual.data, train="problems.jsonl", eval=(usual.data.train,), order="source"),
        rollout=replace(usual.rollout, group_size=32),
    )
