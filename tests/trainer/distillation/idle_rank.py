"""One rank of the tests of learning while others roll out: rank, store file, output folder, and what goes wrong.

Both refresh; rank 1 learns alone while rank 0 works; both take over what is to be taken, refresh again, and write
losses and weights. Wrong may be that the optimizer's moments are left behind (forget), or that learning alone fails in
its second update (fail).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from specactor.parallel.collective import Collective
from specactor.trainer.distillation.train import DrafterTrainer, Learned
from specactor.trainer.distillation.updates import PlainUpdater
from tests.trainer.distillation import cases

ALONE, TOGETHER = 3, 2
"""Updates."""


def made(group: dist.ProcessGroup | None) -> DrafterTrainer:
    """After one update."""
    trainer = DrafterTrainer(cases.config(), cases.model(), seed=0, group=group)
    trainer.buffer.add(cases.lessons())
    trainer.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=1)
    return trainer


def fail_in_second_update(trainer: DrafterTrainer) -> None:
    step, first = PlainUpdater.step, trainer.updates

    def failing(self: PlainUpdater, learning_rate: float) -> float:
        if trainer.updates == first + 1:
            raise RuntimeError("out of memory")
        return step(self, learning_rate)

    PlainUpdater.step = failing  # type: ignore[method-assign]


def main(rank: int, store: str, folder: Path, wrong: str) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    collective = Collective(torch.device("cpu"))
    trainer = made(dist.group.WORLD)
    step = PlainUpdater.step
    if wrong == "forget":
        PlainUpdater.moments = lambda self: []  # type: ignore[method-assign]
    if wrong == "fail":
        fail_in_second_update(trainer)
    enough = folder / "enough"

    def work() -> None:  # of rank 0, until rank 1 has learned
        while rank == 0 and not enough.exists():
            time.sleep(0.01)

    counts: list[int] = []
    problems: list[str] = []

    def meanwhile(over: threading.Event) -> None:
        if rank == 1:
            try:
                counts.append(trainer.learn_alone(lambda: False, max_updates=ALONE).updates)
            except RuntimeError as error:
                problems.append(str(error))
            enough.touch()

    collective.together("rollout", work, meanwhile=meanwhile)
    PlainUpdater.step = step  # type: ignore[method-assign]
    learned = collective.gather(trainer.learned(), Learned)
    if wrong != "fail":
        trainer.adopt(1, learned[1])
    adopted = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    stats = trainer.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=TOGETHER)
    save_file(adopted, folder / f"adopted{rank}.safetensors")
    said = {"alone": counts, "problems": problems, "losses": stats.losses}
    said |= {"version": trainer.version, "updates": trainer.updates}
    (folder / f"rank{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
