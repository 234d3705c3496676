"""The section `algorithm` of a recipe: what is learned from the rewards. PURE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specactor.config.rules import rules_of

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "gae")
LOSSES = ("ppo_clip", "gspo", "cispo")


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """It says what tokens weigh whose probability was another where they were sampled: engines round, policies grow
    old. The formulas are in ``specactor.trainer.losses``."""

    level: Literal["off", "token", "sequence", "geometric"] = "token"
    """What has a ratio exp(trainer - sampled) of probabilities: token: each for itself; sequence: the product over its
    response; geometric: the mean of that; off: all tokens weigh 1."""
    action: Literal["truncate", "mask", "reject"] = "truncate"
    """truncate: weigh by the ratio within bounds (TIS); mask: by the ratio, 0 outside (with level token: IcePop);
    reject: weigh 1, but 0 all tokens of a response that has a ratio outside."""
    bounds: tuple[float, float] = (0.0, 2.0)
    """Lowest and highest ratio."""

    def __post_init__(self) -> None:
        low, high = self.bounds
        rules_of(self, "algorithm.correction")(
            "bounds",
            0 <= low <= 1 <= high and low < high,
            "0 <= lowest <= 1 <= highest, not both 1",
            "A ratio of 1 is agreement: use for example 0 2, or 0.5 2.",
        )


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The model that expects rewards, with algorithm.advantage = gae: of the policy's shape, on its devices."""

    learning_rate: float = 1e-5
    """Of its own optimizer; all else is as in train."""
    warmup_steps: int = 0
    """RL steps in which it learns alone, before the policy does."""
    level: Literal["token", "turn"] = "token"
    """What a step of gamma and lambda is: a token, or a turn of a conversation, whose tokens share one advantage."""
    gamma: float = 1.0
    """Worth of what is earned a step later."""
    gae_lambda: float = 1.0
    """Weight of what follows against what the critic expects: 1: the reward itself; 0: the next step's value."""
    value_clip: float | None = 0.2
    """Farthest that a value learns to move in a step; None: as far as it will."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "algorithm.critic")
        rule("learning_rate", self.learning_rate > 0, "> 0", "Use for example 1e-5.")
        rule("warmup_steps", self.warmup_steps >= 0, ">= 0", "Use 0 for none.")
        rule("gamma", 0 < self.gamma <= 1, "in (0, 1]", "Use 1 where only the reward counts.")
        rule("gae_lambda", 0 <= self.gae_lambda <= 1, "in [0, 1]", "Use for example 1 or 0.95.")
        rule("value_clip", self.value_clip is None or self.value_clip > 0, "> 0 or None", "Use None to switch it off.")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Learning from rewards. The formulas are in ``specactor.trainer.advantages`` and ``losses``."""

    advantage: str = "grpo"
    """grpo, dr_grpo, rloo, reinforce_pp, gae, or module:function (rewards by group) -> advantages of yours.
    What a response's reward is compared with: gae: what a critic expected before each token (PPO);
    grpo: its group's mean, in units of the group's standard deviation;
    dr_grpo: the mean alone; rloo: the mean of the others; reinforce_pp: its group's mean, in units of the
    whole step's standard deviation."""
    loss: str = "ppo_clip"
    """ppo_clip, gspo, cispo, or module:function (logprobs_T, old_logprobs_T, advantages_T) -> loss_T of yours.
    ppo_clip: per-token ratios (GRPO, DAPO); gspo: one ratio per sequence; cispo: clipped weight on log-probs."""
    aggregation: Literal["sequence_mean", "token_mean", "fixed_length"] = "token_mean"
    """sequence_mean: GRPO; token_mean: DAPO; fixed_length: Dr.GRPO (divide by rollout.max_new_tokens)."""
    clip_low: float = 0.2
    """Lower end of the clip range; see clip_high."""
    clip_high: float = 0.2
    """Ratios are clipped to [1 - clip_low, 1 + clip_high]; DAPO's clip-higher sets clip_high > clip_low."""
    kl_coef: float = 0.0
    """Weight of a KL penalty towards the model that the run started from (k3, as GRPO has it); 0: none."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    dynamic_sampling: str = "off"
    """off; unequal: leave out groups whose rewards are all equal, and draw further prompts in their place, at once
    (DAPO); or module:function (group) -> bool of yours, which says what groups are learned from."""
    overlong_buffer: int = 0
    """DAPO: the reward falls linearly over the last this many tokens before max_new_tokens, by 1; 0: off."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "algorithm")
        for name, known in (("advantage", ADVANTAGES), ("loss", LOSSES), ("dynamic_sampling", ("off", "unequal"))):
            ok = getattr(self, name) in known or ":" in getattr(self, name)
            rule(name, ok, f"one of {', '.join(known)}, or module:function", "See --help for each.")
        rule("clip_low", 0 < self.clip_low < 1, "in (0, 1)", "Use for example 0.2.")
        rule("clip_high", self.clip_high > 0, "> 0", "Use for example 0.2, or DAPO's 0.28.")
        rule("kl_coef", self.kl_coef >= 0, ">= 0", "Use 0 for no penalty.")
        rule("overlong_buffer", self.overlong_buffer >= 0, ">= 0", "Use 0 for off.")
