"""One trainer rank: RL steps with and without the top-k recorded and a refresh; rank 0 writes the results.

torchrun ... -m tests.trainer.drafter.policy_top_k_script MODEL FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specactor.cpu import megatron
from specactor.parallel.collective import destroy_groups, init_groups
from specactor.parallel.layout import Layout
from tests.trainer import policy_cases

megatron.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from specactor.trainer.drafter.buffer import TopK, TrainingExample, example_from  # noqa: E402
from specactor.trainer.drafter.train import DrafterTrainer  # noqa: E402
from specactor.trainer.policy import PolicyTrainer  # noqa: E402
from tests.trainer.drafter import cases  # noqa: E402
from tests.trainer.drafter.policy_cases import (  # noqa: E402
    LAYERS,
    ROOM,
    SEQUENCES,
    TOP_K,
    UPDATES,
    draft_model,
    head_model,
    learned,
)

LAYOUTS = {"TP2": {"tensor": 2, "expert_tensor": 2}, "DP2": {}, "PP2": {"pipeline": 2}, "CP2": {"context": 2}}


def make(model: Path, parallel: dict[str, Any]) -> PolicyTrainer:
    config = policy_cases.config(str(model), parallel)
    p = config.parallel
    layout = Layout(
        world=2, tensor=p.tensor, pipeline=p.pipeline, context=p.context, expert=1, expert_tensor=p.expert_tensor
    )
    init_groups(layout, p, seed=0, local_rank=0)
    return PolicyTrainer(config, layout, model)


def examples_of(known: list[TopK | None]) -> list[TrainingExample]:
    return [
        example_from(s, top_k, version=0, temperature=policy_cases.TEMPERATURE)
        for s, top_k in zip(SEQUENCES, known, strict=True)
    ]


def steps(trainer: PolicyTrainer) -> list[dict[str, Any]]:
    return [asdict(trainer.train_step(SEQUENCES, learning_rate=2e-3)) for _ in range(2)]


def steps_with_refresh(trainer: PolicyTrainer, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    recorder = trainer.recorder(TOP_K, layers=LAYERS, max_tokens=ROOM)
    first = asdict(trainer.train_step(SEQUENCES, learning_rate=2e-3, recorder=recorder))
    known, states = map(list, zip(*recorder.take(), strict=True))
    of_head = learned(head_model(), known, states, dist.group.WORLD)
    drafter = DrafterTrainer(cases.config(), draft_model(), seed=0, group=dist.group.WORLD)
    drafter.buffer.add(examples_of(known))
    before = torch.get_rng_state()
    stats = drafter.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=UPDATES)
    moved = not torch.equal(before, torch.get_rng_state())
    if dist.get_rank() == 0:
        (folder / "buffer").write_bytes(drafter.buffer.state())
        torch.save(states, folder / "states.pt")
    second = asdict(trainer.train_step(SEQUENCES, learning_rate=2e-3))
    return [first, second], {"losses": stats.losses, "moved": moved, "head": of_head}


def main(model: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    results = {}
    for name, parallel in LAYOUTS.items():
        (folder / name).mkdir(exist_ok=True)
        plain = steps(make(model, parallel))
        destroy_groups(keep_process_group=True)
        with_refresh, drafter = steps_with_refresh(make(model, parallel), folder / name)
        destroy_groups(keep_process_group=True)
        results[name] = {"plain": plain, "with_refresh": with_refresh, "drafter": drafter}
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps({"results": results, "alike": everyone[0] == everyone[1]}))
    destroy_groups()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
