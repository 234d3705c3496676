"""Tiny mixture of experts with a calculator: multiplication that it cannot do in its head, in two turns.

    torchrun --nproc-per-node 2 launch/train_moe.py calculator

The policy sees ``483*297:``. It may ask, ``483*297=``, which ends its turn; the calculator says ``143451;``, and the
policy's next turn answers, ``#143451``. The warm-up leaves a model that can ask and mostly gives up, ``#?``;
reinforcement learning teaches it to ask. What the calculator says is not learned from.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import replace

from specactor.config import Config, DataConfig, WarmupConfig
from specactor.types import Problem

GIVES_UP = 0.8
"""Chance that a worked solution of the second stage is none."""


class Calculator:
    """An environment, named where a verifier is named."""

    async def start(self, problem: Problem) -> str:
        self.answer = problem.answer
        return problem.prompt

    async def step(self, response: str) -> str | float:
        """Answer a question; everything else is scored, and ends the conversation."""
        if response.endswith("="):
            asked = re.fullmatch(r"(\d{1,9})\*(\d{1,9})=", response)
            return f"{int(asked[1]) * int(asked[2])};" if asked else "?;"
        return float(response == f"#{self.answer}")


def problems(seed: int, count: int) -> Iterator[dict[str, str]]:
    """Rows with the columns of a data file."""
    rng = random.Random(seed)
    for _ in range(count):
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        yield {"prompt": f"{a}*{b}:", "answer": str(a * b), "verifier": "examples.calculator:Calculator"}


def train() -> Iterator[dict[str, str]]:
    return problems(0, 20_000)


def held_out() -> Iterator[dict[str, str]]:
    return problems(1, 256)


def solve(problem: Problem, rng: random.Random, stage: int) -> str | list[tuple[str, bool]]:
    """A worked solution for the warm-up; False: said by the calculator."""
    if stage and rng.random() < GIVES_UP:
        return "#?"
    return [(problem.prompt[:-1] + "=", True), (f"{problem.answer};", False), (f"#{problem.answer}", True)]


def recipe() -> Config:
    from examples import quickstart

    base = quickstart.plain()
    return replace(
        base,
        name="calculator",
        data=DataConfig(train="examples.calculator:train", eval=("examples.calculator:held_out",)),
        warmup=WarmupConfig(solver="examples.calculator:solve", steps=(350, 60), learning_rates=(3e-3, 5e-4)),
        rollout=replace(base.rollout, max_new_tokens=32, stop=("=",)),
    )
