"""The section `parallel` of a recipe: how a run is spread over devices. PURE.

Checked here: what is right or wrong for every world and every model. `specactor.parallel.layout.check` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from specactor.config.rules import require


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
            require(value >= 1, f"parallel.{name}", value, ">= 1", "Use 1 to switch this kind of parallelism off.")
        require(self.drafters >= 0, "parallel.drafters", self.drafters, ">= 0", "Use 0 for none.")
        require(
            len(self.drafter_devices) in (0, self.drafters),
            "parallel.drafter_devices",
            self.drafter_devices,
            f"one for each of {self.drafters} in parallel.drafters, or none",
            "Leave it out to have them chosen.",
        )
        require(
            min(self.drafter_devices, default=0) >= 0,
            "parallel.drafter_devices",
            self.drafter_devices,
            ">= 0 each",
            "Give numbers of GPUs, or of CPU cores.",
        )
        require(self.timeout_s > 0, "parallel.timeout_s", self.timeout_s, "> 0", "Give seconds, for example 600.")
        require(
            self.virtual_pipeline is None or (self.virtual_pipeline >= 2 and self.pipeline >= 2),
            "parallel.virtual_pipeline",
            self.virtual_pipeline,
            ">= 2, with parallel.pipeline >= 2",
            "Leave it out, or use pipeline parallelism.",
        )
