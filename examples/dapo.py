"""DAPO (arXiv 2503.14476), on the quickstart's task.

Clip-higher, token-level loss, groups of equal rewards replaced by further prompts, and a soft penalty for overlong
responses.
"""

from dataclasses import replace

from examples import quickstart
from specactor.config import AlgorithmConfig, Config


def recipe() -> Config:
    base = quickstart.plain()
    return replace(
        base,
        name="dapo",
        algorithm=AlgorithmConfig(
            advantage="grpo",
            loss="ppo_clip",
            aggregation="token_mean",
            clip_low=0.2,
            clip_high=0.28,
            dynamic_sampling="unequal",
            overlong_buffer=8,
        ),
        train=replace(base.train, updates_per_step=2),
    )
