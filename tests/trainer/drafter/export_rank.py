"""One rank of the test of an export that fails: rank, store file, output folder, and what is wrong.

The disk of rank 0 fails. Wrong may be that rank 0 writes while others wait (alone).
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from specactor.errors import SpecActorError
from specactor.parallel.collective import Collective
from specactor.trainer.drafter import init
from specactor.trainer.drafter.refresh import Distillation
from tests.trainer.drafter import cases
from tests.trainer.drafter.refresh_cases import World


def alone(self: Distillation, folder: Path) -> bool:
    """A wrong version of `Distillation.export`."""
    weights = dict(self.drafter.named_weights())
    if self._collective.rank == 0:
        init.write_model(self.drafter.model, folder, tokenizer=self._folder, weights=weights)
    self._collective.barrier()
    return True


def main(rank: int, store: str, folder: Path, wrong: str) -> None:
    torch.set_num_threads(1)
    own = folder / f"draft{rank}"
    cases.model().save_pretrained(own)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    world = World(Collective(), own)
    assert world.it.export(folder / "first")
    if rank == 0:
        own.rename(folder / "gone")
    if wrong:
        Distillation.export = alone  # type: ignore[method-assign]
    try:
        world.it.export(folder / "second")
    except (SpecActorError, OSError, RuntimeError) as error:
        (folder / f"rank{rank}").write_text(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
