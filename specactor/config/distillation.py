"""The section `distillation` of a recipe: how the draft model is kept fresh. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specactor.config.rules import require


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Distillation of the draft model on what the policy has just produced. It changes speed, never tokens."""

    refresh: Literal["off", "every_step"] = "off"
    """When the draft model learns: never, or after every RL step."""
    max_time_share: float = 0.03
    """Longest refresh, as a share of the last RL step's time. Above 1, or inf, where max_updates alone bounds it."""
    max_updates: int = 0
    """Optimizer updates of one refresh at most; 0: as many as fit its time. With a number that always fits (say with
    max_time_share inf), the draft model's weights are reproducible."""

    top_k: int = 16
    """Most probable tokens of the policy whose log-probabilities are learned from; 0: learn from its samples alone."""
    buffer_tokens: int = 262_144
    """Tokens of prompts and responses that are kept to learn from."""
    half_life_steps: float = 2.0
    """Policy versions after which a response is drawn half as often."""

    tokens_per_update: int = 8192
    """Of an optimizer update, all ranks together."""
    tokens_per_microbatch: int = 4096
    """With padding, on one rank. Of a longer sequence the first are learned from."""
    learning_rate: float = 1e-3
    """Of AdamW, after the warm-up."""
    warmup_updates: int = 20
    """Updates over which the learning rate rises, once in a run."""

    keep_rollouts: bool = False
    """Write the responses of every RL step to the run's folder, for specactor drafter train. Works with refresh off."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """0: PyTorch's DistributedDataParallel; else DeepSpeed ZeRO of that stage."""
    offload: bool = False
    """Keep ZeRO's optimizer state in host memory."""

    def __post_init__(self) -> None:
        for name in ("buffer_tokens", "half_life_steps", "tokens_per_update", "tokens_per_microbatch", "learning_rate"):
            self._check(name, getattr(self, name) > 0, "> 0")
        for name in ("max_updates", "top_k", "warmup_updates"):
            self._check(name, getattr(self, name) >= 0, ">= 0")
        self._check("max_time_share", self.max_time_share > 0, "> 0", 'Use refresh="off" to spend none.')
        self._check(
            "max_time_share",
            self.max_time_share <= 1 or self.max_updates > 0,
            "<= 1 with max_updates 0",
            "Set max_updates, which bounds a refresh then.",
        )
        self._check("offload", not self.offload or self.zero_stage > 0, "False without ZeRO", "Set zero_stage to 1-3.")

    def _check(self, name: str, right: bool, expected: str, remedy: str = "See --help for its meaning.") -> None:
        require(right, f"distillation.{name}", getattr(self, name), expected, remedy)
