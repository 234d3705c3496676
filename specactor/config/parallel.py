"""The section `parallel` of a recipe: how a run is spread over devices. PURE.

Checked here: what is right or wrong for every world and every model. `specactor.parallel.layout.check` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_network
from typing import ClassVar

from specactor.config.rules import rules_of


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
    0: one sleeps on each engine's device that no other engine has, and when that has run dry it drafts for the others
    that the same rank drives, until the rollout ends, if that is predicted to pay. On GPUs it must fit beside the
    engine: set rollout.engine.max_total_tokens, which is also its room."""
    drafter_hosts: tuple[int, ...] = ()
    """Empty: each host has drafter processes, for its own engines. Else those that have them, by number (0 has rank 0,
    others follow in the order of ranks), for the engines of all hosts, by load. Then they listen on TCP where there are
    several hosts, and both ends prove CURVE keys that are made for the run."""
    drafter_network: str = ""
    """With drafter_hosts, the network by which hosts reach each other, as in 10.1.0.0/16; empty: the one by which they
    reach the host of rank 0."""

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
            "drafter_network",
            self.drafter_network == "" or (bool(self.drafter_hosts) and _is_network(self.drafter_network)),
            "a network such as 10.1.0.0/16, with parallel.drafter_hosts",
            "Leave it out to have it found.",
        )
        rule(
            "virtual_pipeline",
            self.virtual_pipeline is None or (self.virtual_pipeline >= 2 and self.pipeline >= 2),
            ">= 2, with parallel.pipeline >= 2",
            "Leave it out, or use pipeline parallelism.",
        )


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True
