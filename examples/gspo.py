"""GSPO (arXiv 2507.18071), on the quickstart's task: one probability ratio per sequence.

A sequence's ratio is a geometric mean over its tokens, so its clip range is a thousandth of GRPO's.
"""

from dataclasses import replace

from examples import quickstart
from specactor.config import AlgorithmConfig, Config


def recipe() -> Config:
    base = quickstart.plain()
    return replace(
        base,
        name="gspo",
        algorithm=AlgorithmConfig(
            advantage="grpo", loss="gspo", aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4
        ),
        train=replace(base.train, updates_per_step=4),
    )
