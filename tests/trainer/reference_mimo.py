"""MiMo with an MTP layer in plain PyTorch, for tests to compare with: a sequence, nothing packed, padded or cached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

HEADS, KV_HEADS, THETA, EPS = 4, 2, 10000.0, 1e-6


@dataclass
class ReferenceMimo:
    """Tensors by their names in Hugging Face format."""

    weights: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> ReferenceMimo:
        return cls(load_file(folder / "model.safetensors"))

    def hidden(self, ids: list[int]) -> Tensor:
        """[T, H], after the last norm."""
        x = self.weights["model.embed_tokens.weight"][ids]
        layers = {name.split(".")[2] for name in self.weights if name.startswith("model.layers.")}
        for number in range(len(layers)):
            x = self._layer(f"model.layers.{number}", x)
        return self._norm("model.norm", x)

    def mtp(self, hidden: Tensor, following: list[int]) -> Tensor:
        """[T, H]. Args: hidden states at T tokens; the token after each."""
        own = "model.mtp_layers.0"
        embedded = self._norm(f"{own}.token_layernorm", self.weights["model.embed_tokens.weight"][following])
        joined = torch.cat([self._norm(f"{own}.hidden_layernorm", hidden), embedded], dim=1)
        x = self._layer(own, joined @ self.weights[f"{own}.input_proj.weight"].T)
        return self._norm(f"{own}.final_layernorm", x)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weights["lm_head.weight"].T

    def drafted(self, text: list[int], drafts: list[int]) -> list[Tensor]:
        """[V] each: the MTP layer's logits after a text, and after each of these draft tokens behind it."""
        states, found = self.hidden(text[:-1]), []
        following = text[1:]
        for draft in [*drafts, None]:
            out = self.mtp(states, following)
            found.append(self.logits(out[-1]))
            if draft is not None:
                states, following = torch.cat([states, out[-1:]]), [*following, draft]
        return found

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weights[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        y = x @ self.weights[f"{name}.weight"].T
        return y if bias is None else y + bias

    def _layer(self, name: str, x: Tensor) -> Tensor:
        x = x + self._attention(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", x))
        y = self._norm(f"{name}.post_attention_layernorm", x)
        gate, up = self._linear(f"{name}.mlp.gate_proj", y), self._linear(f"{name}.mlp.up_proj", y)
        return x + self._linear(f"{name}.mlp.down_proj", torch.nn.functional.silu(gate) * up)

    def _attention(self, name: str, x: Tensor) -> Tensor:
        count = len(x)
        q = _turned(self._linear(f"{name}.q_proj", x).view(count, HEADS, -1))
        k = _turned(self._linear(f"{name}.k_proj", x).view(count, KV_HEADS, -1))
        v = self._linear(f"{name}.v_proj", x).view(count, KV_HEADS, -1)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self._linear(f"{name}.o_proj", torch.einsum("hij,jhd->ihd", weights, v).reshape(count, -1))


def _turned(x: Tensor) -> Tensor:
    """Rotary embedding of [T, heads, D]."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)
