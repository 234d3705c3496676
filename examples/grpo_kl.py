"""Clipped policy gradient with a k3 penalty towards the warmed-up model, on the quickstart's task.

The penalty keeps the policy near the model that the run started from; four updates per step use each rollout more.
"""

from dataclasses import replace

from examples import quickstart
from specactor.config import AlgorithmConfig, Config


def recipe() -> Config:
    base = quickstart.plain()
    return replace(
        base,
        name="grpo_kl",
        algorithm=AlgorithmConfig(advantage="grpo", loss="ppo_clip", aggregation="token_mean", kl_coef=0.01),
        train=replace(base.train, updates_per_step=4),
    )
