"""Two steps of the main job with an agent that is a program of its own, without drafts, with them, and with wrong ones.

Usage: python -m tests.end_to_end.agent_run FOLDER
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from launch import train_moe
from specactor.config import Config, DataConfig, EngineConfig, ModelConfig, SpeculationConfig, TinyModelConfig
from specactor.recipes import load
from specactor.types import Problem
from tests.end_to_end.recipes_run import cut

MODULE = "tests.end_to_end.agent_run"
PROGRAM = Path(__file__).with_name("openai_program.py")
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<eos>{% endfor %}a"
SURE = 12.0
"""Factor of the last layer: an untrained model that repeats itself, so that drafts are accepted."""
RUNS = {
    "plain": (),
    "drafting": ("suffix",),
    "wrong": ("tests.rollout.sglang.wrong_versions:noise_off_by_one", "suffix"),
}
"""Name -> drafters; none: speculation is off."""


class Program:
    """Starts the program; the reward is the share of digits in what it prints."""

    async def run(self, problem: Problem, base_url: str, api_key: str) -> float:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROGRAM), problem.prompt),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
        )
        said, _ = await child.communicate()
        text: str = json.loads(said)
        return sum(c.isdigit() for c in text) / max(1, len(text))


def rows(first: int, count: int) -> Iterator[dict[str, str]]:
    return ({"prompt": f"{n}=", "answer": "0", "verifier": f"{MODULE}:Program"} for n in range(first, first + count))


def train() -> Iterator[dict[str, str]]:
    return rows(10, 8)


def held_out() -> Iterator[dict[str, str]]:
    return rows(50, 2)


def make_policy(folder: Path) -> None:
    """A tiny model with a chat template, surer of itself than it was made."""
    from safetensors.torch import load_file, save_file

    from specactor.data.tiny_model import make_tiny_model
    from specactor.data.tokenizer import load_tokenizer

    make_tiny_model(TinyModelConfig(num_layers=2), 0, folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= SURE
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def config_of(name: str, folder: Path) -> Config:
    config = cut(load(["grpo"]), folder)
    speculation = SpeculationConfig(mode="off")
    if RUNS[name]:
        speculation = SpeculationConfig(mode="coupled", drafters=RUNS[name], window=4)
    return replace(
        config,
        name=name,
        model=ModelConfig(path=str(folder / "policy"), dtype="float32"),
        data=DataConfig(train=f"{MODULE}:train", eval=f"{MODULE}:held_out"),
        rollout=replace(
            config.rollout,
            audit="warn",
            prompts_per_step=2,
            max_new_tokens=64,
            environment_timeout_s=600,  # interpreters start, on a busy machine
            engine=EngineConfig(max_running_requests=16, max_total_tokens=2048),
            speculation=speculation,
        ),
        train=replace(config.train, max_logprob_gap=inf),  # the test looks itself
        eval=replace(config.eval, problems=2),
        tracking=replace(config.tracking, record="full"),
    )


def main(folder: Path) -> None:
    train_moe.set_environment()
    train_moe.quiet_libraries()
    from specactor.cpu import megatron

    megatron.install()
    import torch.distributed as dist

    from specactor import run
    from specactor.parallel.failure import Failures

    make_policy(folder / "policy")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run.destroy_groups = partial(run.destroy_groups, keep_process_group=True)  # type: ignore[assignment]
    for name in RUNS:
        run.run(config_of(name, folder), rank=0, local_rank=0, world=1, head="127.0.0.1", failures=Failures(0, None))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
