"""One rank of the tests of the drafter trainer: rank, world, folder, and as JSON the cases, each (stage, offload).

Writes into a folder of each case's name losses, also under a clock that differs between ranks, and the final weights.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from specactor.errors import CheckpointError
from specactor.trainer.drafter.train import STATE, DrafterTrainer, RefreshStats
from specactor.trainer.drafter.updates import PlainUpdater
from tests.trainer.drafter import cases

UPDATES = 3


class Clock:
    """Every look at it takes a second, on rank 1 two."""

    def __init__(self, tick_s: float) -> None:
        self.now_s, self._tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now_s += self._tick_s
        return self.now_s


def made(zero_stage: int, world: int, *, offload: bool) -> DrafterTrainer:
    settings = cases.config(zero=f"{zero_stage or 'off'}{'_offload' if offload else ''}")
    group = dist.group.WORLD if world > 1 else None
    trainer = DrafterTrainer(settings, cases.model(), seed=0, group=group)
    trainer.buffer.add(cases.examples())
    return trainer


def said(stats: RefreshStats) -> dict[str, object]:
    return {
        "losses": stats.losses,
        "tokens": stats.tokens,
        "overlap": stats.overlap,
        "grad_norm": stats.grad_norm,
    }


def refused(trainer: DrafterTrainer, folder: Path) -> list[str]:
    """What it says of a checkpoint that another stage, or other ranks, have divided; the right one is then loaded."""
    about = json.loads((folder / STATE).read_text())
    said = []
    with tempfile.TemporaryDirectory() as name:
        elsewhere = Path(name) / "copy"
        shutil.copytree(folder, elsewhere, ignore=shutil.ignore_patterns("store"))
        stage, ranks = about["zero_stage"], about["ranks"]
        wrong = [{"zero_stage": stage + 1}, {"ranks": ranks + 1}] if stage else [{"zero_stage": 1}]
        for division in wrong:
            (elsewhere / STATE).write_text(json.dumps(about | division))
            try:
                trainer.load(elsewhere)
            except CheckpointError as error:
                said.append(str(error))
        (elsewhere / STATE).write_text(json.dumps(about))
        trainer.load(elsewhere)
    return said


def spoil(trainer: DrafterTrainer, zero_stage: int) -> None:
    """One number of the weights, which with ZeRO stage 3 is in the part of one rank."""
    parameter = list(trainer.model.parameters())[-1]
    if zero_stage == 3:
        with importlib.import_module("deepspeed").zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.view(-1)[-1] = torch.nan
    else:
        parameter.data.view(-1)[-1] = torch.nan


def replica_is_made_again(trainer: DrafterTrainer) -> bool:
    """As on a GPU that engines had meanwhile: whether the old one is gone, and the next there before any pass."""
    assert isinstance(trainer._updater, PlainUpdater)
    old = weakref.ref(trainer._updater.replica)
    trainer._updater.forget_replica()
    is_gone = old() is None
    trainer.reload()
    return is_gone and trainer._updater._replica is not None


def weights_stay(trainer: DrafterTrainer, rank: int) -> bool:
    """Whether a replica that is made again takes nothing from rank 0."""
    assert isinstance(trainer._updater, PlainUpdater)
    bias = list(trainer.model.parameters())[-1].data
    before = bias.clone()
    bias.fill_(rank)
    trainer._updater.forget_replica()
    trainer.reload()
    stays = bool((bias == rank).all())
    bias.copy_(before)
    return stays


def offloads(trainer: DrafterTrainer) -> bool:
    """As DeepSpeed understood it; in stage 3 its optimizer has another word for it."""
    optimizer = getattr(getattr(trainer._updater, "_engine", None), "optimizer", None)
    return bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


def main(rank: int, world: int, folder: Path, divided: list[tuple[int, bool]]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    torch.set_num_threads(1)
    for zero_stage, offload in divided:
        train(rank, world, folder / name_of(zero_stage, offload=offload), zero_stage, offload=offload)
    dist.destroy_process_group()


def name_of(zero_stage: int, *, offload: bool) -> str:
    return f"{zero_stage}{'-offload' if offload else ''}"


def train(rank: int, world: int, folder: Path, zero_stage: int, *, offload: bool) -> None:
    trainer = made(zero_stage, world, offload=offload)
    whole = said(trainer.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=UPDATES))
    weights = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    trainer.save(folder)
    made_again = not zero_stage and replica_is_made_again(trainer)
    on = said(trainer.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=2))
    again = made(zero_stage, world, offload=offload)
    wrongly_divided = refused(again, folder)
    resumed = said(again.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=2))
    bounded = said(again.refresh(limit_s=60.0, clock=Clock(1.0 + rank)))
    save_file(weights, folder / f"rank{rank}.safetensors")
    results: dict[str, object] = {"whole": whole, "on": on, "resumed": resumed, "bounded": bounded}
    results["offloads"] = offloads(trainer)
    results["replica"] = made_again and weights_stay(again, rank)
    results["refused"] = wrongly_divided
    finite = [again.is_finite()]
    spoil(again, zero_stage)
    results["finite"] = [*finite, again.is_finite()]
    results["parts_are_finite"] = all(bool(part.isfinite().all()) for part in again.model.parameters())
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
