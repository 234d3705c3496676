"""A reward of one's own on problems of one's own, with a tiny model and no warm-up.

    python examples/custom_reward.py problems
    torchrun --nproc-per-node 2 launch/train_moe.py custom_reward

The first command writes two JSONL files. Each line has a prompt, an answer, and the import path of the function that
scores a response; any function on the Python path will do. The folder of a recipe file is on that path.
"""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

from specactor.config import Config, DataConfig, EvalConfig, ModelConfig, WarmupConfig
from specactor.types import Problem


def score(response: str, problem: Problem) -> float:
    """Share of the answer's characters that stand at their place in the response; 1.0 for the answer alone."""
    if response == problem.answer:
        return 1.0
    right = sum(a == b for a, b in zip(problem.answer, response, strict=False))
    return 0.9 * right / max(len(problem.answer), len(response))


def write_problems(folder: Path, name: str, numbers: list[int]) -> None:
    """Problems ``37=`` -> ``73``: write a number backwards."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{n}=", "answer": str(n)[::-1], "verifier": "examples.custom_reward:score"} for n in numbers]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe() -> Config:
    from examples import quickstart

    base = quickstart.plain()
    return replace(
        base,
        name="custom_reward",
        model=ModelConfig(path="tiny:2", dtype="float32"),
        data=DataConfig(train="problems/train.jsonl", eval=("problems/eval.jsonl",)),
        warmup=WarmupConfig(),
        rollout=replace(base.rollout, max_new_tokens=8),
        eval=EvalConfig(problems=64),
    )


if __name__ == "__main__":
    drawn = random.Random(0).sample(range(10, 1000), 600)
    write_problems(Path(sys.argv[1]), "train", drawn[:500])
    write_problems(Path(sys.argv[1]), "eval", drawn[500:])
