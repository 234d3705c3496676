"""Dr.GRPO (arXiv 2503.20783), on the quickstart's task: no division by the group's spread, none by response length."""

from dataclasses import replace

from examples import quickstart
from specactor.config import AlgorithmConfig, Config


def recipe() -> Config:
    base = quickstart.plain()
    return replace(
        base,
        name="dr_grpo",
        algorithm=AlgorithmConfig(advantage="dr_grpo", loss="ppo_clip", aggregation="fixed_length"),
        train=replace(base.train, updates_per_step=2),
    )
