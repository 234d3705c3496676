"""The section `model` of a recipe: the policy, read from a folder or made on the spot. PURE."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from specactor.config.rules import rules_of


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    """Shape of a Qwen3-MoE model that is made on the spot, with random weights."""

    num_layers: int = 4
    """Transformer layers; every one is a mixture of experts."""
    hidden_size: int = 128
    """Width of the residual stream, which attention heads divide among them; two share a key-value head."""
    num_experts: int = 8
    """Experts per layer."""
    expert_size: int = 128
    """Width of one expert's hidden layer."""
    head_dim: ClassVar[int] = 32
    experts_per_token: ClassVar[int] = 2
    max_position: ClassVar[int] = 512
    """Longest sequence in tokens."""

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return max(1, self.num_heads // 2)

    def __post_init__(self) -> None:
        rule = rules_of(self, "model.tiny")
        for item in fields(self):
            rule(item.name, getattr(self, item.name) >= 1, ">= 1", "Leave it out for the default.")
        rule(
            "num_experts",
            self.num_experts >= self.experts_per_token,
            f">= {self.experts_per_token}",
            "So many experts compute each token.",
        )
        rule(
            "hidden_size",
            self.hidden_size == self.head_dim or self.hidden_size % (2 * self.head_dim) == 0,
            f"{self.head_dim}, or a multiple of {2 * self.head_dim}",
            f"Heads are {self.head_dim} wide, and two share a key-value head.",
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
        rule = rules_of(self, "model")
        rule(
            "path",
            bool(self.path) != (self.tiny is not None),
            "exactly one of model.path and model.tiny",
            "Give the folder of a Hugging Face model with --model.path, or let the recipe make a tiny one.",
        )
