"""One rank of the tests of learning while others roll out: rank, store file, output folder.

Rank 1 learns alone while rank 0 works; then both take its copy, refresh together, and write losses and weights. With
a fourth argument the optimizer's moments are left behind.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from specactor.parallel.collective import Collective
from specactor.trainer.distillation.drafter import DrafterTrainer, Learned
from specactor.trainer.distillation.updates import PlainUpdater
from tests.trainer.distillation import cases

ALONE, TOGETHER = 3, 2
"""Updates."""


def made(group: dist.ProcessGroup | None) -> DrafterTrainer:
    trainer = DrafterTrainer(cases.config(), cases.model(), seed=0, group=group)
    trainer.buffer.add(cases.lessons())
    return trainer


def main(rank: int, store: str, folder: Path, forget: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    collective = Collective(torch.device("cpu"))
    trainer = made(dist.group.WORLD)
    if forget:
        PlainUpdater.moments = lambda self: []  # type: ignore[method-assign]
    enough = folder / "enough"

    def work() -> None:  # of rank 0, until rank 1 has learned
        while rank == 0 and not enough.exists():
            time.sleep(0.01)

    counts: list[int] = []

    def meanwhile(over: object) -> None:
        if rank == 1:
            counts.append(trainer.learn_alone(lambda: False, max_updates=ALONE).updates)
            enough.touch()

    collective.together("rollout", work, meanwhile=meanwhile)
    learned = collective.gather(trainer.learned(), Learned)
    trainer.adopt(1, learned[1])
    adopted = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    stats = trainer.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=TOGETHER)
    save_file(adopted, folder / f"adopted{rank}.safetensors")
    said = {"alone": counts, "losses": stats.losses, "version": trainer.version, "updates": trainer.updates}
    (folder / f"rank{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), len(sys.argv) > 4)
