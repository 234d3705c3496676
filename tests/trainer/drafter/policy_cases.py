"""What the policy and the draft model learn from in the test of laws from the policy's own passes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specactor.trainer.drafter.buffer import TopK, example_from
from specactor.trainer.drafter.head import Head, the_transformers
from specactor.trainer.drafter.head_training import HeadTrainer
from specactor.types import TrainSequence
from tests.trainer.drafter import cases
from tests.trainer.policy_cases import TEMPERATURE

TOP_K, UPDATES = 6, 3
LAYERS = [-1, 0, 1]
"""Of the policy, whose outputs are kept."""
ROOM = 120
"""Tokens whose states are kept: not those of all sequences."""


def draft_model() -> Any:
    return cases.model()


def head_model() -> Head:
    """A head of a policy of that width, which reads the last two of them."""
    config = the_transformers().LlamaConfig(
        vocab_size=cases.VOCAB,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        draft_vocab_size=30,
        target_hidden_size=32,
        eagle_config={"eagle_aux_hidden_state_layer_ids": LAYERS[1:]},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        head = Head(config, torch.empty(cases.VOCAB, 0))
    head.token_ids.copy_(torch.arange(9, 39))
    return head


def learned(
    head: Head, known: Sequence[TopK | None], states: Sequence[Tensor | None], group: Any = None
) -> list[tuple[float, ...]]:
    """Losses of updates, and the last update's kl, overlap and gradient norm."""
    trainer = HeadTrainer(cases.config(), head, seed=0, group=group)
    trainer.buffer.add(
        [
            example_from(s, top_k, version=0, temperature=TEMPERATURE, states=of_policy)
            for s, top_k, of_policy in zip(SEQUENCES, known, states, strict=True)
            if of_policy is not None
        ]
    )
    stats = trainer.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=UPDATES)
    return [stats.losses, (stats.kl, stats.overlap, stats.grad_norm)]


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
