"""The sections `algorithm`, `warmup`, `train` and `distillation`. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal, assert_never

from specactor.config.rules import rules_of

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "gae")
LOSSES = ("ppo_clip", "gspo", "cispo")


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Importance sampling: weights of tokens that were sampled with other probabilities than the trainer's, since
    engines round and policies grow old. The formulas are in ``specactor.trainer.losses``."""

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
    """Of its own optimizer, the same in all steps; all else is as in train."""
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
    """sequence_mean: GRPO; token_mean: DAPO; fixed_length: Dr.GRPO (divide by rollout.max_new_tokens). All sequences of
    an agent's session are one response."""
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
    (DAPO); or module:function (group) -> bool of yours, which says what groups are learned from. A step draws four
    times rollout.prompts_per_step groups at most (rollout.oversample times, if that is more), and learns from those
    kept, if they are fewer."""
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


SEE_HELP = "See --help for its meaning."


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Supervised steps on worked solutions before reinforcement learning; what they make is kept in output_dir."""

    solver: str = ""
    """Import path ``module:function`` of a function (problem, rng, stage) -> response text, or (text, whether it is
    learned from) per part; empty: no warm-up."""
    steps: tuple[int, ...] = ()
    """Steps per stage; the solver is told the stage, so that styles can be mixed later."""
    learning_rates: tuple[float, ...] = ()
    """One per stage, decayed linearly to a tenth within the stage."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "warmup")
        rule(
            "learning_rates",
            len(self.steps) == len(self.learning_rates),
            f"one per stage ({len(self.steps)} in warmup.steps)",
            "Give both lists the same length.",
        )
        rule(
            "solver",
            not self.solver or (":" in self.solver and bool(self.steps)),
            "module:function, with at least one stage in warmup.steps",
            "Write the import path with a colon, or leave it empty to skip the warm-up.",
        )
        rule("steps", min(self.steps, default=1) >= 1, ">= 1 each", "Leave a stage out instead.")
        rule("learning_rates", min(self.learning_rates, default=1) > 0, "> 0 each", "Use for example 1e-3.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimisation of the policy."""

    steps: int = 50
    """RL steps of the whole run."""
    learning_rate: float = 1e-6
    """Highest learning rate."""
    warmup_steps: int = 0
    """RL steps over which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after its linear rise; linear and cosine fall to 0."""
    updates_per_step: int = 1
    """Optimizer updates per RL step; the step's groups are split among them."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's first and second moments."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    tokens_per_microbatch: int = 8192
    """Packed tokens of one forward pass on one rank; a sequence may have parallel.context times as many."""
    optimizer_state: Literal["float32", "bfloat16", "host"] = "float32"
    """Where a bfloat16 model's Adam keeps its moments: in float32; rounded to bfloat16 after each update; or, with the
    main weights, in host memory, where it then computes (Megatron's CPU offload), on GPUs that cannot hold them."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation."""
    deterministic: bool = False
    """Equal bits in every repetition on GPUs: Megatron's and PyTorch's deterministic modes, which are slower."""
    routing_replay: Literal["off", "r3"] = "off"
    """Mixtures of experts. r3: the policy's passes take the experts that the engine chose for each token."""
    max_logprob_gap: float | None = None
    """Largest |engine - trainer| log-probability of a sampled token before the run stops; None: 1e-4 in float32, inf in
    bfloat16, where none holds. Of a mixture, between whose experts rounding decides, one token in a hundred may be
    further apart without routing_replay r3."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "train")
        rule("steps", self.steps >= 0, ">= 0", "Use 0 to stop after the warm-up.")
        rule("learning_rate", self.learning_rate > 0, "> 0", "Use for example 1e-6.")
        rule("warmup_steps", self.warmup_steps >= 0, ">= 0", "Use 0 for none.")
        rule("updates_per_step", self.updates_per_step >= 1, ">= 1", "Use 1.")
        rule("weight_decay", self.weight_decay >= 0, ">= 0", "Use 0 for none.")
        rule(
            "adam_betas", all(0 <= beta < 1 for beta in self.adam_betas), "in [0, 1) each", "Use for example 0.9 0.95."
        )
        rule("grad_clip", self.grad_clip > 0, "> 0", "Use for example 1.0.")
        rule("tokens_per_microbatch", self.tokens_per_microbatch >= 1, ">= 1", "It must hold the longest sequence.")
        gap = self.max_logprob_gap
        rule("max_logprob_gap", gap is None or gap > 0, "> 0", "Use inf for no bound.")


def gap_bound(given: float | None, dtype: str) -> float:
    """Return the bound that holds where `train.max_logprob_gap` is `given` and `model.dtype` is `dtype`."""
    return given if given is not None else {"float32": 1e-4}.get(dtype, math.inf)


def learning_rate(step: int, train: TrainConfig, *, still: int = 0) -> float:
    """Return the rate of RL step `step`, 0 <= step < train.steps (its end beyond), which follows from the step alone.
    It is 0 in the first `still` steps, peaks in the last of the next `warmup_steps` and in the step after, then stays,
    or falls to 0, which step `train.steps` would have: no step is spent there."""
    peak = train.learning_rate
    if step < still:
        return 0.0
    rise = still + train.warmup_steps
    if step < rise:
        return peak * (step - still + 1) / train.warmup_steps
    progress = min(1.0, (step - rise) / max(1, train.steps - rise))
    match train.schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - progress)
        case "cosine":
            return peak * (1 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(train.schedule)


def linear_decay(step: int, steps: int, peak: float) -> float:
    """Fall along a line to a tenth of `peak` in step ``steps - 1``."""
    return peak * (1 - 0.9 * min(1.0, step / max(1, steps - 1)))


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Distillation of the draft model on what the policy has just produced. It changes speed, never tokens."""

    refresh: float = 0.0
    """How long the draft model learns after an RL step, as a share of the step's time, for example 0.03; 0: it does not
    learn. An update that has begun is finished, and taken off the next refreshes. Above 1, or inf, where max_updates
    alone bounds it."""
    max_updates: int = 0
    """Optimizer updates of one refresh at most; 0: as many as fit its time. With a number that always fits (say with
    refresh inf), the draft model's weights are reproducible."""
    tokens_per_update: int = 8192
    """Of an optimizer update, all ranks together."""
    learning_rate: float = 1e-3
    """Of AdamW, after the warm-up."""
    zero: Literal["off", "1", "2", "3", "1_offload", "2_offload", "3_offload"] = "off"
    """off: PyTorch's DistributedDataParallel; else DeepSpeed ZeRO of that stage, with _offload its optimizer's state
    in host memory."""

    @property
    def zero_stage(self) -> int:
        return 0 if self.zero == "off" else int(self.zero[0])

    @property
    def offload(self) -> bool:
        return self.zero.endswith("_offload")

    def __post_init__(self) -> None:
        rule = rules_of(self, "distillation")
        for name in ("tokens_per_update", "learning_rate"):
            rule(name, getattr(self, name) > 0, "> 0", SEE_HELP)
        rule("max_updates", self.max_updates >= 0, ">= 0", SEE_HELP)
        rule(
            "refresh",
            0 <= self.refresh <= 1 or (self.refresh > 1 and self.max_updates > 0),
            "a share from 0 to 1, or more with max_updates",
            "Use for example 0.03, or 0 for none.",
        )


HEAD_STEPS = 4  # drafted tokens that a head learns from at every position
PART_LOGITS = 2**25  # of which a draft model's losses are computed at once


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
