"""The sections `rollout` and `weights_sync`, and what engines promise. PURE.

Where another batch gives a row other bits, tied candidates may change places: a verification then emits another token
than a plain round, of the same distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from specactor.config.rules import require, rules_of
from specactor.config.speculation import INEXACT, SpeculationConfig

ONE_BATCH = "All ranks of an engine must hold the same batch. Use more engines: parallel.engines."
AS_TRAINED = "Engines hold the trainer's weights as they are, in model.dtype."
BY_ROWS = "With it the bits of a row depend on how many rows are computed together, so that drafts would change tokens."
BY_SIZE = "With it ranks add in an order that depends on how many rows are computed together."
ONE_ATTENTION = "Prefills and decoding have one backend. Use attention_backend."
ONE_PLACE = "Experts stay where a sync found them, and of copies of one a row's place in its batch would choose."
NOT_EXTRA = {
    "enable_deterministic_inference": "It is always on: the noise of a token is keyed by it.",
    "sampling_backend": "Tokens are drawn with noise of their own, by one backend.",
    "preferred_sampling_params": "Use rollout.temperature and its neighbours, which the trainer knows.",
    "enable_dp_attention": ONE_BATCH,
    "dp_size": ONE_BATCH,
    "attn_dp_size": ONE_BATCH,
    "pp_size": ONE_BATCH,
    "quantization": AS_TRAINED,
    "enable_lora": AS_TRAINED,
    "lora_paths": AS_TRAINED,
    "load_format": "Weights come from the trainer.",
    "context_length": "It follows from the model, rollout.max_new_tokens and train.tokens_per_microbatch.",
    "device": "Each engine has those of its ranks: parallel.engines, parallel.engine_tensor.",
    "skip_tokenizer_init": "Engines take and give tokens alone.",
    "incremental_streaming_output": "Responses are read as they come by default.",
    "enable_memory_saver": "It is on where torch-memory-saver is installed.",
    "moe_runner_backend": "On GPUs it is triton: others choose tiles by the number of rows, or permute weights.",
    "moe_a2a_backend": "Ranks add what their experts give; what sends rows takes kernels by their number.",
    **dict.fromkeys(("enable_eplb", "ep_num_redundant_experts", "init_expert_location"), ONE_PLACE),
    "decode_attention_backend": ONE_ATTENTION,
    "prefill_attention_backend": ONE_ATTENTION,
    "enable_fp32_lm_head": BY_ROWS,
    "bf16_gemm_backend": BY_ROWS,
    "enable_torch_compile": BY_ROWS,
    "enable_mixed_chunk": BY_ROWS,
    "enable_two_batch_overlap": BY_ROWS,
    "enable_single_batch_overlap": BY_ROWS,
    "enable_attn_tp_input_scattered": BY_SIZE,
    "enable_symm_mem": BY_SIZE,
    "enable_mscclpp": BY_SIZE,
    "enable_fused_moe_sum_all_reduce": BY_SIZE,
}
"""Arguments of SGLang with which tokens would be others, or engines hang or fail, and why."""
SET_ELSEWHERE = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "tp_size": "parallel.engine_tensor",
    "max_running_requests": "rollout.engine.max_running_requests",
    "max_total_tokens": "rollout.engine.max_total_tokens",
    "mem_fraction_static": "rollout.engine.memory_fraction",
    "random_seed": "seed",
}
"""Those that a setting sets, which the layout and the trainer know."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One SGLang engine."""

    max_running_requests: int = 64
    """Requests decoded together."""
    max_total_tokens: int | None = None
    """Size of the KV cache in tokens; None: SGLang decides from the memory left."""
    memory_fraction: float = 0.5
    """Share of the device's memory for weights and KV cache."""
    max_restarts: int = 3
    """Times that one engine may be restarted within 100 steps before the run fails."""
    extra_args: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Further SGLang server arguments, by name. With ``enable_return_routed_experts=true`` responses say which
    experts computed their tokens (``train.routing_replay = r3`` sets it). On GPUs ``attention_backend=tiles``
    reads keys once for up to eight rows of a request; a run keeps its attention backend for good."""

    start_timeout_s: ClassVar[float] = 1800.0  # to be ready: reading hundreds of gigabytes from a network takes so long
    request_timeout_s: ClassVar[float] = 600.0  # without any sign of progress; a running engine gives several a second

    @property
    def routed_experts(self) -> bool:
        """Return whether responses say which experts computed their tokens."""
        return bool(self.extra_args.get("enable_return_routed_experts"))

    @property
    def attention(self) -> dict[str, str]:
        """Return SGLang's attention backends by argument, which decide the bits of log-probabilities, where any is
        asked for."""
        return {name: str(value) for name, value in self.extra_args.items() if name.endswith("attention_backend")}

    def attention_on(self, *, gpu: bool) -> dict[str, str]:
        """Return `attention` with the device's own backend, where none is asked for."""
        # Triton's tokens were found equal on GPUs (docs/gpu.md). SGLang would take FlashAttention on Hopper, and on
        # Blackwell FlashInfer, which splits keys otherwise in graphs than without.
        return {"attention_backend": "triton" if gpu else "torch_native"} | self.attention

    @property
    def page_size(self) -> int:
        """Return the tokens of a page of the KV cache."""
        named: dict[str, Any] = {name.replace("-", "_"): value for name, value in self.extra_args.items()}
        page: int = named.get("page_size", 1)
        return page

    def __post_init__(self) -> None:
        rule = rules_of(self, "rollout.engine")
        named = [name.replace("-", "_") for name in self.extra_args]
        own = sorted(name for name in named if name.startswith("speculative_"))
        require(not own, "rollout.engine.extra_args", own, "no speculative_* argument", INEXACT)
        settings = {name: f"Use {setting}." for name, setting in SET_ELSEWHERE.items()}
        for name, way in (NOT_EXTRA | settings).items():
            require(name not in named, "rollout.engine.extra_args", name, "another argument", way)
        require(
            self.attention.get("attention_backend") != "flashinfer",
            "rollout.engine.extra_args",
            "attention_backend=flashinfer",
            "another backend",
            "It splits a row's keys in CUDA graphs otherwise than without. Leave it out, or use triton.",
        )
        page = self.page_size
        is_whole = isinstance(page, int) and page >= 1
        require(
            is_whole, "rollout.engine.extra_args", f"page_size={page}", "a whole number >= 1", "Leave it out for 1."
        )
        rule("max_running_requests", self.max_running_requests >= 1, ">= 1", "Use a positive number.")
        rule("memory_fraction", 0 < self.memory_fraction < 1, "between 0 and 1", "Use for example 0.5.")
        rule(
            "max_total_tokens",
            self.max_total_tokens is None or self.max_total_tokens >= 1,
            ">= 1 or None",
            "Use None to let SGLang decide.",
        )
        rule("max_restarts", self.max_restarts >= 0, ">= 0", "Use 0 to fail at the first crash.")


