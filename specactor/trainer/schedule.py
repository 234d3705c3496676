"""Learning rates. PURE: steps count from 0, and a rate follows from the step alone, so a resumed run continues it."""

from __future__ import annotations

import math
from typing import assert_never

from specactor.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Of RL step `step`, 0 <= step < train.steps (the minimum beyond).

    It rises linearly, reaching `learning_rate` in the last of the `warmup_steps`; it is `learning_rate` in the step
    after those; then it stays, or falls along a line or half a cosine towards `min_learning_rate`, which it would
    reach at step `train.steps`: no step is spent at a minimum of 0.
    """
    peak, low = train.learning_rate, train.min_learning_rate
    if step < train.warmup_steps:
        return peak * (step + 1) / train.warmup_steps
    progress = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
    match train.schedule:
        case "constant":
            return peak
        case "linear":
            return low + (peak - low) * (1 - progress)
        case "cosine":
            return low + (peak - low) * (1 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(train.schedule)


def linear_decay(step: int, steps: int, peak: float) -> float:
    """From `peak` in step 0 down a line to a tenth of it in step ``steps - 1``: a stage of the supervised warm-up."""
    return peak * (1 - 0.9 * min(1.0, step / max(1, steps - 1)))
