"""The section `distillation` of a recipe: how the draft model is kept fresh. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specactor.config.rules import require


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Distillation of the draft model on what the policy has just produced. It changes speed, never tokens."""

    refresh: Literal["off", "every_step", "auto"] = "off"
    """When the draft model learns: never, after every RL step, or when that is worth its time."""
    max_time_share: float = 0.03
    """Longest refresh, as a share of the last RL step's time. Above 1, or inf, where max_updates alone bounds it."""
    recovery_time_share: float = 0.0
    """The same while accept_length is more than a tenth below what it was, as after a jump of the policy. What it was
    is worth 2 % less with every rollout: a loss of a quarter counts for 10 rollouts, of a half for 29. 0: it makes no
    difference."""
    max_updates: int = 0
    """Optimizer updates of one refresh at most; 0: as many as fit its time. With a number that always fits (say with
    max_time_share inf), the draft model's weights are reproducible."""
    explore_every: int = 10
    """With auto: refresh after so many steps without one, to learn what it is worth now."""

    top_k: int = 16
    """Likeliest tokens of the policy that are kept per position; 0: learn from the samples alone."""
    storage: Literal["float16", "float32"] = "float16"
    """Of their log-probabilities."""
    buffer_tokens: int = 262_144
    """Tokens of prompts and responses that are kept to learn from."""
    half_life_steps: float = 2.0
    """Policy versions after which a response is drawn half as often."""

    sample_weight: float = 0.0
    """Of the cross entropy of the policy's samples; where no law is known, it has both weights."""
    law_weight: float = 1.0
    """Of the divergence KL(policy, draft) over the likeliest tokens."""
    position_emphasis: float = 0.0
    """0: every position of a response weighs the same; 1: as much as acceptance was lost there, by the last refresh."""
    reward_emphasis: float = 0.0
    """A response weighs exp(this * (its reward - mean reward))."""

    tokens_per_update: int = 8192
    """Of an optimizer update, all ranks together."""
    tokens_per_microbatch: int = 4096
    """With padding, on one rank. Of a longer sequence the first are learned from."""
    learning_rate: float = 1e-3
    """Of AdamW, after the warm-up."""
    warmup_updates: int = 20
    """Updates over which the learning rate rises, once in a run."""
    adam_betas: tuple[float, float] = (0.9, 0.98)
    """Decay of the running means of gradients and of their squares."""
    weight_decay: float = 0.0
    """Of AdamW, on all weights."""
    grad_clip: float = 1.0
    """Largest norm of a gradient."""

    idle: bool = False
    """Learn also on ranks whose engines have run dry while others still generate; they stop when the last one ends."""
    keep_rollouts: bool = False
    """Write the responses of every RL step to the run's folder, for specactor drafter train. Works with refresh off."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """0: PyTorch's DistributedDataParallel; else DeepSpeed ZeRO of that stage."""
    offload: bool = False
    """Keep ZeRO's optimizer state in host memory."""

    def __post_init__(self) -> None:
        positive = ("buffer_tokens", "half_life_steps", "tokens_per_update", "tokens_per_microbatch", "explore_every")
        for name in (*positive, "learning_rate", "grad_clip"):
            self._check(name, getattr(self, name) > 0, "> 0")
        for name in ("max_updates", "top_k", "sample_weight", "law_weight", "warmup_updates", "weight_decay"):
            self._check(name, getattr(self, name) >= 0, ">= 0")
        fine = all(0 <= beta < 1 for beta in self.adam_betas)
        self._check("adam_betas", fine, "in [0, 1) each", "Use for example 0.9 0.98.")
        self._check("max_time_share", self.max_time_share > 0, "> 0", 'Use refresh="off" to spend none.')
        self._check(
            "max_time_share",
            self.max_time_share <= 1 or (self.max_updates > 0 and self.refresh != "auto"),
            "<= 1 with max_updates 0 or refresh auto",
            "Set refresh every_step and max_updates, which bounds a refresh then.",
        )
        share, usual = self.recovery_time_share, self.max_time_share
        self._check(
            "recovery_time_share", share == 0 or usual <= share <= 1, f"0 or in {usual:g}..1, max_time_share..1"
        )
        self._check("position_emphasis", 0 <= self.position_emphasis <= 1, "in 0..1")
        self._check(
            "position_emphasis",
            not self.position_emphasis or self.top_k > 0,
            "0 with top_k 0",
            "Where acceptance is lost is seen from the policy's likeliest tokens.",
        )
        self._check(
            "refresh",
            self.refresh != "auto" or self.top_k > 0,
            "off or every_step with top_k 0",
            "What a refresh is worth is seen from the policy's likeliest tokens.",
        )
        self._check("law_weight", self.sample_weight + self.law_weight > 0, "> 0 where sample_weight is 0")
        self._check("idle", not self.idle or self.refresh != "off", "False with refresh off", "Set refresh.")
        self._check(
            "idle", not self.idle or not self.zero_stage, "False with ZeRO", "Under ZeRO all ranks learn together."
        )
        self._check("offload", not self.offload or self.zero_stage > 0, "False without ZeRO", "Set zero_stage to 1-3.")

    def _check(self, name: str, right: bool, expected: str, remedy: str = "See --help for its meaning.") -> None:
        require(right, f"distillation.{name}", getattr(self, name), expected, remedy)
