"""Writes a tiny Qwen3-MoE model with random weights, made by transformers alone: make_model.py FOLDER."""

import sys

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 96
EOS = 1


def main(folder: str) -> None:
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=EOS,
        pad_token_id=0,
        initializer_range=0.25,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
