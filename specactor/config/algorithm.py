"""The section `algorithm` of a recipe: what is learned from the rewards. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specactor.config.rules import rules_of


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Learning from rewards. The formulas are in ``specactor.trainer.advantages`` and ``losses``."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    """What a response's reward is compared with: grpo: its group's mean, in units of the group's standard deviation;
    dr_grpo: the mean alone; rloo: the mean of the others; reinforce_pp: its group's mean, in units of the
    whole step's standard deviation."""
    loss: Literal["ppo_clip", "gspo", "cispo"] = "ppo_clip"
    """ppo_clip: per-token ratios (GRPO, DAPO); gspo: one ratio per sequence; cispo: clipped weight on log-probs."""
    aggregation: Literal["sequence_mean", "token_mean", "fixed_length"] = "token_mean"
    """sequence_mean: GRPO; token_mean: DAPO; fixed_length: Dr.GRPO (divide by rollout.max_new_tokens)."""
    clip_low: float = 0.2
    """Lower end of the clip range; see clip_high."""
    clip_high: float = 0.2
    """Ratios are clipped to [1 - clip_low, 1 + clip_high]; DAPO's clip-higher sets clip_high > clip_low."""
    kl: Literal["off", "k1", "k3"] = "off"
    """Penalty towards the model that the run started from."""
    kl_coef: float = 0.0
    """Weight of the penalty."""
    tis_cap: float | None = 2.0
    """Truncated importance sampling: cap of exp(trainer - engine) log-prob; None: off."""
    dynamic_sampling: bool = False
    """DAPO: leave out groups whose rewards are all equal, and draw further prompts in their place."""
    overlong_buffer: int = 0
    """DAPO: the reward falls linearly over the last this many tokens before max_new_tokens; 0: off."""
    overlong_penalty: float = 1.0
    """Reward lost at max_new_tokens when overlong_buffer > 0."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "algorithm")
        rule("clip_low", 0 < self.clip_low < 1, "in (0, 1)", "Use for example 0.2.")
        rule("clip_high", self.clip_high > 0, "> 0", "Use for example 0.2, or DAPO's 0.28.")
        rule("kl_coef", self.kl_coef >= 0, ">= 0", "Use 0 for no penalty.")
        rule(
            "kl_coef",
            (self.kl == "off") == (self.kl_coef == 0),
            f"{'0' if self.kl == 'off' else '> 0'} with algorithm.kl = {self.kl}",
            "Set both, or neither.",
        )
        rule(
            "tis_cap",
            self.tis_cap is None or self.tis_cap >= 1,
            ">= 1 or None",
            "Use None to switch truncated importance sampling off.",
        )
        rule("overlong_penalty", self.overlong_penalty >= 0, ">= 0", "It is subtracted from the reward.")
        rule("overlong_buffer", self.overlong_buffer >= 0, ">= 0", "Use 0 for off.")
