"""GRPO as published (arXiv 2402.03300), on the quickstart's task: group-relative advantages, mean per sequence.

Two updates per step, so that the clipping of ratios has something to do.
"""

from dataclasses import replace

from examples import quickstart
from specactor.config import AlgorithmConfig, Config


def recipe() -> Config:
    base = quickstart.plain()
    return replace(
        base,
        name="grpo",
        algorithm=AlgorithmConfig(advantage="grpo", loss="ppo_clip", aggregation="sequence_mean"),
        train=replace(base.train, updates_per_step=2),
    )
