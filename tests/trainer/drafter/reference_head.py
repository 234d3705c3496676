"""An EAGLE-3 head made of transformers' Llama parts, one token at a time, from a folder in the published format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specactor.trainer.drafter.head import the_transformers


class ReferenceHead:
    """Reads a folder by itself. `target` is a causal model of transformers."""

    def __init__(self, folder: Path, target: Any) -> None:
        llama = the_transformers().models.llama.modeling_llama
        self.llama, self.target = llama, target
        self.config = the_transformers().LlamaConfig.from_pretrained(str(folder))
        self.weights = load_file(folder / "model.safetensors")
        self.rotary = llama.LlamaRotaryEmbedding(self.config)
        self.mlp = llama.LlamaMLP(self.config)
        self.mlp.load_state_dict(self._under("midlayer.mlp."))
        own = self.weights.get("embed_tokens.weight")
        self.embedding = target.get_input_embeddings().weight if own is None else own
        ids = torch.arange(self.config.draft_vocab_size)
        self.token_ids = ids + self.weights["d2t"] if "d2t" in self.weights else ids

    def _under(self, start: str) -> dict[str, Tensor]:
        return {name.removeprefix(start): w for name, w in self.weights.items() if name.startswith(start)}

    def _norm(self, name: str, x: Tensor) -> Tensor:
        norm = self.llama.LlamaRMSNorm(len(x), eps=self.config.rms_norm_eps)
        norm.weight.copy_(self.weights[f"{name}.weight"])
        return norm(x[None])[0]  # type: ignore[no-any-return]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] @ x

    def states(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, F]: each token's hidden states of the target, after the layers that are read."""
        layers = self.config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        outputs = [self.target.model.embed_tokens(torch.tensor([tokens]))]
        hooks = [
            layer.register_forward_hook(lambda *out: outputs.append(out[-1])) for layer in self.target.model.layers
        ]
        self.target(input_ids=torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat([outputs[layer + 1][0] for layer in layers], dim=-1)

    @torch.no_grad()
    def drafted(self, tokens: Sequence[int], drafts: Sequence[int]) -> list[Tensor]:
        """[V] logits of the token after the text, and after each draft token; -inf where the head knows no token."""
        keys: list[tuple[Tensor, Tensor]] = []
        states = self.states(tokens)
        hidden = torch.empty(0)
        for i, token in enumerate(tokens[1:]):
            hidden = self._pair(token, self.weights["fc.weight"] @ states[i], keys)
        made = [self._logits(hidden)]
        for token in drafts:
            hidden = self._pair(token, hidden, keys)
            made.append(self._logits(hidden))
        return made

    def _pair(self, token: int, hidden: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
        config, size = self.config, self.config.head_dim
        both = torch.cat(
            (
                self._norm("midlayer.input_layernorm", self.embedding[token]),
                self._norm("midlayer.hidden_norm", hidden),
            )
        )
        at = torch.tensor([[len(keys)]])
        cos, sin = self.rotary(both[None, None], at)
        query, key, value = (
            self._linear(f"midlayer.self_attn.{name}_proj", both).view(1, -1, 1, size) for name in "qkv"
        )
        query, key = self.llama.apply_rotary_pos_emb(query, key, cos, sin)
        keys.append((key, value))
        seen = [torch.cat(part, dim=2) for part in zip(*keys, strict=True)]
        attended = torch.nn.functional.scaled_dot_product_attention(query, *seen, enable_gqa=True)
        assert attended.shape == (1, config.num_attention_heads, 1, size)
        hidden = hidden + self._linear("midlayer.self_attn.o_proj", attended.flatten())
        return hidden + self.mlp(self._norm("midlayer.post_attention_layernorm", hidden))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = torch.full((self.config.vocab_size,), -torch.inf)
        logits[self.token_ids] = self._linear("lm_head", self._norm("norm", hidden))
        return logits