@dataclass(frozen=True, kw_only=True)
class WeightsSyncConfig:
    """How weights reach the engines in the first sync, and where they cannot copy by a plan."""

    bucket_bytes: int = 64 * 2**20
    """Weights travel in buckets of this size; a trainer rank has two. A larger tensor gets a bucket of its size."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "weights_sync")
        rule("bucket_bytes", self.bucket_bytes >= 2**16, ">= 65536", "Use at least 64 KiB.")


SAME_BITS = "same bits in plain rounds, verifications and any batch"
SAME_LAW = "same law and noise; tokens equal but for ties, which `make gpu-check` counts"
TILES = "tiles"
"""Our attention backend for GPUs: one product has up to eight rows of a request."""
SPLIT = 256
"""Keys of a part of its attention: as many as SGLang's Triton backend has room for in its deterministic mode."""
DRAFT_ROWS = 512  # of a draft model's pass over unseen tokens; its other passes have one row per text


def guarantee(engine: EngineConfig, *, gpu: bool, dtype: str) -> tuple[str, str]:
    """Return an engine's arithmetic (rows: a product for each; tiles; or the backend whose own kernel it is), and what
    it promises: equal bits where tests have shown them, on CPUs in float32."""
    backend = engine.attention_on(gpu=gpu)["attention_backend"]
    ours = {TILES: "tiles"} if gpu else {"torch_native": "rows"}
    arithmetic = ours.get(backend, f"{backend}'s own kernel")
    return arithmetic, SAME_BITS if arithmetic == "rows" and dtype == "float32" else SAME_LAW


