"""Qwen3-30B-A3B on one node of 8 H100: the recipe of 8 nodes with what one node must change. Not run by the tests.

    torchrun --nproc-per-node 8 launch/train_moe.py qwen3_30b_a3b_node, with the paths of qwen3_30b_a3b

Moments and main weights of the experts have one copy among 8 devices, 46 GB on each in float32, too much beside the
rest: they are in host memory, where Adam computes (625 GB in all, 1010 at a checkpoint). A device then holds at most
79.6 of 80 GB, as on 8 nodes, by `specactor plan qwen3_30b_a3b_node --devices 8`. A step has as many prompts.
"""

from dataclasses import replace

from examples import qwen3_30b_a3b
from specactor.config import Config


def recipe() -> Config:
    config = qwen3_30b_a3b.recipe()
    return replace(
        config,
        name="qwen3_30b_a3b_node",
        parallel=replace(config.parallel, engines=2),
        train=replace(config.train, optimizer_state="host"),
    )
