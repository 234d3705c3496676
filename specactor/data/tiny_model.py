"""A Qwen3-MoE model with random weights, made by a process of its own.

    python -m specactor.data.tiny_model SHAPE_AS_JSON SEED FOLDER

Equal shapes and seeds give equal bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec

from specactor.config import TinyModelConfig
from specactor.errors import ConfigError

TIMEOUT_S = 300.0  # longest wait for the process that writes the model; it takes about 10 s, most of it imports


def make_tiny_model(tiny: TinyModelConfig, seed: int, folder: Path) -> None:
    """Write a folder, whole or not at all. Raises ConfigError when it exists, or cannot be made."""
    if folder.exists():
        raise ConfigError.at("folder", str(folder), "a path that does not exist", "Choose another, or remove it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        unfinished.chmod(0o755)
        _write_in_clean_process(tiny, seed, unfinished)
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_in_clean_process(tiny: TinyModelConfig, seed: int, folder: Path) -> None:
    shape = msgspec.json.encode(replace(tiny)).decode()
    command = [sys.executable, "-m", "specactor.data.tiny_model", shape, str(seed), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"model.path: making the model took more than {TIMEOUT_S:.0f} s. Free the machine."
        ) from error
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2].strip()
        raise ConfigError(f"model.path: got {shape}, expected a shape that transformers accepts. It says: {reason}")


def write_model(tiny: TinyModelConfig, seed: int, folder: Path) -> None:
    """Fill an existing folder, in a process without patches to torch's computing."""
    import torch

    from specactor.cpu import torchvision_ops

    if torch.version.cuda is None:
        torchvision_ops.install()
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from specactor.data.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, make_char_tokenizer

    torch.set_num_threads(1)
    torch.manual_seed(seed)
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
    model = Qwen3MoeForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(**token_ids)
    model.save_pretrained(str(folder))
    make_char_tokenizer(folder)


if __name__ == "__main__":
    write_model(msgspec.json.decode(sys.argv[1], type=TinyModelConfig), int(sys.argv[2]), Path(sys.argv[3]))