def check_attention(engine: EngineConfig, *, gpu: bool) -> None:
    """Raise ConfigError for an attention backend that this machine cannot run."""
    asked = [f"{name}={backend}" for name, backend in engine.attention.items() if backend == TILES]
    require(
        gpu or not asked,
        "rollout.engine.extra_args",
        ", ".join(asked),
        f"a GPU for {TILES}",
        "Leave it out: without a GPU torch_native, the default, reads keys once, too.",
    )


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
    """Sample from the most likely tokens that hold this much probability; 1: from all. With less, or with top_k, losses
    and algorithm.correction still take a token's probability among all, which is less than that of sampling it."""
    top_k: int = -1
    """Sample from this many most likely tokens; -1: from all."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the model's own end, also of special tokens (<|im_end|>); the token that
    completes one is its last. On GPUs rounds with drafts then do not overlap."""
    max_new_tokens: int = 128
    """Longest response in tokens; of a conversation with an environment, all turns and what is said in between."""
    environment_timeout_s: float = 60.0
    """Longest that an environment or a verifier may take for one answer; then its response has failed."""
    noise_visits: int = 1
    """Epochs in a row in which a problem's i-th sample has the same noise, unless one step draws it twice; 1: always
    fresh noise. With more, the drafter ``previous`` is right more often, and samples depend on noise that the weights
    have learned from. In a conversation what comes after the first other text has other noise."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    audit: Literal["off", "warn", "stop"] = "off"
    """Whether the trainer looks for tokens that their noise does not pick, and another engine generates parts of a few
    responses again without drafts, for half a percent of the time; and what a difference does: a warning with the
    command that runs the step again, or the end of the run."""
    oversample: float = 1.0
    """Work at this many times prompts_per_step groups, and stop when prompts_per_step of them are complete; 1: off.
    With algorithm.dynamic_sampling: when that many of them, in the order of the data, teach something.
    Dropping the others favours prompts with short responses, unless `partial` keeps them. Which groups are complete
    first depends on speed, so a step is not the same again after a resume."""
    partial: bool = False
    """With oversample: the responses of groups that are not complete go on in the next step, at the next policy
    version. Needs algorithm.correction: each token keeps the log-probability under which it was sampled."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "rollout")
        rule("prompts_per_step", self.prompts_per_step >= 1, ">= 1", "Ask for at least one prompt.")
        rule("group_size", self.group_size >= 1, ">= 1", "Ask for at least one response.")
        rule(
            "temperature",
            self.temperature > 0,
            "> 0",
            "Reinforcement learning needs samples; 1.0 is the policy itself.",
        )
        rule("top_p", 0 < self.top_p <= 1, "in (0, 1]", "Use 1.0 to keep the whole distribution.")
        rule("top_k", self.top_k == -1 or self.top_k >= 1, "-1 or >= 1", "Use -1 to keep the whole distribution.")
        rule(
            "oversample",
            1 <= self.oversample <= 10,
            "in [1, 10]",
            "Use 1 for all groups that are asked for, or for example 1.25.",
        )
        rule(
            "partial",
            not self.partial or self.oversample > 1,
            "False with rollout.oversample = 1",
            "Set rollout.oversample to more than 1: else a step waits for all of its responses, and nothing is left.",
        )
        rule("stop", all(self.stop), "texts that are not empty", "Leave the empty one out.")
        rule("noise_visits", self.noise_visits >= 1, ">= 1", "Use 1 for fresh noise at every visit.")
        rule("max_new_tokens", self.max_new_tokens >= 1, ">= 1", "Ask for at least one token.")
        rule("environment_timeout_s", self.environment_timeout_s > 0, "> 0", "Give environments time to answer.")
