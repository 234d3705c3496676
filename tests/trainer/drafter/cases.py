"""Examples and a small draft model for the tests of distillation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from specactor.config import DraftTrainingConfig
from specactor.trainer.drafter.buffer import RolloutLine, TopK, TrainingExample
from specactor.trainer.drafter.head import the_transformers

VOCAB = 48
CONFIG = DraftTrainingConfig(
    tokens_per_update=120,
    tokens_per_microbatch=48,
    learning_rate=3e-3,
    warmup_updates=2,
    top_k=8,
)


def config(**changes: Any) -> DraftTrainingConfig:
    return replace(CONFIG, **changes)


def example(rng: np.random.Generator, *, version: int = 0, top_k: int = 8, longest: int = 24) -> TrainingExample:
    """Random tokens; the policy is a softmax of random numbers, to which the sampled token does not matter."""
    prompt, response = int(rng.integers(1, 9)), int(rng.integers(1, longest))
    known = None
    if top_k:
        logits = 2 * rng.standard_normal((response, VOCAB))
        logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        order = np.argsort(-logp, axis=1)[:, :top_k]
        known = TopK(tokens=order.astype(np.int32), logprobs=np.take_along_axis(logp, order, 1).astype(np.float16))
    return TrainingExample(
        token_ids=rng.integers(0, VOCAB, prompt + response).astype(np.int32),
        prompt_len=prompt,
        version=version,
        temperature=0.8,
        top_k=known,
    )


def examples(count: int = 20, seed: int = 0, *, without_top_k_every: int = 5) -> list[TrainingExample]:
    rng = np.random.default_rng(seed)
    return [example(rng, version=i // 5, top_k=0 if i % without_top_k_every == 0 else 8) for i in range(count)]


def model(seed: int = 0) -> Any:
    """A dense Qwen3 of one layer, in float32; the process's random state is left alone."""
    transformers = the_transformers()
    shape = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.Qwen3ForCausalLM(shape).float()


def write_rollouts(file: Path, lines: Iterable[RolloutLine]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as stream:
        for line in lines:
            stream.write(msgspec.json.encode(line) + b"\n")
