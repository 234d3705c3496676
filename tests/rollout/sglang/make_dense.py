"""Writes a small dense Qwen3 model with random weights, by transformers alone: make_dense.py FOLDER [FIELD=VALUE]."""

import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

FIELDS = {
    "seed": 11,
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}


def main(folder: str, *overrides: str) -> None:
    fields = FIELDS | {name: int(value) for name, _, value in (text.partition("=") for text in overrides)}
    torch.manual_seed(fields.pop("seed"))
    config = Qwen3Config(
        **fields,
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.25,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
