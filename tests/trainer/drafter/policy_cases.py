"""What the policy and the draft model learn from in the test of laws from the policy's own passes."""

from __future__ import annotations

import random
from typing import Any

from specactor.types import TrainSequence
from tests.trainer.drafter import cases

TOP_K, UPDATES = 6, 3


def draft_model() -> Any:
    return cases.model()


def _sequences() -> list[TrainSequence]:
    """Of 3 groups, in odd lengths."""
    rng = random.Random(0)
    made = []
    for i in range(12):
        prompt, response = rng.randint(2, 9), rng.randint(3, 20)
        made.append(
            TrainSequence(
                token_ids=tuple(rng.randrange(3, cases.VOCAB) for _ in range(prompt + response)),
                prompt_len=prompt,
                advantage=rng.uniform(-1, 1),
                rollout_logprobs=tuple(rng.uniform(-6, -3) for _ in range(response)),
                group_id=i // 4,
            )
        )
    return made


SEQUENCES = _sequences()
