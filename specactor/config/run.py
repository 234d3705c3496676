"""A whole run: further sections, the tree, and rules across sections. PURE."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from specactor.config.data import EVAL_SEED, DataConfig, is_file
from specactor.config.rollout import RolloutConfig, WeightsSyncConfig
from specactor.config.rules import check_values, rules_of
from specactor.config.speculation import MADE_BY_WARM_UP
from specactor.config.train import AlgorithmConfig, DistillationConfig, TrainConfig, WarmupConfig


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Spread of the policy over the ranks of torchrun. Data parallelism takes what the others leave."""

    tensor: int = 1
    """Tensor parallelism of the dense part (TP); sequence parallelism is on whenever it is > 1."""
    pipeline: int = 1
    """Pipeline stages (PP)."""
    virtual_pipeline: int | None = None
    """Model chunks per pipeline stage (interleaved schedule)."""
    expert: int = 1
    """Expert parallelism (EP)."""
    expert_tensor: int = 1
    """Tensor parallelism inside one expert (ETP). With expert = 1 it must equal ``tensor``."""
    context: int = 1
    """Context parallelism (CP): one sequence over several ranks."""
    engines: int = 1
    """Rollout engines of the job, spread over its nodes."""
    engine_tensor: int = 1
    """Tensor parallelism of each engine."""
    drafters: int = 0
    """Drafter processes of each host, for mode decoupled, or decoupled among the drafters, of rollout.speculation. They
    are on the devices (without GPUs, cores) after those of its ranks, and then from the first one again.
    0: one sleeps beside each engine that has a device of its own; once that engine has no requests left, it drafts for
    the rank's other engines until the rollout ends, if that is predicted to pay. On GPUs it must fit beside the engine:
    set rollout.engine.max_total_tokens, which is also its room."""
    drafter_hosts: tuple[int, ...] = ()
    """Empty: each host has drafter processes, for its own engines. Else those that have them, by number (0 has rank 0,
    others follow in the order of ranks), for the engines of all hosts, by load. Then they listen on TCP where there are
    several hosts, and both ends prove CURVE keys that are made for the run."""

    timeout_s: ClassVar[float] = 1800.0
    """Longest wait in one collective: other ranks may read or write a large model. A rank that died is noticed at once,
    a host that fell silent after half a minute."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "parallel")
        for name in ("tensor", "pipeline", "expert", "expert_tensor", "context", "engines", "engine_tensor"):
            rule(name, getattr(self, name) >= 1, ">= 1", "Use 1 to switch this kind of parallelism off.")
        rule("drafters", self.drafters >= 0, ">= 0", "Use 0 for none.")
        rule(
            "drafter_hosts",
            len(set(self.drafter_hosts)) == len(self.drafter_hosts) and min(self.drafter_hosts, default=0) >= 0,
            "numbers of hosts from 0 on, every one once",
            "Leave it out to give each host drafters of its own.",
        )
        rule(
            "virtual_pipeline",
            self.virtual_pipeline is None or (self.virtual_pipeline >= 2 and self.pipeline >= 2),
            ">= 2, with parallel.pipeline >= 2",
            "Leave it out, or use pipeline parallelism.",
        )


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    """Shape of a Qwen3-MoE model with random weights."""

    num_layers: int = 4
    """Every one is a mixture of experts."""
    hidden_size: int = 128
    """Width of the residual stream, 32 or a multiple of 64: heads divide it, and two share a key-value head."""
    num_experts: int = 8
    expert_size: int = 128
    head_dim: int = 32
    """Of GPUs in bfloat16, SGLang's kernels know heads of 64, 128, 256 and 512."""
    experts_per_token: ClassVar[int] = 2
    max_position: ClassVar[int] = 512
    """Longest sequence in tokens."""

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return max(1, self.num_heads // 2)


TINY = re.compile(r"tiny(?::([1-9]\d*))?")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy."""

    path: str
    """Folder with config.json, *.safetensors and a tokenizer, in Hugging Face format; or tiny, or tiny:LAYERS: a small
    mixture of experts that is made on the spot, with random weights."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the weights that compute; the optimizer keeps float32."""

    @property
    def tiny(self) -> TinyModelConfig | None:
        found = TINY.fullmatch(self.path)
        return TinyModelConfig(num_layers=int(found[1] or TinyModelConfig.num_layers)) if found else None

    def __post_init__(self) -> None:
        rules_of(self, "model")("path", bool(self.path), "the folder of a model, or tiny", "Give it with --model.path.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Megatron distributed checkpoints of the whole training state."""

    every: int = 10
    """Save after every this many RL steps, and after the last; 0: only after the last."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    export: bool = True
    """Write the final policy in Hugging Face format."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "checkpoint")
        rule("every", self.every >= 0, ">= 0", "Use 0 to save only at the end.")
        rule("keep", self.keep >= 1, ">= 1", "At least the newest must be kept.")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Accuracy on held-out problems, before and after RL."""

    problems: int = 256
    """Held-out problems per evaluation, of each set; of a file the first. 0: no evaluation."""
    samples: int = 1
    """Responses per problem; 1: one, greedily; more: sampled as in training, for avg@k and pass@k."""
    every: int = 0
    """Also evaluate after every this many RL steps; 0: only before and after."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "eval")
        rule("problems", self.problems >= 0, ">= 0", "Use 0 for no evaluation.")
        rule("every", self.every >= 0, ">= 0", "Use 0 for before and after only.")
        rule("samples", self.samples >= 1, ">= 1", "Use 1 for greedy responses.")
        rule(
            "every",
            self.every == 0 or self.problems > 0,
            f"0 with eval.problems {self.problems}",
            "Nothing would be evaluated: leave it out, or set eval.problems.",
        )


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Metrics go to ``metrics.jsonl``, and to wandb."""

    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    """auto: online where a key is configured, else offline. The project is that of WANDB_PROJECT, or specactor."""
    record: Literal["off", "sampled", "full"] = "sampled"
    """What is kept of every step for ``specactor replay`` and ``specactor diff``: digests of all samples and weights,
    and tokens and log-probabilities of one sample in 16 (sampled), of all (full), or nothing (off)."""
    trace: tuple[int, ...] = ()
    """RL steps, from 1, of which the run's folder gets a trace for ui.perfetto.dev: the trainer's phases, and the
    rounds of engines with speculation and of drafter processes."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "tracking")
        rule(
            "trace", all(step >= 1 for step in self.trace), "steps >= 1", "The first RL step is 1. Use () for no trace."
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    name: str
    """Of the run; its folder is ``output_dir/name``."""
    model: ModelConfig
    data: DataConfig
    seed: int = 0
    """Of everything random in the run."""
    output_dir: str = "runs"
    """Folder above the folders of all runs; in its folder .warm-up are the models that warm-ups made, by what went into
    them."""
    resume: str = "off"
    """off: refuse a folder that already holds a run; auto: continue from its newest checkpoint, if any; otherwise the
    path of a checkpoint to start from; a run that has started from it goes on from its own newest one."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    weights_sync: WeightsSyncConfig = field(default_factory=WeightsSyncConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def is_evaluated(self, step: int) -> bool:
        """Return whether an evaluation follows RL step `step`, from 1."""
        every = self.eval.every
        return self.eval.problems > 0 and (step == self.train.steps or (every > 0 and step % every == 0))

    @property
    def lends_devices(self) -> bool:
        """Return whether drafters sleep on engines' devices, and have none of their own."""
        return self.rollout.speculation.is_decoupled and self.parallel.drafters == 0

    @property
    def drafter_learns(self) -> bool:
        """Return whether refreshes are set, and something drafts with the first draft model, which alone learns."""
        drafting = self.rollout.speculation
        learning = {"model", "decoupled"} & {*drafting.draft_methods}
        return self.distillation.refresh > 0 and drafting.mode != "off" and bool(learning)

    def notes(self, *, gpu: bool) -> list[str]:
        """Return what settings do in silence, for a machine with or without GPUs."""
        drafting = self.rollout.speculation
        found = [
            f"The draft model {folder} is not used: no drafter in rollout.speculation.drafters names it."
            for folder in drafting.unused
        ]
        if unused := [*drafting.unused_settings]:
            unused += ["distillation.refresh"] if self.distillation.refresh else []
            found.append(f"With rollout.speculation.mode off these are unused: {', '.join(unused)}.")
        elif self.distillation.refresh and not self.drafter_learns:
            found.append("Nothing is refreshed: nothing drafts with the first draft model, which alone learns.")
        if gpu and self.rollout.stop and drafting.mode != "off":
            found.append(
                "With rollout.stop each round with drafts waits until the texts of the round before were looked at: "
                "they do not overlap."
            )
        return found

    def __post_init__(self) -> None:
        check_values(self)
        self._check_name_and_seed()
        self._check_groups()
        self._check_training()
        self._check_drafting()
        self._check_sizes()

    def _check_name_and_seed(self) -> None:
        rule = rules_of(self)
        rule(
            "name",
            self.name not in ("", ".", "..") and "/" not in self.name,
            "a folder name without '/', and not '.' or '..'",
            "Put the folder above it in --output-dir.",
        )
        rule("output_dir", bool(self.output_dir), "a folder", "Use . for the one where the run starts.")
        rule("seed", 0 <= self.seed < 2**31, "0..2**31-1", "Choose a non-negative seed.")

    def _check_groups(self) -> None:
        rule = rules_of(self)
        rule(
            "rollout.group_size",
            self.rollout.group_size >= 2 or self.algorithm.advantage == "gae",
            f">= 2 with algorithm.advantage = {self.algorithm.advantage}",
            "Advantages compare the responses of a group.",
        )
        rule(
            "rollout.group_size",
            self.rollout.group_size >= 2 or self.algorithm.dynamic_sampling == "off",
            ">= 2 with algorithm.dynamic_sampling",
            "Rewards of a group are compared, and of one they are all equal.",
        )
        rule(
            "train.updates_per_step",
            self.rollout.prompts_per_step % self.train.updates_per_step == 0,
            f"a divisor of rollout.prompts_per_step = {self.rollout.prompts_per_step}",
            "Groups are never split between updates.",
        )
        rule(
            "algorithm.overlong_buffer",
            self.algorithm.overlong_buffer < self.rollout.max_new_tokens,
            f"< rollout.max_new_tokens = {self.rollout.max_new_tokens}",
            "Shorten the buffer.",
        )
        context = self.parallel.context
        rule(
            "train.tokens_per_microbatch",
            self.train.tokens_per_microbatch * context > self.rollout.max_new_tokens,
            f"> rollout.max_new_tokens / parallel.context = {self.rollout.max_new_tokens} / {context}",
            "One micro-batch must hold the longest prompt and response: raise it, or parallel.context.",
        )
        rule(
            "rollout.partial",
            not (self.algorithm.dynamic_sampling != "off" and self.rollout.partial),
            "False with algorithm.dynamic_sampling",
            "The same groups are kept whenever a step is run: none goes on in the next.",
        )

    def _check_training(self) -> None:
        rule = rules_of(self)
        rule(
            "train.optimizer_state",
            self.train.optimizer_state == "float32" or self.model.dtype == "bfloat16",
            f"float32 with model.dtype = {self.model.dtype}",
            "In float32 the main weights are the model's own, which neither round nor leave the device.",
        )
        rule(
            "algorithm.correction.level",
            not self.rollout.partial or self.algorithm.correction.level != "off",
            "another with rollout.partial",
            "Tokens of older policies need importance sampling: set it, for example to token.",
        )

    def _check_drafting(self) -> None:
        rule = rules_of(self)
        decoupled = self.rollout.speculation.is_decoupled
        rule(
            "parallel.drafter_hosts",
            not self.parallel.drafter_hosts or self.parallel.drafters > 0,
            "its default with parallel.drafters 0",
            "Leave it out, or set parallel.drafters.",
        )
        rule(
            "parallel.drafters",
            decoupled or self.parallel.drafters == 0,
            "0, since nothing is drafted in them",
            "Set it together with mode decoupled, or decoupled among the drafters, of rollout.speculation.",
        )
        rule(
            "parallel.drafters",
            not self.lends_devices or self.parallel.engines >= 2,
            ">= 1, since decoupled is among the drafters",
            "With parallel.engines >= 2 it may be 0: then an engine that has run dry lends its device.",
        )
        drafting = self.rollout.speculation
        kinds = drafting.in_processes
        rule(
            "parallel.drafters",
            not kinds or self.parallel.drafters >= len(kinds) or list(kinds) == ["decoupled"],
            f">= {len(kinds)}, one for each of {', '.join(kinds)}",
            "Engines that have run dry lend their devices to the first draft model alone.",
        )
        rule(
            "rollout.speculation.draft_model",
            drafting.first_draft_model not in MADE_BY_WARM_UP or bool(self.warmup.solver),
            "a folder where warmup.solver is empty",
            "Make a draft model with specactor drafter init, or set warmup.solver.",
        )

    def _check_sizes(self) -> None:
        rule = rules_of(self)
        cache = self.rollout.engine.max_total_tokens
        rule(
            "rollout.engine.max_total_tokens",
            cache is None or cache > self.rollout.max_new_tokens,
            f"> rollout.max_new_tokens = {self.rollout.max_new_tokens}",
            "The KV cache must hold at least one whole response: enlarge it, or use None.",
        )
        rule(
            "data.eval",
            bool(self.data.eval) or self.eval.problems == 0 or not is_file(self.data.train),
            f"a file with held-out problems, with eval.problems {self.eval.problems}",
            "Give one, or use eval.problems 0.",
        )
        rule("eval.problems", self.eval.problems <= EVAL_SEED, f"<= {EVAL_SEED}", "Use fewer.")
        tiny = self.model.tiny
        rule(
            "rollout.max_new_tokens",
            tiny is None or self.rollout.max_new_tokens < tiny.max_position,
            f"< the model's context length {tiny.max_position if tiny else ''}",
            "Shorten the responses, or give the folder of a model with --model.path.",
        )
