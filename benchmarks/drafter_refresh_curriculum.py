"""A curriculum for `benchmarks.drafter_refresh`: the quickstart's problems, from short numbers to long ones.

The policy is what the quickstart's warm-up leaves, so it has seen numbers of all lengths; the draft model is distilled
on its responses to numbers as the first step has, which is all that there is when such a run begins.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

from benchmarks.trained_models import DraftShape, distil, task_recipe, task_target
from examples import quickstart
from specactor.config import Config, SourceConfig, WarmupConfig

FIRST, LAST = 1000, 9999
"""Largest number in the first step, and from RISE of the run on."""
RISE = 0.75
SPARE = 1.2
"""Times the problems that a run draws: those that are held out are taken away."""


def largest(step: int, steps: int) -> int:
    """Of the numbers whose bits are counted; it grows by the same factor in every step. Args: from 0 on."""
    share = min(1.0, step / max(1.0, RISE * steps - 1))
    return round(FIRST * (LAST / FIRST) ** share)


def write_problems(file: Path, steps: int, *, seed: int = 0) -> None:
    """Of a run of so many steps, in their order."""
    chance, each = random.Random(seed), quickstart.recipe().rollout.prompts_per_step
    with file.open("w") as out:
        for step in range(round(SPARE * steps)):
            for number in chance.sample(range(1, largest(step, steps) + 1), each):
                row = {"prompt": f"{number}=", "answer": str(number.bit_count()), "verifier": "exact"}
                out.write(json.dumps(row) + "\n")


def make_draft(folder: Path) -> None:
    """One layer, distilled on the policy at its start, on numbers as the first step has."""
    source = replace(task_recipe("A").data.train, params={"min_n": 1, "max_n": FIRST})
    distil(task_target("A"), folder, DraftShape(), "A", source)


def recipe() -> Config:
    """Of every run; data.train.path is to be set."""
    usual = quickstart.recipe()
    source = SourceConfig(path="problems.jsonl")
    return replace(
        usual,
        model=replace(usual.model, tiny=None, path=str(task_target("A"))),
        warmup=WarmupConfig(),
        data=replace(usual.data, train=source, shuffle=False),
    )
