"""PPO with a critic (arXiv 1707.06347), on the quickstart's task: each token against what was expected before it.

The critic is a second model of the policy's shape; it learns alone for the first steps. Responses to a prompt are not
compared, so more prompts with fewer responses serve as well.
"""

from dataclasses import replace

from examples import quickstart
from specactor.config import AlgorithmConfig, Config, CriticConfig


def recipe() -> Config:
    base = quickstart.plain()
    return replace(
        base,
        name="ppo",
        rollout=replace(base.rollout, prompts_per_step=64, group_size=2),
        algorithm=AlgorithmConfig(
            advantage="gae",
            loss="ppo_clip",
            aggregation="token_mean",
            critic=CriticConfig(learning_rate=1e-3, warmup_steps=3, gae_lambda=0.95),
        ),
        train=replace(base.train, updates_per_step=2),
    )
