"""The section `parallel` of a recipe: how a run is spread over devices. PURE.

Checked here: what is right or wrong for every world and every model. `specactor.parallel.layout.check` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_network
from typing import Literal

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
    """Drafter processes on each of drafter_hosts, for rollout.speculation.mode decoupled."""
    drafter_hosts: tuple[int, ...] = ()
    """Hosts that get drafter processes, by number: 0 has rank 0, others follow in the order of ranks; empty: all."""
    drafters_serve: Literal["host", "job"] = "host"
    """Engines that a drafter process drafts for. host: those of its own; job: those of all hosts, by load. Then
    drafters listen on TCP where there are several hosts, and both ends prove CURVE keys that are made for the run."""
    drafter_network: str = ""
    """For drafters_serve job, the network by which hosts reach each other, as in 10.1.0.0/16; empty: the one by which
    they reach the host of rank 0."""
    drafter_devices: tuple[int, ...] = ()
    """The GPU of each drafter process of a host, or without GPUs its CPU core; empty: the devices after those of the
    host's ranks, and from the first one again where there are no more."""
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
        require(
            len(set(self.drafter_hosts)) == len(self.drafter_hosts) and min(self.drafter_hosts, default=0) >= 0,
            "parallel.drafter_hosts",
            self.drafter_hosts,
            "numbers of hosts from 0 on, every one once",
            "Leave it out to give drafters to all hosts.",
        )
        require(
            self.drafter_network == "" or (self.drafters_serve == "job" and _is_network(self.drafter_network)),
            "parallel.drafter_network",
            self.drafter_network,
            "a network such as 10.1.0.0/16, with parallel.drafters_serve job",
            "Leave it out to have it found.",
        )
        require(self.timeout_s > 0, "parallel.timeout_s", self.timeout_s, "> 0", "Give seconds, for example 600.")
        require(
            self.virtual_pipeline is None or (self.virtual_pipeline >= 2 and self.pipeline >= 2),
            "parallel.virtual_pipeline",
            self.virtual_pipeline,
            ">= 2, with parallel.pipeline >= 2",
            "Leave it out, or use pipeline parallelism.",
        )


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True
