"""Writes a toy policy and an EAGLE-3 head that knows it: make_toy.py POLICY HEAD [SEED].

A token is a vector e of sixteen signs, the last of them +. Attention is hard: its keys are one constant vector, which
rotary embedding turns, and a query is the same vector turned by so many positions as it looks back. The policy's layer
0 writes e of the token before into block 1 of the residual, layer 1 that of the token before it into block 2, layer 2
its own token's into block 0; the next token's logits are a random linear function of blocks 0 to 2.

The head takes block 0 from the highest layer that it reads, block 2 from the middle one and block 1 from the lowest;
its heads look 0, 1, 2 and 3 tokens back, and turn the blocks at one token into those at the next:
    block 0 += e(0) - e(-1), block 1 += e(-1) - e(-2), block 2 += e(-2) - e(-3).
So it is right as far as numbers are exact, and wrong wherever states, keys or positions are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specactor.trainer.drafter.head import Eagle3Start, make_head, the_transformers
from specactor.trainer.drafter.init import write_model

VOCAB, HIDDEN, BLOCK, HEADS = 96, 64, 16, 4
THETA = 10000.0
SHARPNESS = 400.0  # largest score
SPREAD = 2.0  # of logits


def looking_back(tokens: int) -> Tensor:
    """[16] the direction of a query that sees the key so many positions before it; 0: of the keys."""
    rates = THETA ** (-torch.arange(3) / (BLOCK / 2))
    turned = torch.zeros(BLOCK)
    turned[:3], turned[8:11] = (rates * tokens).cos(), -(rates * tokens).sin()
    return turned / turned.norm()


def block(number: int) -> slice:
    return slice(number * BLOCK, (number + 1) * BLOCK)


@torch.no_grad()
def set_policy(model: Any) -> None:
    chance = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.zero_()
    signs = torch.randint(0, 2, (VOCAB, BLOCK), generator=chance) * 2.0 - 1
    signs[:, -1] = 1.0
    model.model.embed_tokens.weight[:, block(3)] = signs
    size = (SHARPNESS / 4) ** 0.5  # of normalised queries and keys, whose numbers have a mean square of 1
    for layer, (looks, into) in zip(model.model.layers, ((1, 1), (2, 2), (0, 0), (0, None)), strict=True):
        layer.input_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.fill_(1.0)
        attention = layer.self_attn
        attention.q_norm.weight.fill_(size)
        attention.k_norm.weight.fill_(size)
        attention.q_proj.weight[:BLOCK, -1] = looking_back(looks)
        attention.k_proj.weight[:BLOCK, -1] = looking_back(0)
        attention.v_proj.weight[:BLOCK, block(3)] = torch.eye(BLOCK)
        if into is not None:
            written = {1: 1, 2: 2, 0: 3}[into]  # blocks that are not empty: the input's norm
            attention.o_proj.weight[block(into), :BLOCK] = torch.eye(BLOCK) * (written / 4) ** 0.5
    model.model.norm.weight.fill_(1.0)
    model.lm_head.weight[:, : 3 * BLOCK] = torch.randn(VOCAB, 3 * BLOCK, generator=chance) * SPREAD / 48**0.5


@torch.no_grad()
def set_head(head: Any, model: Any) -> None:
    for parameter in head.parameters():
        if parameter.dim() == 2:
            parameter.zero_()
    for number, of in ((0, 2), (1, 0), (2, 1)):  # block, and the layer of those read that it is taken from
        head.fc.weight[block(number), of * HIDDEN :][:, block(number)] = torch.eye(BLOCK)
    attention = head.midlayer.self_attn
    size = (SHARPNESS * BLOCK**0.5) ** 0.5 / 2  # the normalised embedding has a 2 at its constant sign
    for n in range(HEADS):
        attention.q_proj.weight[block(n), HIDDEN - 1] = looking_back(n) * size
    for n in range(HEADS // 2):
        attention.k_proj.weight[block(n), HIDDEN - 1] = looking_back(0) * size
        attention.v_proj.weight[block(n), block(3)] = torch.eye(BLOCK) / 2
    for n in range(3):
        attention.o_proj.weight[block(n), block(n)] = torch.eye(BLOCK)
        attention.o_proj.weight[block(n), block(n + 1)] = -torch.eye(BLOCK)
    head.norm.weight.fill_(0.75**0.5)  # three blocks, and the policy has four
    head.lm_head.weight.copy_(model.lm_head.weight[head.token_ids])


def main(policy: str, folder: str) -> None:
    transformers = the_transformers()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=BLOCK,
        intermediate_size=32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.Qwen3ForCausalLM(config).float()
    set_policy(model)
    model.save_pretrained(policy)
    head = make_head(model, Eagle3Start())
    set_head(head, model)
    write_model(head, Path(folder), tokenizer=Path(policy))


if __name__ == "__main__":
    main(*sys.argv[1:])
