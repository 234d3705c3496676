"""One rank of the tests of the drafter trainer: rank, world, store file, output folder, ZeRO stage.

Writes losses, counts of micro-batches under a clock that differs between ranks, and the final weights.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from specactor.trainer.distillation.drafter import DrafterTrainer, RefreshStats
from tests.trainer.distillation import cases

UPDATES = 3


class Clock:
    """Every look at it takes a second, on rank 1 two."""

    def __init__(self, tick_s: float) -> None:
        self.now_s, self._tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now_s += self._tick_s
        return self.now_s


def made(zero_stage: int, world: int) -> DrafterTrainer:
    settings = cases.config(zero_stage=cast(Literal[0, 1, 2, 3], zero_stage))
    group = dist.group.WORLD if world > 1 else None
    trainer = DrafterTrainer(settings, cases.model(), seed=0, group=group)
    trainer.lost = (0.1, 0.2, 0.4)
    trainer.buffer.add(cases.lessons())
    return trainer


def said(stats: RefreshStats) -> dict[str, object]:
    return {
        "losses": stats.losses,
        "tokens": stats.tokens,
        "micro_steps": stats.micro_steps,
        "overlap": stats.overlap,
        "grad_norm": stats.grad_norm,
        "stopped": stats.stopped,
    }


def main(rank: int, world: int, store: str, folder: Path, zero_stage: int) -> None:
    if world > 1 or zero_stage:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
        )
    torch.set_num_threads(1)
    trainer = made(zero_stage, world)
    whole = said(trainer.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=UPDATES))
    weights = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    trainer.save(folder)
    on = said(trainer.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=2)) | {"lost": trainer.lost}
    again = made(zero_stage, world)
    again.load(folder)
    resumed = said(again.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=2))
    bounded = said(again.refresh(limit_s=60.0, clock=Clock(1.0 + rank)))
    save_file(weights, folder / f"rank{rank}.safetensors")
    results = {"whole": whole, "on": on, "resumed": resumed, "bounded": bounded}
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
