"""What a micro-batch of a draft model takes, and that it teaches the same however few rows are looked at together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specactor.config import DraftTrainingConfig
from specactor.planning import memory
from specactor.planning.model_shapes import TransformerShape
from specactor.recipes import load
from specactor.trainer.drafter import init, losses
from specactor.trainer.drafter.buffer import TopK
from specactor.trainer.drafter.head import the_transformers
from specactor.trainer.drafter.train import DrafterTrainer
from tests.lib.live_bytes import LiveBytes
from tests.trainer.drafter import cases
from tests.trainer.drafter.policy_cases import LAYERS, SEQUENCES, TOP_K, head_model, learned
from tests.trainer.drafter.train_cases import learn, trainer

TOKENS, PART = 256, 2**14
SHAPE = TransformerShape(
    name="draft", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=2048, tied=False
)


def model() -> Any:
    config = the_transformers().Qwen3Config(
        vocab_size=SHAPE.vocab,
        hidden_size=SHAPE.hidden,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        intermediate_size=SHAPE.intermediate,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = the_transformers().Qwen3ForCausalLM(config).float()
    init.fill_buffers(made)
    return made


def batch() -> losses.Batch:
    """One response of nearly all tokens that are given to a micro-batch, of whose policy the top-k is known."""
    rng = np.random.default_rng(0)
    example = cases.example(rng, longest=2)
    top_k = TopK(
        tokens=np.tile(np.arange(8, dtype=np.int32), (TOKENS - 1, 1)),
        logprobs=np.full((TOKENS - 1, 8), -3.0, np.float16),
    )
    tokens = rng.integers(0, SHAPE.vocab, TOKENS).astype(np.int32)
    return losses.build([replace(example, token_ids=tokens, prompt_len=1, top_k=top_k)], torch.device("cpu"))


def most_bytes(made: DrafterTrainer) -> int:
    """Of a micro-batch, and the gradient of the output projection, which is there at once."""
    given, live = batch(), LiveBytes()
    with live:
        loss, _ = made._loss(given)
        made._updater.backward(loss, last=True)
        del loss
    return live.peak


def made_with(model: Any) -> DrafterTrainer:
    return DrafterTrainer(cases.config(tokens_per_microbatch=TOKENS), model, seed=0)


def test_a_micro_batch_takes_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong ones: attention that keeps pairs of tokens, as PyTorch's on GPUs does in float32 for grouped heads; a loss
    that holds all rows in every form."""
    monkeypatch.setattr(losses, "PART_LOGITS", PART)
    monkeypatch.setattr(memory, "PART_LOGITS", PART)
    settings = DraftTrainingConfig(tokens_per_microbatch=TOKENS)
    predicted = memory._draft_microbatch(replace(load(["qwen3_8b"]), distillation=settings), SHAPE)
    fused, eager = model(), model()
    init.use_fused_attention(fused)
    predicted += fused.lm_head.weight.nbytes
    # what is left out, single numbers per token and head, is more in a small model
    assert 0.95 * predicted < most_bytes(made_with(fused)) < 1.06 * predicted
    eager.set_attn_implementation("eager")
    assert most_bytes(made_with(eager)) > 1.3 * predicted
    monkeypatch.setattr(losses, "PART_LOGITS", 2**30)
    assert most_bytes(made_with(fused)) > 1.3 * predicted


def test_fused_attention_is_the_models_own() -> None:
    own, fused, tokens = model(), model(), batch().tokens_BT
    init.use_fused_attention(fused)
    torch.testing.assert_close(fused(input_ids=tokens).logits, own(input_ids=tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
def test_parts_teach_what_the_whole_does(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit."""

    def of_model() -> list[Any]:
        made = trainer()
        stats = learn(made)
        return [stats.losses, stats.overlap, stats.grad_norm, *(w.tolist() for _, w in made.named_weights())]

    rng = np.random.default_rng(0)
    known, states = list[TopK | None](), list[torch.Tensor | None]()
    for sequence in SEQUENCES:
        count = len(sequence.token_ids)
        tokens = np.stack([rng.permutation(cases.VOCAB)[:TOP_K] for _ in range(count - sequence.prompt_len)])
        logprobs = np.log(rng.dirichlet(np.ones(TOP_K + 1), len(tokens)))[:, :TOP_K]
        known.append(TopK(tokens=tokens.astype(np.int32), logprobs=logprobs.astype(np.float16)))
        states.append(torch.from_numpy(rng.standard_normal((count, 32 * len(LAYERS)), np.float32)))

    def of_head() -> Sequence[tuple[float, ...]]:
        return learned(head_model(), known, states)

    whole = of_model(), of_head()
    monkeypatch.setattr(losses, "PART_LOGITS", rows * cases.VOCAB)
    assert (of_model(), of_head()) == whole
    monkeypatch.setattr(losses.Batch, "rows", first_rows)
    assert of_model() != whole[0]
    assert of_head() != whole[1]


def first_rows(self: losses.Batch, part: slice) -> losses.Batch:
    """A wrong part."""
    count = len(self.targets_N[part])
    return replace(self, **{name: value[:count] for name, value in vars(self).items() if "_N" in name})
