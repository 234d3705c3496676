"""How models learn: the sections `warmup` and `train` of the policy, `distillation` of its draft model. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, assert_never

from specactor.config.rules import rules_of

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
    """Packed tokens of one forward pass on one rank."""
    optimizer_state: Literal["float32", "bfloat16", "host"] = "float32"
    """Where a bfloat16 model's Adam keeps its moments: in float32; rounded to bfloat16 after each update; or, with the
    main weights, in host memory, where it then computes (Megatron's CPU offload), on GPUs that cannot hold them."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation."""
    deterministic: bool = False
    """Equal bits in every repetition on GPUs: Megatron's and PyTorch's deterministic modes, which are slower."""
    routing_replay: Literal["off", "r2", "r3"] = "off"
    """Mixtures of experts. r3: the policy's passes take the experts that the engine chose for each token; r2: its
    updates take those of the pass before them that gave the old log-probabilities (with updates_per_step > 1)."""
    max_logprob_gap: float = 1e-4
    """Largest |engine - trainer| log-probability of a sampled token before the run stops. 1e-4 holds in float32, but
    for tokens of a mixture between whose experts rounding decides: without routing_replay r3 one in a hundred may be
    further apart."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "train")
        rule("steps", self.steps >= 0, ">= 0", "Use 0 to stop after the warm-up.")
        rule("learning_rate", self.learning_rate > 0, "> 0", "Use for example 1e-6.")
        rule("warmup_steps", self.warmup_steps >= 0, ">= 0", "Use 0 for none.")
        rule("updates_per_step", self.updates_per_step >= 1, ">= 1", "Use 1.")
        rule(
            "routing_replay",
            self.routing_replay != "r2" or self.updates_per_step > 1,
            "off or r3 with train.updates_per_step = 1",
            "No pass comes before the only update: its own experts are those of the old log-probabilities.",
        )
        rule("weight_decay", self.weight_decay >= 0, ">= 0", "Use 0 for none.")
        rule(
            "adam_betas", all(0 <= beta < 1 for beta in self.adam_betas), "in [0, 1) each", "Use for example 0.9 0.95."
        )
        rule("grad_clip", self.grad_clip > 0, "> 0", "Use for example 1.0.")
        rule("tokens_per_microbatch", self.tokens_per_microbatch >= 1, ">= 1", "It must hold the longest sequence.")
        rule("max_logprob_gap", self.max_logprob_gap > 0, "> 0", "Use inf for no bound.")


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the rate of RL step `step`, 0 <= step < train.steps (its end beyond). It follows from the step alone.

    It rises linearly, reaching `learning_rate` in the last of the `warmup_steps`; it is `learning_rate` in the step
    after those; then it stays, or falls along a line or half a cosine towards 0, which it would reach at step
    `train.steps`: no step is spent there.
    """
    peak = train.learning_rate
    if step < train.warmup_steps:
        return peak * (step + 1) / train.warmup_steps
    progress = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
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
    """Fall from `peak` in step 0 down a line to a tenth of it in step ``steps - 1``: a stage of the supervised
    warm-up."""
    return peak * (1 - 0.9 * min(1.0, step / max(1, steps - 1)))


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Distillation of the draft model on what the policy has just produced. It changes speed, never tokens."""

    refresh: float = 0.0
    """How long the draft model learns after an RL step, as a share of the step's time, for example 0.03; 0: it does not
    learn. Above 1, or inf, where max_updates alone bounds it."""
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
        rule(
            "refresh",
            0 <= self.refresh <= 1 or (self.refresh > 1 and self.max_updates > 0),
            "a share from 0 to 1, or more with max_updates",
            "Use for example 0.03, or 0 for none.",
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
