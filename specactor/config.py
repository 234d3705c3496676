"""One tree of frozen dataclasses that describes a run; every field is validated when the tree is built.

A recipe (``examples/``) is a function that returns a `Config`; the command line overrides fields by dotted path.
Checks that need only one section are in its ``__post_init__``; checks across sections are in `Config.__post_init__`;
checks that also need the world size and the model's shape are in `specactor.parallel.layout.check`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from string import Formatter
from typing import Literal

from specactor.errors import ConfigError
from specactor.trainer.distillation.settings import DistillationConfig

MAX_WINDOW = 16
"""Draft tokens per request and round."""
DRAFTERS = "suffix, ngram, ngram_2, ngram_3, model, decoupled, or package.module:Class"
"""What `rollout.speculation.drafters` may name."""
SGLANG_DRAFTERS = ("eagle", "eagle3", "mtp", "nextn", "standalone")
"""Draft methods of SGLang that are refused by name."""
_INEXACT = (
    "SGLang's own speculation does not keep the text: on a GPU it accepts drafts by coins that plain decoding does not "
    "toss, on a CPU it takes the likeliest token at any temperature. Use rollout.speculation."
)


def _require(ok: bool, name: str, got: object, expected: str, remedy: str) -> None:
    if not ok:
        raise ConfigError.at(name, got, expected, remedy)


def _is_template(text: str) -> bool:
    """Whether `text` has at least one {name}, and no replacement field that is more than a name."""
    try:
        parts = [part[1:] for part in Formatter().parse(text) if part[1] is not None]
    except ValueError:
        return False
    plain = all(name and name.isidentifier() and not spec and not conversion for name, spec, conversion in parts)
    return bool(parts) and plain


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
            _require(value >= 1, f"model.tiny.{item.name}", value, ">= 1", "Leave it out for the default.")
        _require(
            1 <= self.experts_per_token <= self.num_experts,
            "model.tiny.experts_per_token",
            self.experts_per_token,
            f"1..{self.num_experts} (num_experts)",
            "Lower it, or raise model.tiny.num_experts.",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "model.tiny.num_heads",
            self.num_heads,
            f"a multiple of num_kv_heads = {self.num_kv_heads}",
            "Change one of the two.",
        )
        _require(
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
        _require(
            bool(self.path) != (self.tiny is not None),
            "model.path",
            self.path,
            "exactly one of model.path and model.tiny",
            "Give the folder of a Hugging Face model with --model.path, or let the recipe make a tiny one.",
        )


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where problems come from: a reasoning-gym task, or a JSONL or parquet file."""

    task: str = ""
    """Name of a reasoning-gym task, for example count_bits."""
    params: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Parameters of the reasoning-gym task."""
    path: str = ""
    """A .jsonl or .parquet file with columns prompt, answer and verifier."""
    size: int = 10_000
    """Number of problems drawn from a task."""
    seed: int = 0
    """Of the task's generator. Seeds closer than ``size`` share problems: keep them far apart."""
    prompt_template: str = "{prompt}"
    """The prompt that the model sees. {prompt} stands for the problem's own text, any other {name} for an entry of a
    task's metadata (count_bits has {number}) or a column of a file; {{ and }} for braces."""
    remove_spaces: bool = False
    """Leave the blanks out of every finished prompt: 7 + 4 becomes 7+4."""

    def __post_init__(self) -> None:
        _require(
            bool(self.task) != bool(self.path),
            "data.*.task",
            self.task,
            "exactly one of task and path",
            "Name a reasoning-gym task, or give a .jsonl or .parquet file.",
        )
        _require(self.size >= 1, "data.*.size", self.size, ">= 1", "Ask for at least one problem.")
        _require(
            _is_template(self.prompt_template),
            "data.*.prompt_template",
            self.prompt_template,
            "a text with {prompt}, or the {name} of a task's metadata or of a column",
            "Put {prompt} where the problem's text belongs, and write {{ and }} for braces.",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Problems to learn from, and problems held out."""

    train: SourceConfig
    eval: SourceConfig


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Supervised steps on worked solutions before reinforcement learning; cached by content hash."""

    solver: str = ""
    """Import path ``module:function`` of a function (problem, rng, stage) -> response text; empty: no warm-up."""
    steps: tuple[int, ...] = ()
    """Steps per stage; the solver is told the stage, so that styles can be mixed later."""
    learning_rates: tuple[float, ...] = ()
    """One per stage, decayed linearly to a tenth within the stage."""
    batch_size: int = 32
    """Sequences per step."""
    cache_dir: str = ".cache/warmup"
    """Warmed-up models are kept here, in a folder named by the hash of all that went into them."""

    def __post_init__(self) -> None:
        _require(
            len(self.steps) == len(self.learning_rates),
            "warmup.learning_rates",
            self.learning_rates,
            f"one per stage ({len(self.steps)} in warmup.steps)",
            "Give both lists the same length.",
        )
        _require(
            not self.solver or (":" in self.solver and bool(self.steps)),
            "warmup.solver",
            self.solver,
            "module:function, with at least one stage in warmup.steps",
            "Write the import path with a colon, or leave it empty to skip the warm-up.",
        )
        _require(min(self.steps, default=1) >= 1, "warmup.steps", self.steps, ">= 1 each", "Leave a stage out instead.")
        _require(
            min(self.learning_rates, default=1) > 0,
            "warmup.learning_rates",
            self.learning_rates,
            "> 0 each",
            "Use for example 1e-3.",
        )
        _require(self.batch_size >= 1, "warmup.batch_size", self.batch_size, ">= 1", "Use a positive size.")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the policy is spread over the ranks of torchrun. Data parallelism takes what the others leave."""

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
    """Drafter processes on each host, for rollout.speculation.mode decoupled; each serves all engines of its host."""
    drafter_devices: tuple[int, ...] = ()
    """The GPU of each drafter process, or without GPUs its CPU core; empty: the devices after those of the host's
    ranks, and from the first one again where there are no more."""
    timeout_s: float = 600.0
    """Longest wait in one collective."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert", "expert_tensor", "context", "engines", "engine_tensor"):
            value = getattr(self, name)
            _require(value >= 1, f"parallel.{name}", value, ">= 1", "Use 1 to switch this kind of parallelism off.")
        _require(self.drafters >= 0, "parallel.drafters", self.drafters, ">= 0", "Use 0 for none.")
        _require(
            len(self.drafter_devices) in (0, self.drafters),
            "parallel.drafter_devices",
            self.drafter_devices,
            f"one for each of {self.drafters} in parallel.drafters, or none",
            "Leave it out to have them chosen.",
        )
        _require(
            min(self.drafter_devices, default=0) >= 0,
            "parallel.drafter_devices",
            self.drafter_devices,
            ">= 0 each",
            "Give numbers of GPUs, or of CPU cores.",
        )
        _require(self.timeout_s > 0, "parallel.timeout_s", self.timeout_s, "> 0", "Give seconds, for example 600.")
        _require(
            self.virtual_pipeline is None or (self.virtual_pipeline >= 2 and self.pipeline >= 2),
            "parallel.virtual_pipeline",
            self.virtual_pipeline,
            ">= 2, with parallel.pipeline >= 2",
            "Leave it out, or use pipeline parallelism.",
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One SGLang engine."""

    max_running_requests: int = 64
    """Requests decoded together."""
    max_total_tokens: int | None = None
    """Size of the KV cache in tokens; None: SGLang decides from the memory left."""
    memory_fraction: float = 0.5
    """Share of the device's memory for weights and KV cache."""
    start_timeout_s: float = 180.0
    """Longest wait for an engine to be ready."""
    request_timeout_s: float = 600.0
    """Longest wait for any sign of progress from a running engine."""
    max_restarts: int = 3
    """Times that one engine may be restarted in a run before the run fails."""
    routed_experts: bool = False
    """Return with every response which experts computed its tokens, for routing replay."""
    extra_args: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Further SGLang server arguments, by name."""

    def __post_init__(self) -> None:
        own = sorted(name for name in self.extra_args if name.replace("-", "_").startswith("speculative_"))
        _require(not own, "rollout.engine.extra_args", own, "no speculative_* argument", _INEXACT)
        _require(
            self.max_running_requests >= 1,
            "rollout.engine.max_running_requests",
            self.max_running_requests,
            ">= 1",
            "Use a positive number.",
        )
        _require(
            0 < self.memory_fraction < 1,
            "rollout.engine.memory_fraction",
            self.memory_fraction,
            "between 0 and 1",
            "Use for example 0.5.",
        )
        _require(
            self.max_total_tokens is None or self.max_total_tokens >= 1,
            "rollout.engine.max_total_tokens",
            self.max_total_tokens,
            ">= 1 or None",
            "Use None to let SGLang decide.",
        )
        for name in ("start_timeout_s", "request_timeout_s"):
            value = getattr(self, name)
            _require(value > 0, f"rollout.engine.{name}", value, "> 0", "Give seconds.")
        _require(
            self.max_restarts >= 0,
            "rollout.engine.max_restarts",
            self.max_restarts,
            ">= 0",
            "Use 0 to fail at the first crash.",
        )


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Drafting ahead of the policy. It changes the speed of a rollout and never a token."""

    mode: Literal["off", "coupled", "decoupled", "auto"] = "off"
    """off: plain decoding; coupled: draft, then verify, on the engine's own devices; decoupled: verify what processes
    of their own (parallel.drafters) have drafted ahead; auto: drafters, or off, whichever is predicted to be
    faster, request by request and round by round."""
    drafters: tuple[str, ...] = ("suffix",)
    """Draft methods: suffix, ngram, ngram_2, ngram_3, model, decoupled, or the import path of a class,
    ``package.module:Name``. Mode decoupled puts decoupled before them where it is not named."""
    window: int | None = None
    """Draft tokens per request and round; None: chosen per request from its past acceptance and measured costs."""
    max_window: int = 8
    """Largest window that is ever chosen, and most draft tokens of a tree."""
    merge: bool = False
    """Verify what all drafters but ``model`` draft for a request at once, in a tree; else each request has one of
    them, the best for it."""
    fastest_of: int = 1
    """In mode auto, draft methods that one request may have at once, in a tree, where few requests run and it is
    predicted to pay (Fastest-of-N); 1: one, the best for that request. ``merge`` has all of them always."""
    draft_model: str = ""
    """Folder of a dense model in Hugging Face format with the policy's tokenizer, for the drafters ``model`` and
    ``decoupled``."""
    drafter_kv_tokens: int | None = None
    """Size of a drafter process's KV cache in tokens; None: without GPUs room for all requests that its host's engines
    run at once, else SGLang decides from rollout.engine.memory_fraction."""
    sharpen: Literal["fitted", "shared", "greedy"] = "fitted"
    """How a draft model samples. shared: with the policy's own noise; greedy: its likeliest token; fitted: with
    that noise, its log-probabilities times a factor that is fitted to what was accepted before."""
    branches: bool = False
    """Drafter processes with nothing else to do draft on from the second choices of what they drafted, for the case
    that those are right."""
    cost_table: str = ""
    """File that ``specactor profile`` wrote; empty: costs are measured while the engine runs."""
    history_tokens: int = 1_000_000
    """Tokens of earlier responses that a text drafter keeps."""

    @property
    def draft_methods(self) -> tuple[str, ...]:
        """All drafters of an engine, the first to be preferred."""
        named = self.mode != "decoupled" or "decoupled" in self.drafters
        return self.drafters if named else ("decoupled", *self.drafters)

    @property
    def is_decoupled(self) -> bool:
        """Whether processes of their own draft."""
        return self.mode != "off" and "decoupled" in self.draft_methods

    @property
    def drafts_in_engine(self) -> bool:
        """Whether engines hold the draft model."""
        return bool(self.draft_model) and (not self.is_decoupled or "model" in self.drafters)

    def __post_init__(self) -> None:
        _require(
            1 <= self.max_window <= MAX_WINDOW,
            "rollout.speculation.max_window",
            self.max_window,
            f"1..{MAX_WINDOW}",
            "Use rollout.speculation.mode off to disable speculation.",
        )
        _require(
            self.window is None or 0 <= self.window <= self.max_window,
            "rollout.speculation.window",
            self.window,
            f"None or 0..{self.max_window} (rollout.speculation.max_window)",
            "Use None to have it chosen.",
        )
        _require(
            bool(self.drafters),
            "rollout.speculation.drafters",
            self.drafters,
            "at least one",
            "Use rollout.speculation.mode off to disable speculation.",
        )
        _require(
            self.fastest_of >= 1 and (self.fastest_of == 1 or self.mode in ("auto", "off")),
            "rollout.speculation.fastest_of",
            self.fastest_of,
            f">= 1, and 1 in rollout.speculation.mode {self.mode}" if self.mode in ("coupled", "decoupled") else ">= 1",
            "Use mode auto for more than one method at once, or rollout.speculation.merge.",
        )
        foreign = [name for name in self.drafters if name.lower() in SGLANG_DRAFTERS]
        _require(
            not foreign,
            "rollout.speculation.drafters",
            foreign,
            DRAFTERS,
            f"{_INEXACT.removesuffix('Use rollout.speculation.')}A draft model is used with the drafter model.",
        )
        _require(
            len(set(self.drafters)) == len(self.drafters),
            "rollout.speculation.drafters",
            self.drafters,
            "every name once",
            "Remove the second one.",
        )
        _require(
            self.mode != "coupled" or "decoupled" not in self.drafters,
            "rollout.speculation.drafters",
            self.drafters,
            "no decoupled in rollout.speculation.mode coupled",
            "Use mode decoupled, or auto.",
        )
        for name in ("model", "decoupled"):
            _require(
                name not in self.draft_methods or bool(self.draft_model),
                "rollout.speculation.draft_model",
                self.draft_model,
                f"a folder, since {name} is among the drafters",
                f"Name a model, or take {name} out of rollout.speculation.drafters and mode.",
            )
        _require(
            self.drafter_kv_tokens is None or self.drafter_kv_tokens >= 1,
            "rollout.speculation.drafter_kv_tokens",
            self.drafter_kv_tokens,
            ">= 1 or None",
            "Use None to have it chosen.",
        )
        _require(
            self.history_tokens >= 0,
            "rollout.speculation.history_tokens",
            self.history_tokens,
            ">= 0",
            "Use 0 to keep nothing of earlier steps.",
        )


@dataclass(frozen=True, kw_only=True)
class TailConfig:
    """The last requests of a rollout, when some engines have nothing left. It changes the speed, and rounding.

    With `migrate` and `replicas`: a request that goes on on another engine has the keys of what was begun computed
    again there, so its later log-probabilities may differ by rounding (1e-5 in float32), and a token where two
    candidates are tied that nearly: rare in float32, not in bfloat16. Where requests go on depends on time: a run is
    repeatable in its tokens (float32, such ties aside), in its log-probabilities up to rounding alone."""

    migrate: bool = False
    """Requests go on on engines that have run dry, where that is predicted to end the rollout earlier; among the
    engines of one host, which its first rank then drives."""
    replicas: int = 1
    """Fastest-of-N: a request runs on up to this many engines of one host, once some of them have run dry; whichever
    ends first is kept. 1: off."""
    drafters: bool = False
    """A drafter process sleeps on each engine's device, or without GPUs its core, where no other engine has that. Where
    an engine has run dry, and neither of the above is done, it drafts for the others that the same rank drives (those
    of its host) until the rollout ends, if that is predicted to pay. For mode decoupled, or decoupled among the
    drafters, with parallel.drafters 0. On GPUs it must fit beside the engine: set
    rollout.speculation.drafter_kv_tokens."""

    def __post_init__(self) -> None:
        _require(self.replicas >= 1, "rollout.tail.replicas", self.replicas, ">= 1", "Use 1 for no replicas.")

    @property
    def moves(self) -> bool:
        """Whether any request may run on another engine than its first."""
        return self.migrate or self.replicas > 1

    @property
    def is_on(self) -> bool:
        """Whether anything is done with engines that have run dry."""
        return self.moves or self.drafters


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Responses of one RL step."""

    prompts_per_step: int = 16
    """Prompts drawn per RL step."""
    group_size: int = 8
    """Responses per prompt; advantages are relative to the group."""
    temperature: float = 1.0
    """Logits are divided by it; 1 samples from the policy itself."""
    top_p: float = 1.0
    """Sample from the most likely tokens that hold this much probability; 1: from all."""
    top_k: int = -1
    """Sample from this many most likely tokens; -1: from all."""
    min_p: float = 0.0
    """Sample from tokens at least this many times as likely as the likeliest; 0: from all."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for every time that the response has it. Penalties switch drafting off."""
    presence_penalty: float = 0.0
    """Taken off a token's logit once the response has it."""
    repetition_penalty: float = 1.0
    """Divides a token's positive logit, multiplies a negative one, once the response has it."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; the token that completes one is its last."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the model's own."""
    max_new_tokens: int = 128
    """Longest response in tokens."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    tail: TailConfig = field(default_factory=TailConfig)
    oversample: float = 1.0
    """Work at this many times prompts_per_step groups, and stop when prompts_per_step of them are complete; 1: off.
    Dropping the others favours prompts with short responses, unless `partial` keeps them. Which groups are complete
    first depends on speed, so a step is not the same again after a resume."""
    partial: bool = False
    """With oversample: the responses of groups that are not complete go on in the next step, at the next policy
    version. Needs algorithm.tis_cap: each token keeps the log-probability under which it was sampled."""

    def __post_init__(self) -> None:
        _require(
            self.prompts_per_step >= 1,
            "rollout.prompts_per_step",
            self.prompts_per_step,
            ">= 1",
            "Ask for at least one prompt.",
        )
        _require(self.group_size >= 1, "rollout.group_size", self.group_size, ">= 1", "Ask for at least one response.")
        _require(
            self.temperature > 0,
            "rollout.temperature",
            self.temperature,
            "> 0",
            "Reinforcement learning needs samples; 1.0 is the policy itself.",
        )
        _require(
            0 < self.top_p <= 1, "rollout.top_p", self.top_p, "in (0, 1]", "Use 1.0 to keep the whole distribution."
        )
        _require(
            self.top_k == -1 or self.top_k >= 1,
            "rollout.top_k",
            self.top_k,
            "-1 or >= 1",
            "Use -1 to keep the whole distribution.",
        )
        _require(0 <= self.min_p <= 1, "rollout.min_p", self.min_p, "in [0, 1]", "Use 0 to keep all tokens.")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, f"rollout.{name}", value, "in [-2, 2]", "Use 0 for no penalty.")
        _require(
            0 < self.repetition_penalty <= 2,
            "rollout.repetition_penalty",
            self.repetition_penalty,
            "in (0, 2]",
            "Use 1 for no penalty.",
        )
        _require(
            1 <= self.oversample <= 10,
            "rollout.oversample",
            self.oversample,
            "in [1, 10]",
            "Use 1 for all groups that are asked for, or for example 1.25.",
        )
        _require(
            not self.partial or self.oversample > 1,
            "rollout.partial",
            self.partial,
            "False with rollout.oversample = 1",
            "Set rollout.oversample to more than 1: else a step waits for all of its responses, and nothing is left.",
        )
        _require(all(self.stop), "rollout.stop", self.stop, "texts that are not empty", "Leave the empty one out.")
        _require(
            min(self.stop_token_ids, default=0) >= 0,
            "rollout.stop_token_ids",
            self.stop_token_ids,
            ">= 0 each",
            "Use ids of the model's tokenizer.",
        )
        _require(
            self.max_new_tokens >= 1,
            "rollout.max_new_tokens",
            self.max_new_tokens,
            ">= 1",
            "Ask for at least one token.",
        )

    @property
    def has_penalties(self) -> bool:
        """Whether a token's distribution depends on how often tokens were emitted."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What is learned from the rewards. The formulas are in ``specactor.trainer.advantages`` and ``losses``."""

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
    max_resample_rounds: int = 3
    """Rounds of further prompts that dynamic sampling may draw in one step."""
    overlong_buffer: int = 0
    """DAPO: the reward falls linearly over the last this many tokens before max_new_tokens; 0: off."""
    overlong_penalty: float = 1.0
    """Reward lost at max_new_tokens when overlong_buffer > 0."""

    def __post_init__(self) -> None:
        _require(0 < self.clip_low < 1, "algorithm.clip_low", self.clip_low, "in (0, 1)", "Use for example 0.2.")
        _require(
            self.clip_high > 0, "algorithm.clip_high", self.clip_high, "> 0", "Use for example 0.2, or DAPO's 0.28."
        )
        _require(self.kl_coef >= 0, "algorithm.kl_coef", self.kl_coef, ">= 0", "Use 0 for no penalty.")
        _require(
            (self.kl == "off") == (self.kl_coef == 0),
            "algorithm.kl_coef",
            self.kl_coef,
            f"{'0' if self.kl == 'off' else '> 0'} with algorithm.kl = {self.kl}",
            "Set both, or neither.",
        )
        _require(
            self.tis_cap is None or self.tis_cap >= 1,
            "algorithm.tis_cap",
            self.tis_cap,
            ">= 1 or None",
            "Use None to switch truncated importance sampling off.",
        )
        _require(
            self.overlong_penalty >= 0,
            "algorithm.overlong_penalty",
            self.overlong_penalty,
            ">= 0",
            "It is subtracted from the reward.",
        )
        _require(self.overlong_buffer >= 0, "algorithm.overlong_buffer", self.overlong_buffer, ">= 0", "Use 0 for off.")
        _require(
            self.max_resample_rounds >= 1,
            "algorithm.max_resample_rounds",
            self.max_resample_rounds,
            ">= 1",
            "Switch it off with algorithm.dynamic_sampling False.",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimisation of the policy."""

    steps: int = 50
    """RL steps of the whole run."""
    learning_rate: float = 1e-6
    """Highest learning rate."""
    min_learning_rate: float = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    warmup_steps: int = 0
    """RL steps over which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after its linear rise."""
    updates_per_step: int = 1
    """Optimizer updates per RL step; the step's groups are split among them."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's first and second moments."""
    adam_eps: float = 1e-8
    """Added to Adam's denominator."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    tokens_per_microbatch: int = 8192
    """Packed tokens of one forward pass on one rank."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation."""
    distributed_optimizer: bool = True
    """Shard the optimizer's state over the data-parallel ranks."""
    max_logprob_gap: float = 1e-4
    """Largest |engine - trainer| log-probability of a sampled token before the run stops. 1e-4 holds in float32."""

    def __post_init__(self) -> None:
        _require(self.steps >= 0, "train.steps", self.steps, ">= 0", "Use 0 to stop after the warm-up.")
        _require(self.learning_rate > 0, "train.learning_rate", self.learning_rate, "> 0", "Use for example 1e-6.")
        _require(
            0 <= self.min_learning_rate <= self.learning_rate,
            "train.min_learning_rate",
            self.min_learning_rate,
            f"between 0 and train.learning_rate = {self.learning_rate}",
            "Lower it.",
        )
        _require(self.warmup_steps >= 0, "train.warmup_steps", self.warmup_steps, ">= 0", "Use 0 for none.")
        _require(self.updates_per_step >= 1, "train.updates_per_step", self.updates_per_step, ">= 1", "Use 1.")
        _require(self.weight_decay >= 0, "train.weight_decay", self.weight_decay, ">= 0", "Use 0 for none.")
        _require(
            all(0 <= beta < 1 for beta in self.adam_betas),
            "train.adam_betas",
            self.adam_betas,
            "in [0, 1) each",
            "Use for example 0.9 0.95.",
        )
        _require(self.adam_eps > 0, "train.adam_eps", self.adam_eps, "> 0", "Use for example 1e-8.")
        _require(self.grad_clip > 0, "train.grad_clip", self.grad_clip, "> 0", "Use for example 1.0.")
        _require(
            self.tokens_per_microbatch >= 1,
            "train.tokens_per_microbatch",
            self.tokens_per_microbatch,
            ">= 1",
            "It must hold the longest sequence.",
        )
        _require(
            self.max_logprob_gap > 0, "train.max_logprob_gap", self.max_logprob_gap, "> 0", "Use inf for no bound."
        )


@dataclass(frozen=True, kw_only=True)
class WeightsSyncConfig:
    """How new weights reach the engines."""

    bucket_bytes: int = 64 * 2**20
    """Weights travel in buckets of this size; a trainer rank has two. A larger tensor gets a bucket of its size."""
    timeout_s: float = 300.0
    """Longest wait for one bucket to be taken."""

    def __post_init__(self) -> None:
        _require(
            self.bucket_bytes >= 2**16,
            "weights_sync.bucket_bytes",
            self.bucket_bytes,
            ">= 65536",
            "It must hold the largest tensor, or it is raised to it.",
        )
        _require(self.timeout_s > 0, "weights_sync.timeout_s", self.timeout_s, "> 0", "Give seconds.")


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
        _require(self.every >= 0, "checkpoint.every", self.every, ">= 0", "Use 0 to save only at the end.")
        _require(self.keep >= 1, "checkpoint.keep", self.keep, ">= 1", "At least the newest must be kept.")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Greedy accuracy on held-out problems, before and after RL."""

    problems: int = 256
    """Held-out problems per evaluation; 0: no evaluation."""
    every: int = 0
    """Also evaluate after every this many RL steps; 0: only before and after."""

    def __post_init__(self) -> None:
        _require(self.problems >= 0, "eval.problems", self.problems, ">= 0", "Use 0 for no evaluation.")
        _require(self.every >= 0, "eval.every", self.every, ">= 0", "Use 0 for before and after only.")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where metrics go besides ``metrics.jsonl``."""

    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    """auto: online where a key is configured, else offline."""
    project: str = "specactor"
    """wandb project."""
    progress: bool = True
    """Live display on a terminal; one line per step is printed anyway."""
    trace: tuple[int, ...] = ()
    """RL steps, from 1, of whose rollouts the run's folder gets a trace for ui.perfetto.dev: what engines with
    speculation, and drafter processes, did when."""

    def __post_init__(self) -> None:
        _require(
            all(step >= 1 for step in self.trace),
            "tracking.trace",
            self.trace,
            "steps >= 1",
            "The first RL step is 1. Use () for no trace.",
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
    """Folder above the folders of all runs."""
    resume: str = "off"
    """off: refuse a folder that already holds a run; auto: continue from its newest checkpoint, if any; otherwise the
    path of a checkpoint to start from."""
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

    def __post_init__(self) -> None:
        _require(
            self.name not in ("", ".", "..") and "/" not in self.name,
            "name",
            self.name,
            "a folder name without '/', and not '.' or '..'",
            "Put the folder above it in --output-dir.",
        )
        _require(0 <= self.seed < 2**31, "seed", self.seed, "0..2**31-1", "Choose a non-negative seed.")
        _require(
            self.rollout.group_size >= 2,
            "rollout.group_size",
            self.rollout.group_size,
            f">= 2 with algorithm.advantage = {self.algorithm.advantage}",
            "Advantages compare the responses of a group.",
        )
        _require(
            self.rollout.prompts_per_step % self.train.updates_per_step == 0,
            "train.updates_per_step",
            self.train.updates_per_step,
            f"a divisor of rollout.prompts_per_step = {self.rollout.prompts_per_step}",
            "Groups are never split between updates.",
        )
        _require(
            self.algorithm.overlong_buffer < self.rollout.max_new_tokens,
            "algorithm.overlong_buffer",
            self.algorithm.overlong_buffer,
            f"< rollout.max_new_tokens = {self.rollout.max_new_tokens}",
            "Shorten the buffer.",
        )
        _require(
            self.train.tokens_per_microbatch > self.rollout.max_new_tokens,
            "train.tokens_per_microbatch",
            self.train.tokens_per_microbatch,
            f"> rollout.max_new_tokens = {self.rollout.max_new_tokens}",
            "One micro-batch must hold the longest prompt and response.",
        )
        _require(
            not (self.algorithm.dynamic_sampling and self.rollout.oversample > 1),
            "rollout.oversample",
            self.rollout.oversample,
            "1 with algorithm.dynamic_sampling",
            "Both decide which groups are learned from: use one of the two.",
        )
        _require(
            not self.rollout.tail.is_on or self.parallel.engines >= 2,
            "parallel.engines",
            self.parallel.engines,
            ">= 2 with rollout.tail",
            "Requests need another engine to go on on, or to be drafted for: raise it, or leave rollout.tail.* out.",
        )
        _require(
            not self.rollout.partial or self.algorithm.tis_cap is not None,
            "algorithm.tis_cap",
            self.algorithm.tis_cap,
            "a cap with rollout.partial",
            "Tokens of older policies need importance sampling: set it, for example to 2.0.",
        )
        penalties = {
            f"rollout.{name}": getattr(self.rollout, name)
            for name, off in (("frequency_penalty", 0), ("presence_penalty", 0), ("repetition_penalty", 1))
            if getattr(self.rollout, name) != off
        }
        _require(
            not penalties or self.train.max_logprob_gap == float("inf"),
            "train.max_logprob_gap",
            self.train.max_logprob_gap,
            f"inf with {', '.join(penalties)}",
            "The engine's log-probabilities hold the penalties, the trainer's do not: leave the penalties out.",
        )
        decoupled, freed = self.rollout.speculation.is_decoupled, self.rollout.tail.drafters
        _require(
            decoupled or not freed,
            "rollout.tail.drafters",
            freed,
            f"False with rollout.speculation.mode {self.rollout.speculation.mode} and drafters "
            f"{self.rollout.speculation.drafters}",
            "Nobody would verify what they draft: use mode decoupled, or decoupled among the drafters.",
        )
        _require(
            not freed or self.parallel.drafters == 0,
            "parallel.drafters",
            self.parallel.drafters,
            "0 with rollout.tail.drafters",
            "Drafters have devices of their own, or those of engines that have run dry: use one of the two.",
        )
        _require(
            freed or decoupled == (self.parallel.drafters > 0),
            "parallel.drafters",
            self.parallel.drafters,
            ">= 1, since decoupled is among the drafters" if decoupled else "0, since nothing is drafted in them",
            "Set it together with mode decoupled, or decoupled among the drafters, of rollout.speculation.",
        )
        refresh, drafting = self.distillation.refresh, self.rollout.speculation
        _require(
            refresh == "off" or (drafting.mode != "off" and bool({"model", "decoupled"} & {*drafting.draft_methods})),
            "distillation.refresh",
            refresh,
            f"off with rollout.speculation.mode {drafting.mode} and drafters {drafting.draft_methods}",
            "Only a draft model learns: name model or decoupled among rollout.speculation.drafters.",
        )
        cache = self.rollout.engine.max_total_tokens
        _require(
            cache is None or cache > self.rollout.max_new_tokens,
            "rollout.engine.max_total_tokens",
            cache,
            f"> rollout.max_new_tokens = {self.rollout.max_new_tokens}",
            "The KV cache must hold at least one whole response: enlarge it, or use None.",
        )
        _require(
            not self.data.eval.task or self.eval.problems <= self.data.eval.size,
            "eval.problems",
            self.eval.problems,
            f"<= data.eval.size = {self.data.eval.size}",
            "Evaluate on fewer problems, or draw more.",
        )
        tiny = self.model.tiny
        _require(
            tiny is None or self.rollout.max_new_tokens < tiny.max_position,
            "rollout.max_new_tokens",
            self.rollout.max_new_tokens,
            f"< the model's context length {tiny.max_position if tiny else ''}",
            "Shorten the responses, or raise model.tiny.max_position.",
        )
        _require(
            self.data.train.path != self.data.eval.path or not self.data.train.path,
            "data.eval.path",
            self.data.eval.path,
            "a file other than data.train.path",
            "Held-out problems must not be trained on.",
        )
        same_task = self.data.train.task and self.data.train.task == self.data.eval.task
        apart = max(self.data.train.size, self.data.eval.size)
        near = abs(self.data.train.seed - self.data.eval.seed) < apart
        _require(
            not (same_task and near),
            "data.eval.seed",
            self.data.eval.seed,
            f"at least {apart} away from data.train.seed = {self.data.train.seed}",
            "reasoning-gym draws problem i with seed + i, so near seeds share problems.",
        )
