"""What the policy tests train on: the same sequences and settings for transformers and for every layout."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from specactor.config import (
    AlgorithmConfig,
    Config,
    CorrectionConfig,
    CriticConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from specactor.types import TrainSequence

VOCAB = 96
LEARNING_RATE = 2e-3
TEMPERATURE = 0.8
MAX_GAP = 0.5  # nats
NUM_SEQUENCES = 12
REPLACED = (1, 4, 7)
"""Sequences that get another last token than the policy sampled; a token before it would change those that follow."""
ADAM_EPS = 1e-4
"""A rounding error of a tiny gradient must not decide a step of full size."""


def sequences(seed: int = 0) -> list[TrainSequence]:
    """Of 3 groups; lengths 9 to 40, so that nothing divides evenly; engine log-probabilities are made up."""
    rng = random.Random(seed)
    made = []
    for i in range(NUM_SEQUENCES):
        prompt, response = rng.randint(2, 10), rng.randint(7, 30)
        made.append(
            TrainSequence(
                token_ids=tuple(rng.randrange(3, VOCAB) for _ in range(prompt + response)),
                prompt_len=prompt,
                advantage=rng.uniform(-1, 1),
                rollout_logprobs=tuple(rng.uniform(-6, -3) for _ in range(response)),
                group_id=i // 4,
                reward=(7 * i % 5) / 4,
            )
        )
    return made


def with_another_last(sequence: TrainSequence) -> TrainSequence:
    *others, last = sequence.token_ids
    return replace(sequence, token_ids=(*others, (last + 1) % VOCAB))


def conversations(seed: int = 0) -> list[TrainSequence]:
    """The same sequences in turns of 1 to 6 tokens, between which 1 to 3 are not learned from."""
    rng, made = random.Random(seed), []
    for sequence in sequences(seed):
        mask: list[bool] = []
        while len(mask) < sequence.response_len:
            mask += [True] * rng.randint(1, 6) + [False] * rng.randint(1, 3)
        made.append(replace(sequence, loss_mask=tuple(mask[: sequence.response_len])))
    return made


@dataclass(frozen=True)
class Case:
    """One way to learn; `rate` 0 leaves the weights as they are."""

    algorithm: AlgorithmConfig
    updates: int
    rate: float


TIS = CorrectionConfig(bounds=(0.0, 1.5))
GEOMETRIC = CorrectionConfig(level="geometric", action="mask", bounds=(0.6, 1.5))
"""Of the 12 sequences, with ratios of 0.36 to 1, it masks four."""
OFF = CorrectionConfig(level="off")
CASES = {
    "grpo": Case(AlgorithmConfig(aggregation="sequence_mean"), 1, 0.0),
    "dapo": Case(
        AlgorithmConfig(aggregation="token_mean", clip_high=0.28, correction=TIS),
        1,
        0.0,
    ),
    "gspo_sequence_mean": Case(
        AlgorithmConfig(loss="gspo", aggregation="sequence_mean", clip_low=0.002, clip_high=0.002, correction=OFF),
        3,
        LEARNING_RATE,
    ),
    "gspo_token_mean": Case(
        AlgorithmConfig(loss="gspo", aggregation="token_mean", clip_low=0.1, clip_high=0.1, correction=OFF),
        3,
        LEARNING_RATE,
    ),
    "masked_sequences": Case(AlgorithmConfig(aggregation="sequence_mean", correction=GEOMETRIC), 1, 0.0),
    "grpo_updates": Case(AlgorithmConfig(aggregation="sequence_mean", clip_low=0.02, clip_high=0.02), 3, LEARNING_RATE),
}
"""A case with updates changes the weights, so each starts from the loaded model and a fresh optimizer."""
PPO = Case(
    AlgorithmConfig(
        advantage="gae",
        correction=OFF,
        critic=CriticConfig(learning_rate=LEARNING_RATE, gamma=0.99, gae_lambda=0.9, value_clip=0.05),
    ),
    3,
    LEARNING_RATE,
)
"""With a critic; two steps of it."""
TURNS = replace(PPO, algorithm=replace(PPO.algorithm, critic=replace(PPO.algorithm.critic, level="turn")))
"""The same over turns, with `conversations`."""


def config(model_dir: str, parallel: dict[str, Any], train: dict[str, Any] | None = None) -> Config:
    return Config(
        name="test",
        model=ModelConfig(path=model_dir, dtype="float32"),
        data=DataConfig(train="count_bits"),
        parallel=ParallelConfig(**parallel),
        rollout=RolloutConfig(temperature=TEMPERATURE, max_new_tokens=32, prompts_per_step=3, group_size=4),
        train=TrainConfig(
            **{
                "learning_rate": LEARNING_RATE,
                "tokens_per_microbatch": 128,
                "grad_clip": 0.5,
            }
            | (train or {})
        ),
    )


def with_case(base: Config, case: Case) -> Config:
    return replace(base, algorithm=case.algorithm, train=replace(base.train, updates_per_step=case.updates))
