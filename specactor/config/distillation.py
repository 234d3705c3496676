"""The section `distillation` of a recipe: how the draft model is kept fresh. PURE."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from specactor.config.rules import rules_of

SEE_HELP = "See --help for its meaning."


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
    tokens_per_update: int = 8192
    """Of an optimizer update, all ranks together."""
    learning_rate: float = 1e-3
    """Of AdamW, after the warm-up."""
    keep_rollouts: bool = False
    """Write the responses of every RL step to the run's folder, for specactor drafter train. Works with refresh off."""
    zero: Literal["off", "1", "2", "3", "1_offload", "2_offload", "3_offload"] = "off"
    """off: PyTorch's DistributedDataParallel; else DeepSpeed ZeRO of that stage, with _offload its optimizer's state
    in host memory."""

    @property
    def zero_stage(self) -> int:
        """Return the ZeRO stage; 0 without ZeRO."""
        return 0 if self.zero == "off" else int(self.zero[0])

    @property
    def offload(self) -> bool:
        return self.zero.endswith("_offload")

    def __post_init__(self) -> None:
        rule = rules_of(self, "distillation")
        for name in ("tokens_per_update", "learning_rate"):
            rule(name, getattr(self, name) > 0, "> 0", SEE_HELP)
        rule("max_updates", self.max_updates >= 0, ">= 0", SEE_HELP)
        rule("max_time_share", self.max_time_share > 0, "> 0", 'Use refresh="off" to spend none.')
        rule(
            "max_time_share",
            self.max_time_share <= 1 or self.max_updates > 0,
            "<= 1 with max_updates 0",
            "Set max_updates, which bounds a refresh then.",
        )


@dataclass(frozen=True, kw_only=True)
class DraftTrainingConfig(DistillationConfig):
    """All that decides how a draft model learns. A run takes the defaults; ``specactor drafter train`` may choose."""

    top_k: int = 16
    """Most probable tokens of the policy whose log-probabilities are learned from; 0: learn from its samples alone."""
    buffer_tokens: int = 262_144
    """Tokens of prompts and responses that are kept to learn from."""
    half_life_steps: float = 2.0
    """Policy versions after which a response is drawn half as often."""
    tokens_per_microbatch: int = 4096
    """With padding, on one rank. Of a longer sequence the first are learned from."""
    warmup_updates: int = 20
    """Updates over which the learning rate rises, once in a run."""

    @classmethod
    def of(cls, config: DistillationConfig) -> DraftTrainingConfig:
        """Return how a run with these settings learns."""
        if isinstance(config, DraftTrainingConfig):
            return config
        return cls(**{item.name: getattr(config, item.name) for item in fields(config)})

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = rules_of(self, "distillation")
        for name in ("buffer_tokens", "half_life_steps", "tokens_per_microbatch"):
            rule(name, getattr(self, name) > 0, "> 0", SEE_HELP)
        for name in ("top_k", "warmup_updates"):
            rule(name, getattr(self, name) >= 0, ">= 0", SEE_HELP)
