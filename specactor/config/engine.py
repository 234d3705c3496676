"""One rollout engine, how new weights reach it, and what it promises: `rollout.engine` and `weights_sync`. PURE.

No setting of an engine starts SGLang's own speculation.

Tokens are a function of log-probabilities and noise. Two candidates that are tied to the last place may change places
where a row's log-probabilities have other bits in another batch; then a verification can emit another token than a
plain round, of the same distribution (`guarantee`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from specactor.config.rules import require, rules_of

INEXACT = (
    "SGLang's own speculation does not keep the text: on a GPU it accepts drafts by coins that plain decoding does not "
    "toss, on a CPU it takes the likeliest token at any temperature. Use rollout.speculation."
)
"""Why SGLang's own speculation is refused, and the way out."""


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
    """Times that one engine may be restarted in a run before the run fails."""
    extra_args: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Further SGLang server arguments, by name. With ``enable_return_routed_experts=true`` responses say which
    experts computed their tokens (``train.routing_replay`` sets it). ``attention_backend=tiles`` reads keys
    once for up to eight rows of a request; a run keeps its attention backend for good."""

    start_timeout_s: ClassVar[float] = 1800.0
    """Longest wait for an engine to be ready: reading hundreds of gigabytes from a network takes so long."""
    request_timeout_s: ClassVar[float] = 600.0
    """Longest wait for any sign of progress from a running engine; it gives one several times a second."""

    @property
    def routed_experts(self) -> bool:
        """Return whether responses say which experts computed their tokens."""
        return bool(self.extra_args.get("enable_return_routed_experts"))

    @property
    def attention(self) -> dict[str, str]:
        """SGLang's attention backends by argument, which decide the bits of log-probabilities; none: the device's."""
        return {name: str(value) for name, value in self.extra_args.items() if name.endswith("attention_backend")}

    def __post_init__(self) -> None:
        rule = rules_of(self, "rollout.engine")
        own = sorted(name for name in self.extra_args if name.replace("-", "_").startswith("speculative_"))
        require(not own, "rollout.engine.extra_args", own, "no speculative_* argument", INEXACT)
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
    """Weights reach the engines in buckets."""

    bucket_bytes: int = 64 * 2**20
    """Weights travel in buckets of this size; a trainer rank has two. A larger tensor gets a bucket of its size."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "weights_sync")
        rule(
            "bucket_bytes",
            self.bucket_bytes >= 2**16,
            ">= 65536",
            "It must hold the largest tensor, or it is raised to it.",
        )


SAME_BITS = "same bits in plain rounds, verifications and any batch"
SAME_LAW = "same law and noise; tokens equal but for ties, which `make gpu-check` counts"
ARITHMETICS = {"torch_native": "rows", "tiles": "tiles"}
"""Of our own attention, by SGLang's name of the backend: keys are read once per row, or once per tile of rows."""


class Guarantee(NamedTuple):
    arithmetic: str
    """rows, tiles, or the backend whose own kernel it is."""
    promise: str


def guarantee(engine: EngineConfig, *, gpu: bool, dtype: str) -> Guarantee:
    """Return what these engines promise. Same bits are promised where tests have shown them: on CPUs in float32."""
    default = "" if gpu else "torch_native"
    backend = engine.attention.get("decode_attention_backend") or engine.attention.get("attention_backend") or default
    known = backend == "tiles" or (backend == "torch_native" and not gpu)
    arithmetic = ARITHMETICS[backend] if known else f"{backend or 'SGLang'}'s own kernel"
    return Guarantee(arithmetic, SAME_BITS if known and not gpu and dtype == "float32" else SAME_LAW)
