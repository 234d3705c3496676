"""Drafter trainers of one rank with the same examples, to compare with each other and with a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specactor.trainer.drafter.train import DrafterTrainer, RefreshStats
from tests.trainer.drafter import cases, train_rank

UPDATES = train_rank.UPDATES


def trainer(**changes: Any) -> DrafterTrainer:
    made = DrafterTrainer(cases.config(**changes), cases.model(), seed=0)
    made.buffer.add(cases.examples())
    return made


def learn(made: DrafterTrainer, updates: int = UPDATES) -> RefreshStats:
    return made.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=updates)


def resumed(folder: Path) -> DrafterTrainer:
    made = DrafterTrainer(cases.config(), cases.model(seed=5), seed=0)
    made.load(folder)
    return made
