"""Every recipe takes two steps of the main job, one after the other, in one process that shares one engine.

Usage: python -m tests.end_to_end.recipes_run FOLDER. What makes a recipe large is cut: model, draft model, data, layout
and batch. Its algorithm, its updates per step and its schedule stay.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from launch import train_moe
from specactor.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistillationConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    ParallelConfig,
    SpeculationConfig,
    TrackingConfig,
    WarmupConfig,
    WeightsSyncConfig,
)
from specactor.recipes import load, recipes
from specactor.types import Problem

NEW_TOKENS = 12
PROMPTS, GROUP = 4, 4
RESPONSES = PROMPTS * GROUP
MODULE = "tests.end_to_end.recipes_run"
FAILING = "rloo"
"""The recipe whose verifier has a bug."""


def digits(response: str, problem: Problem) -> float:
    """Share of digits, which an untrained model varies; every second problem is one of equal rewards."""
    return sum(c.isdigit() for c in response) / max(1, len(response)) if int(problem.answer) % 2 else 0.5


def often_raises(response: str, problem: Problem) -> float:
    """The same, with a bug that every third response of a problem meets or so."""
    return 1 / (sum(map(ord, response)) % 3) and digits(response, problem)


VERIFIERS = {"custom_reward": "examples.custom_reward:score", FAILING: f"{MODULE}:often_raises"}


def cut(config: Config, folder: Path) -> Config:
    """The recipe at the size of a test."""
    verifier = VERIFIERS.get(config.name, f"{MODULE}:digits")
    numbers = random.Random(0).sample(range(10, 100), 60)
    files = [folder / f"{config.name}-{part}.jsonl" for part in ("train", "eval")]
    for file, part in zip(files, (numbers[4:], numbers[:4]), strict=True):
        rows = [{"prompt": f"{n}=", "answer": str(n)[::-1], "verifier": verifier} for n in part]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return replace(
        config,
        output_dir=str(folder / "runs"),
        model=ModelConfig(path="tiny:2", dtype="float32"),
        data=DataConfig(train=str(files[0]), eval=(str(files[1]),)),
        parallel=ParallelConfig(),
        warmup=WarmupConfig(),
        rollout=replace(
            config.rollout,
            audit="stop",
            prompts_per_step=PROMPTS,
            group_size=GROUP,
            max_new_tokens=NEW_TOKENS,
            engine=EngineConfig(max_running_requests=16, max_total_tokens=2048),
            speculation=SpeculationConfig(),
        ),
        distillation=DistillationConfig(),
        algorithm=replace(
            config.algorithm,
            overlong_buffer=min(config.algorithm.overlong_buffer, 8),
            critic=replace(config.algorithm.critic, warmup_steps=min(config.algorithm.critic.warmup_steps, 1)),
        ),
        train=replace(
            config.train,
            steps=2,
            learning_rate=1e-3,
            warmup_steps=0,
            max_logprob_gap=1e-4,
            optimizer_state="float32",  # the others are for bfloat16
        ),
        weights_sync=WeightsSyncConfig(),
        checkpoint=CheckpointConfig(export=False),
        eval=EvalConfig(problems=4),
        tracking=TrackingConfig(wandb="off"),
    )


def main(folder: Path) -> None:
    train_moe.set_environment()
    train_moe.quiet_libraries()
    from specactor.cpu import megatron

    megatron.install()
    import torch.distributed as dist

    from specactor import run
    from specactor.parallel.failure import Failures
    from specactor.rollout.pool import EnginePool

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with ExitStack() as stack:
        pools: list[EnginePool] = []

        def shared(*arguments: Any, **options: Any) -> AbstractContextManager[EnginePool]:
            if not pools:
                pools.append(stack.enter_context(EnginePool(*arguments, **options)))
            return nullcontext(pools[0])

        run.EnginePool = shared  # type: ignore[misc,assignment]
        run.destroy_groups = partial(run.destroy_groups, keep_process_group=True)  # type: ignore[assignment]
        for name in recipes():
            config = cut(load([name]), folder)
            run.run(config, rank=0, local_rank=0, world=1, head="127.0.0.1", failures=Failures(0, None))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
