"""One rank of the test of heads that ranks make together: rank, world, store file, target, head, rollouts, output,
tokens per update.

Writes the losses of its updates.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from specactor.config import DraftTrainingConfig
from specactor.trainer.drafter import command, init
from specactor.trainer.drafter.buffer import example_of, read_rollouts

SETTINGS = DraftTrainingConfig(top_k=16, tokens_per_microbatch=256, learning_rate=1e-2)
UPDATES = 4


def learned(
    target: Path, head: Path, rollouts: Path, tokens: int, group: dist.ProcessGroup | None = None
) -> list[float]:
    policy = init.read_model(target)
    examples = [replace(example_of(line), temperature=0.7) for line in read_rollouts([rollouts])]
    model, settings = init.read_draft(head, policy), replace(SETTINGS, tokens_per_update=tokens)
    stats = command.learn(policy, model, examples, settings, seed=0, limit_s=1e9, updates=UPDATES, group=group)
    return list(stats.losses)


def main(
    rank: int, world: int, store: str, target: Path, head: Path, rollouts: Path, folder: Path, tokens: int
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    made = learned(target, head, rollouts, tokens, dist.group.WORLD)
    (folder / f"learned{rank}.json").write_text(json.dumps(made))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(Path, sys.argv[4:8]), int(sys.argv[8]))
