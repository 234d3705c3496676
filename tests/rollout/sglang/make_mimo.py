"""Writes a tiny MiMo policy with an MTP layer, by transformers' Qwen2 and hand: make_mimo.py FOLDER KIND [VOCAB]

KIND is random, toy, or untaught: the toy's policy, which heeds the last token most, with a random MTP layer.

The toy's MTP layer knows its policy. As in `make_toy` a token is a vector e of sixteen signs, and attention is hard:
all keys are one vector, which rotary embedding turns, and a query is the same, turned by as many positions as it looks
back.
The policy's last hidden states are, in blocks, e of a token, of the one before it, of the one before that, and e again;
the next token's logits are a random linear function of the first three. The MTP layer takes these three from the hidden
states at the token before, and e from its own; its heads look 0, 1, 2 and 3 tokens back, and turn the blocks at one
token into those at the next. So it is right as far as numbers are exact, and wrong where states, keys or positions are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specactor.data.tokenizer import VOCAB_SIZE, make_char_tokenizer
from specactor.trainer.drafter.head import the_transformers
from tests.rollout.sglang.make_toy import BLOCK, HEADS, HIDDEN, SHARPNESS, SPREAD, THETA, block, looking_back

SIZE = (SHARPNESS * BLOCK**0.5) ** 0.5
"""Of queries and keys."""
MTP = "model.mtp_layers.0"


@torch.no_grad()
def set_policy(model: Any) -> None:
    chance = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.zero_()
    signs = torch.randint(0, 2, (model.config.vocab_size, BLOCK), generator=chance) * 2.0 - 1
    model.model.embed_tokens.weight[:, block(3)] = signs
    for layer, (looks, into, written) in zip(model.model.layers, ((1, 1, 1), (2, 2, 2), (0, 0, 3)), strict=True):
        layer.input_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.fill_(1.0)
        attention = layer.self_attn
        attention.q_proj.bias[:BLOCK] = looking_back(looks) * SIZE
        attention.k_proj.bias[:BLOCK] = looking_back(0) * SIZE
        attention.v_proj.weight[:BLOCK, block(3)] = torch.eye(BLOCK)
        # so many blocks are not empty: the input's norm
        attention.o_proj.weight[block(into), :BLOCK] = torch.eye(BLOCK) * (written / 4) ** 0.5
    model.model.norm.weight.fill_(1.0)
    random = torch.randn(model.config.vocab_size, 3 * BLOCK, generator=chance)
    model.lm_head.weight[:, : 3 * BLOCK] = random * SPREAD / 48**0.5


def knowing(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the toy's MTP layer. Args: of a layer of the policy, for names and shapes."""
    made = {name: torch.zeros_like(tensor) for name, tensor in layer.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        made[f"{name}.weight"].fill_(1.0)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        made[f"{name}.weight"] = torch.ones(HIDDEN)
    joining = made["input_proj.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
    for n in range(3):
        joining[block(n), block(n)] = torch.eye(BLOCK)
    joining[block(3), HIDDEN:][:, block(3)] = torch.eye(BLOCK) / 2  # an embedding's other blocks are empty: its norm
    for n in range(HEADS):
        made["self_attn.q_proj.bias"][block(n)] = looking_back(n) * SIZE
    for n in range(HEADS // 2):
        made["self_attn.k_proj.bias"][block(n)] = looking_back(0) * SIZE
        made["self_attn.v_proj.weight"][block(n), block(3)] = torch.eye(BLOCK)
    for n in range(3):
        made["self_attn.o_proj.weight"][block(n), block(n)] = torch.eye(BLOCK)
        made["self_attn.o_proj.weight"][block(n), block(n + 1)] = -torch.eye(BLOCK)
    return made


def random(layer: dict[str, Tensor], size: float) -> dict[str, Tensor]:
    """Those of a random one."""
    made = {name: size * torch.randn_like(tensor) + ("norm" in name) for name, tensor in layer.items()}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        made[f"{name}.weight"] = 1 + size * torch.randn(HIDDEN)
    made["input_proj.weight"] = size * torch.randn(HIDDEN, 2 * HIDDEN)
    return made


def main(folder: str, kind: str, vocab: str = str(VOCAB_SIZE)) -> None:
    transformers = the_transformers()
    torch.manual_seed(7)
    config = transformers.Qwen2Config(
        vocab_size=int(vocab),
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        intermediate_size=96,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
        initializer_range=0.25 if kind == "random" else 0.02,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.Qwen2ForCausalLM(config).float()
    if kind != "random":
        set_policy(model)
        if kind == "untaught":
            model.lm_head.weight.data[:, block(0)] *= 2
            model.lm_head.weight.data[:, BLOCK:] *= 0.3
    else:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    make_char_tokenizer(Path(folder))
    weights = load_file(Path(folder, "model.safetensors"))
    first = "model.layers.0."
    layer = {name.removeprefix(first): weights[name] for name in weights if name.startswith(first)}
    own = knowing(layer) if kind == "toy" else random(layer, 0.2 if kind == "random" else 0.02)
    save_file(weights | {f"{MTP}.{name}": t for name, t in own.items()}, Path(folder, "model.safetensors"))
    file = Path(folder, "config.json")
    about = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    file.write_text(json.dumps(json.loads(file.read_text()) | about, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
