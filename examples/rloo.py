"""RLOO (arXiv 2402.14740), on the quickstart's task: each response against the mean of the others of its group."""

from dataclasses import replace

from examples import quickstart
from specactor.config import AlgorithmConfig, Config


def recipe() -> Config:
    base = quickstart.plain()
    return replace(
        base,
        name="rloo",
        algorithm=AlgorithmConfig(advantage="rloo", loss="ppo_clip", aggregation="token_mean"),
    )
