"""REINFORCE++ with a group baseline (arXiv 2501.03262), on the quickstart's task.

Advantages are in units of the whole step's standard deviation.
"""

from dataclasses import replace

from examples import quickstart
from specactor.config import AlgorithmConfig, Config


def recipe() -> Config:
    base = quickstart.plain()
    return replace(
        base,
        name="reinforce_pp",
        algorithm=AlgorithmConfig(advantage="reinforce_pp", loss="ppo_clip", aggregation="token_mean"),
    )
