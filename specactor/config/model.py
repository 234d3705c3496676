"""The section `model` of a recipe: the policy, read from a folder or made on the spot. PURE."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from specactor.config.rules import require


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    """Shape of a Qwen3-MoE model that is made on the spot, with random weights."""

    num_layers: int = 4
    """Transformer layers; every one is a mixture of experts."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Attention heads."""
    num_kv_heads: int = 2
    """Key-value heads; each is shared by num_heads / num_kv_heads attention heads."""
    head_dim: int = 32
    """Width of one head."""
    num_experts: int = 8
    """Experts per layer."""
    experts_per_token: int = 2
    """Experts that each token is routed to."""
    expert_size: int = 128
    """Width of one expert's hidden layer."""
    max_position: int = 512
    """Longest sequence in tokens."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            require(value >= 1, f"model.tiny.{item.name}", value, ">= 1", "Leave it out for the default.")
        require(
            1 <= self.experts_per_token <= self.num_experts,
            "model.tiny.experts_per_token",
            self.experts_per_token,
            f"1..{self.num_experts} (num_experts)",
            "Lower it, or raise model.tiny.num_experts.",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.tiny.num_heads",
            self.num_heads,
            f"a multiple of num_kv_heads = {self.num_kv_heads}",
            "Change one of the two.",
        )
        require(
            self.head_dim % 2 == 0, "model.tiny.head_dim", self.head_dim, "an even number", "Rotation works on pairs."
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy. Either a Hugging Face folder (``path``), or a tiny model made on the spot (``tiny``)."""

    path: str = ""
    """Folder with config.json, *.safetensors and a tokenizer, in Hugging Face format."""
    tiny: TinyModelConfig | None = None
    """Make this model instead of reading one."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the weights that compute; the optimizer keeps float32."""

    def __post_init__(self) -> None:
        require(
            bool(self.path) != (self.tiny is not None),
            "model.path",
            self.path,
            "exactly one of model.path and model.tiny",
            "Give the folder of a Hugging Face model with --model.path, or let the recipe make a tiny one.",
        )
