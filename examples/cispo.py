"""CISPO (arXiv 2506.13585), on the quickstart's task: clipped importance weights, no token's gradient is dropped."""

from dataclasses import replace

from examples import quickstart
from specactor.config import AlgorithmConfig, Config


def recipe() -> Config:
    base = quickstart.plain()
    return replace(
        base,
        name="cispo",
        algorithm=AlgorithmConfig(
            advantage="grpo", loss="cispo", aggregation="token_mean", clip_low=0.99, clip_high=2.0
        ),
        train=replace(base.train, updates_per_step=2),
    )
