"""One rollout engine, and how new weights reach it: the sections `rollout.engine` and `weights_sync`. PURE.

No setting of an engine starts SGLang's own speculation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specactor.config.rules import require

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
        require(not own, "rollout.engine.extra_args", own, "no speculative_* argument", INEXACT)
        require(
            self.max_running_requests >= 1,
            "rollout.engine.max_running_requests",
            self.max_running_requests,
            ">= 1",
            "Use a positive number.",
        )
        require(
            0 < self.memory_fraction < 1,
            "rollout.engine.memory_fraction",
            self.memory_fraction,
            "between 0 and 1",
            "Use for example 0.5.",
        )
        require(
            self.max_total_tokens is None or self.max_total_tokens >= 1,
            "rollout.engine.max_total_tokens",
            self.max_total_tokens,
            ">= 1 or None",
            "Use None to let SGLang decide.",
        )
        for name in ("start_timeout_s", "request_timeout_s"):
            value = getattr(self, name)
            require(value > 0, f"rollout.engine.{name}", value, "> 0", "Give seconds.")
        require(
            self.max_restarts >= 0,
            "rollout.engine.max_restarts",
            self.max_restarts,
            ">= 0",
            "Use 0 to fail at the first crash.",
        )


@dataclass(frozen=True, kw_only=True)
class WeightsSyncConfig:
    """How new weights reach the engines."""

    bucket_bytes: int = 64 * 2**20
    """Weights travel in buckets of this size; a trainer rank has two. A larger tensor gets a bucket of its size."""
    timeout_s: float = 300.0
    """Longest wait for one bucket to be taken."""

    def __post_init__(self) -> None:
        require(
            self.bucket_bytes >= 2**16,
            "weights_sync.bucket_bytes",
            self.bucket_bytes,
            ">= 65536",
            "It must hold the largest tensor, or it is raised to it.",
        )
        require(self.timeout_s > 0, "weights_sync.timeout_s", self.timeout_s, "> 0", "Give seconds.")
