"""What all contestants of the trainer benchmark share: models, sequences, and taking turns.

Contestants stay alive and are told one after the other, through files in a folder of their own, to make one training
step, so that only one of them computes at any time and all of them meet the same conditions of the machine. Nothing
here imports Megatron-core: the plain PyTorch contestant runs in a process without it.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from specactor.config import TinyModelConfig
from specactor.types import TrainSequence

MODELS = {
    "quickstart": TinyModelConfig(),
    "22 M": TinyModelConfig(num_layers=6, hidden_size=256, num_experts=16, expert_size=288),
}
"""Shapes to train, by name: 1.8 M and 22 M parameters."""

NUM_SEQUENCES = 128
LEARNING_RATE = 1e-5
CLIP = 0.2
TIS_CAP = 2.0
ADAM_BETAS = (0.9, 0.95)
GRAD_CLIP = 1.0
WAIT_S = 900.0  # longest wait for the next turn, or for a contestant's answer


def sequences(vocab_size: int, seed: int = 0) -> list[TrainSequence]:
    """128 sequences of 20-60 random tokens in groups of 8, with made-up advantages and engine log-probabilities."""
    rng = random.Random(seed)
    made = []
    for i in range(NUM_SEQUENCES):
        length, prompt = rng.randint(20, 60), rng.randint(3, 6)
        made.append(
            TrainSequence(
                token_ids=tuple(rng.randrange(3, vocab_size) for _ in range(length)),
                prompt_len=prompt,
                advantage=rng.uniform(-1, 1),
                rollout_logprobs=tuple(rng.uniform(-6, -3) for _ in range(length - prompt)),
                group_id=i // 8,
            )
        )
    return made


def serve(
    folder: Path, *, rank: int, settings: list[Any], step: Callable[[Any], float], barrier: Callable[[], None]
) -> None:
    """Make one step with ``settings[i]`` for every turn that names i, until a turn without it.

    Rank 0 answers each turn with the step's seconds and its loss; turn 0 only asks how many settings there are.
    """
    answer: dict[str, Any] = {"settings": [str(setting) for setting in settings]}
    for number in count():
        turn = await_json(folder / f"turn-{number}")
        if turn["setting"] is None:
            return
        if number:
            barrier()
            start = time.perf_counter()
            loss = step(settings[turn["setting"]])
            barrier()
            answer = {"seconds": time.perf_counter() - start, "loss": loss}
        if rank == 0:
            write_json(folder / f"done-{number}", answer)


def write_json(file: Path, value: object) -> None:
    """Appears whole."""
    fresh = file.with_name(file.name + ".tmp")
    fresh.write_text(json.dumps(value))
    os.rename(fresh, file)


def await_json(file: Path, alive: Callable[[], bool] = lambda: True) -> Any:
    """The file's content, once it is there. TimeoutError after `WAIT_S`, or as soon as `alive` says no."""
    deadline = time.monotonic() + WAIT_S
    while not file.exists():
        if time.monotonic() > deadline or not alive():
            raise TimeoutError(f"{file}: not written within {WAIT_S:.0f} s, or its writer has ended")
        time.sleep(0.005)
    return json.loads(file.read_text())
