"""The quickstart, where the first host's engine is behind: in every step it begins when others have begun some of its
groups. What each rank sends its engine is written down.

MOVING_FOLDER: of what is written. In step `HELD` the engine also waits for a file there, `GO`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples import quickstart_plain
from specactor.config import Config
from specactor.rollout.sglang.engine_client import Engine
from specactor.rollout.waiting import Waiting
from specactor.types import RolloutRequest, Trajectory

ENGINES, LATE, NUM_MOVED, HELD = 2, 0, 2, 2
GO = "go"
LOOKS, LOOK_S = 12_000, 0.05
_TRAINING = re.compile(r"(\d+)\.(\d+)\.\d+")
_generate = Engine.generate


def recipe() -> Config:
    Engine.generate = _noted  # type: ignore[method-assign]
    return quickstart_plain.recipe()


def apart() -> Config:
    """As `recipe`, but no rank sees what others have counted."""
    count = Waiting._add
    Waiting._add = lambda self, name, amount: count(self, f"{os.environ['RANK']}/{name}", amount)  # type: ignore[method-assign]
    return recipe()


def sent(folder: Path, rank: int) -> list[str]:
    """Ids of what a rank has sent its engine in RL steps, from 0, in order."""
    file = folder / f"sent-{rank}"
    return file.read_text().split() if file.exists() else []


def begun(folder: Path, step: int) -> list[str]:
    """Ids of what all ranks have sent their engines in an RL step, from 1, in the order of names."""
    return sorted(name for rank in range(ENGINES) for name in sent(folder, rank) if name.startswith(f"{step - 1}."))


def num_moved(folder: Path, step: int, of: int = LATE) -> int:
    """Groups of an engine that others have begun in an RL step, from 1."""
    names = [name.split(".") for rank in range(ENGINES) if rank != of for name in sent(folder, rank)]
    return len({group for at, group, _ in names if int(at) == step - 1 and int(group) % ENGINES == of})


def _noted(engine: Engine, requests: Sequence[RolloutRequest], **options: Any) -> list[Trajectory]:
    folder, rank = Path(os.environ["MOVING_FOLDER"]), int(os.environ["RANK"])
    training = [found for r in requests if (found := _TRAINING.fullmatch(r.request_id))]
    with (folder / f"sent-{rank}").open("a") as file:
        file.write("".join(f"{found[0]}\n" for found in training))
    if training and rank == LATE:
        _wait(folder, int(training[0][1]) + 1)
    return _generate(engine, requests, **options)


def _wait(folder: Path, step: int) -> None:
    for _ in range(LOOKS):
        if num_moved(folder, step) >= NUM_MOVED and (step != HELD or (folder / GO).exists()):
            return
        time.sleep(LOOK_S)
    raise AssertionError(f"step {step}: {num_moved(folder, step)} groups have moved")
