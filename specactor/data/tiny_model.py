"""A Qwen3-MoE model with random weights. Equal shapes and seeds give equal bytes; the process's random state stays."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from specactor.config import TinyModelConfig
from specactor.errors import ConfigError


def make_tiny_model(tiny: TinyModelConfig, seed: int, folder: Path) -> None:
    """Write a folder, whole or not at all. Raises ConfigError when it exists."""
    if folder.exists():
        raise ConfigError.at("folder", str(folder), "a path that does not exist", "Choose another, or remove it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        unfinished.chmod(0o755)
        _write(tiny, seed, unfinished)
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(tiny: TinyModelConfig, seed: int, folder: Path) -> None:
    import torch

    from specactor.cpu import torchvision_ops

    if torch.version.cuda is None:
        torchvision_ops.install()
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    from specactor.data.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, make_char_tokenizer

    logging.disable_progress_bar()
    token_ids = {f"{name}_token_id": SPECIAL_TOKENS.index(f"<{name}>") for name in ("pad", "bos", "eos")}
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.expert_size * tiny.experts_per_token,
        moe_intermediate_size=tiny.expert_size,
        num_hidden_layers=tiny.num_layers,
        num_attention_heads=tiny.num_heads,
        num_key_value_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        num_experts=tiny.num_experts,
        num_experts_per_tok=tiny.experts_per_token,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        decoder_sparse_step=1,
        max_position_embeddings=tiny.max_position,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        dtype="float32",
        **token_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(**token_ids)
    model.save_pretrained(str(folder))
    make_char_tokenizer(folder)
