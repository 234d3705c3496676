"""One rank of a process group, a draft model and targets on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from specactor.cpu import torchvision_ops
from specactor.parallel.collective import Collective
from tests.trainer.drafter import cases
from tests.trainer.drafter.cases import VOCAB

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "initializer_range": 0.4,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def collective() -> Iterator[Collective]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Collective()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "model"
    cases.model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torchvision_ops.install()
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("targets")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = {
            "moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, tie_word_embeddings=False)),
            "dense": Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)),
            "tied": Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
        }
    for name, model in models.items():
        model.float().save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("stands for a tokenizer's file\n")
    return {name: folder / name for name in models}
