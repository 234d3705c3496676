"""Two steps of the main job with free routers and with replayed ones, one run after the other in one process.

Usage: python -m tests.end_to_end.replay_run FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Literal

from launch import train_moe
from specactor.config import Config, EngineConfig, ModelConfig, SpeculationConfig, TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from specactor.recipes import load
from tests.end_to_end.recipes_run import cut

Dtype = Literal["float32", "bfloat16"]
EXPERTS = 16
RUNS: dict[str, tuple[Dtype, int, bool]] = {
    "exact-free": ("float32", EXPERTS, False),
    "exact-replayed": ("float32", EXPERTS, True),
    "rounded-free": ("bfloat16", EXPERTS, False),
    "rounded-replayed": ("bfloat16", EXPERTS, True),
    "rounded-dense": ("bfloat16", TinyModelConfig.experts_per_token, False),
}
"""Name -> type of the weights, experts (of as many as compute each token, there are none to choose from), replay."""


def config_of(name: str, folder: Path) -> Config:
    dtype, experts, is_replayed = RUNS[name]
    config = cut(load(["grpo"]), folder)
    speculation = SpeculationConfig(mode="coupled" if is_replayed else "off")
    engine = EngineConfig(max_running_requests=16, max_total_tokens=2048, extra_args={"chunked_prefill_size": 16})
    return replace(
        config,
        name=name,
        model=ModelConfig(path=str(folder / f"model-{experts}"), dtype=dtype),
        rollout=replace(config.rollout, engine=engine, speculation=speculation, max_new_tokens=24),
        train=replace(
            config.train,
            routing_replay="r3" if is_replayed else "off",
            max_logprob_gap=1e-4 if dtype == "float32" else inf,
        ),
        eval=replace(config.eval, problems=0),
    )


def main(folder: Path) -> None:
    train_moe.set_environment()
    train_moe.quiet_libraries()
    from specactor.cpu import megatron

    megatron.install()
    import torch.distributed as dist

    from specactor import run
    from specactor.parallel.failure import Failures

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run.destroy_groups = partial(run.destroy_groups, keep_process_group=True)  # type: ignore[assignment]
    for experts in {experts for _, experts, _ in RUNS.values()}:
        make_tiny_model(TinyModelConfig(num_experts=experts), 0, folder / f"model-{experts}")
    for name in RUNS:
        config = config_of(name, folder)
        run.run(config, rank=0, local_rank=0, world=1, head="127.0.0.1", failures=Failures(0, None))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
