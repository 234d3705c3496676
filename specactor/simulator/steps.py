"""Whole RL steps in virtual time, and what devices did meanwhile. PURE.

All devices generate, then all train, then weights are synced, then drafters refreshed, as in runs.
Responses are scored as they finish, by a number of workers that take equally long for each. The drafter is refreshed
after the sync, or never, and then its acceptance falls by `Method.staleness` per policy version. The plan is made once,
as Algorithm 1 is.

Invariants: a step's phases follow each other; devices are not busy for longer than there is time; equal input gives
equal bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specactor.errors import PlanError
from specactor.planning.plans import Candidates, Cluster, RolloutPlan
from specactor.simulator.decide import Policy, placed
from specactor.simulator.requests import Floats, Lengths, World, draw
from specactor.simulator.rollout import Outcome, simulate

Refresh = Literal["never", "after"]


@dataclass(frozen=True, kw_only=True)
class Phases:
    """What a step has beside its rollout."""

    train_tokens_per_s_per_device: float
    """Prompt and response tokens, forward and backward."""
    prompt_tokens: int = 512
    """Of a request; trained on too."""
    reward_s: float = 0.05
    """Of one response."""
    reward_workers: int = 64
    sync_s: float = 2.0
    refresh: Refresh = "after"
    refresh_device_s: float = 512.0
    """Device-seconds of distilling the drafter."""

    def __post_init__(self) -> None:
        least = min(self.prompt_tokens, self.reward_s, self.sync_s, self.refresh_device_s)
        if not self.train_tokens_per_s_per_device > 0 or least < 0 or self.reward_workers < 1:
            raise PlanError(f"phases: got {self}, expected > 0 tokens/s, seconds >= 0 and at least one reward worker.")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is simulated."""

    devices: int
    prompts: int
    group_size: int
    lengths: Lengths
    options: Candidates
    world: World
    policy: Policy
    phases: Phases
    steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise PlanError(f"job: got {self.steps} steps, expected at least 1. Simulate one.")

    @property
    def cluster(self) -> Cluster:
        return Cluster(devices=self.devices, requests=self.prompts * self.group_size)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of one step's phases."""

    rollout_s: float
    reward_s: float
    """After the last response, until all are scored."""
    train_s: float
    sync_s: float
    refresh_s: float
    outcome: Outcome
    """Of its rollout."""

    @property
    def seconds(self) -> float:
        return self.rollout_s + self.reward_s + self.train_s + self.sync_s + self.refresh_s


@dataclass(frozen=True, kw_only=True)
class Run:
    """Some steps."""

    job: Job
    plan: RolloutPlan
    steps: Sequence[Step]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def tokens(self) -> int:
        return sum(step.outcome.tokens for step in self.steps)

    @property
    def rollout_s(self) -> float:
        """Of all steps."""
        return sum(step.rollout_s for step in self.steps)

    @property
    def shares(self) -> Mapping[str, float]:
        """Of all device-seconds, by kind, idle ones too."""
        devices, busy_s = self.job.devices, defaultdict[str, float](float)
        for step in self.steps:
            phases = {"train": step.train_s, "sync": step.sync_s, "refresh": step.refresh_s}
            spent = {kind: devices * seconds for kind, seconds in phases.items()}
            for kind, device_s in (spent | dict(step.outcome.busy_s)).items():
                busy_s[kind] += device_s
        found = {kind: device_s / (devices * self.seconds) for kind, device_s in busy_s.items() if device_s}
        return found | {"idle": 1.0 - sum(found.values())}


def run(job: Job) -> Run:
    """All steps. Raises PlanError for what cannot be planned."""
    plan = placed(job.cluster, job.options, job.policy)
    steps: list[Step] = []
    age = 0
    for k in range(job.steps):
        requests = draw(job.lengths, prompts=job.prompts, group_size=job.group_size, seed=(job.seed, k))
        outcome = simulate(
            job.cluster, job.options, job.world, job.policy, requests, age=age, seed=(job.seed, k), plan=plan
        )
        steps.append(_step(job, outcome))
        age = age + 1 if job.phases.refresh == "never" else 0
    return Run(job=job, plan=plan, steps=steps)


def scored_s(finish_N: Floats, *, each_s: float, workers: int) -> float:
    """When the last response is scored, if they are scored in the order in which they finish."""
    ends: list[float] = np.sort(finish_N).tolist()
    for i in range(len(ends)):
        before = ends[i - workers] if i >= workers else 0.0
        ends[i] = max(ends[i], before) + each_s
    return max(ends)


def _step(job: Job, outcome: Outcome) -> Step:
    phases = job.phases
    scored_at = scored_s(outcome.finish_s, each_s=phases.reward_s, workers=phases.reward_workers)
    tokens = outcome.tokens + len(outcome.lengths) * phases.prompt_tokens
    return Step(
        rollout_s=outcome.seconds,
        reward_s=max(0.0, scored_at - outcome.seconds),
        train_s=tokens / (phases.train_tokens_per_s_per_device * job.devices),
        sync_s=phases.sync_s,
        refresh_s=phases.refresh_device_s / job.devices if phases.refresh == "after" else 0.0,
        outcome=outcome,
    )
