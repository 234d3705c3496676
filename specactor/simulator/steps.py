"""Whole RL steps in virtual time, and how busy devices were. PURE.

All devices generate, then all train, then weights are synced, then drafters refreshed, as in runs. A drafter that is
not refreshed loses `Method.staleness` of its acceptance per policy version. The plan is made once, as Algorithm 1 is.
Scoring is left out: it overlaps the rollout but for the last responses.

Invariants: a step's phases follow each other; devices are not busy for longer than there is time; equal input gives
equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specactor.errors import PlanError
from specactor.planning.plans import Candidates, Cluster, RolloutPlan
from specactor.simulator.decide import Policy, placed
from specactor.simulator.requests import Lengths, World, draw
from specactor.simulator.rollout import Outcome, simulate

PROMPT_TOKENS = 512
"""Of a request; trained on too."""
SYNC_S = 2.0
REFRESH_DEVICE_S = 512.0
"""Device-seconds of distilling the drafter."""


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
    train_tokens_per_s: float
    """Of a device: prompt and response tokens, forward and backward."""
    refresh: bool = False
    """The drafter is distilled after each step."""
    steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.train_tokens_per_s > 0:
            raise PlanError(
                f"job: got {self.steps} steps, {self.train_tokens_per_s} trained tokens per second; expected >= 1, > 0."
            )

    @property
    def cluster(self) -> Cluster:
        return Cluster(devices=self.devices, requests=self.prompts * self.group_size)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of one step's phases, in which all devices are busy but for the rollout's."""

    rollout_s: float
    train_s: float
    sync_s: float
    refresh_s: float
    outcome: Outcome
    """Of its rollout."""

    @property
    def seconds(self) -> float:
        return self.rollout_s + self.train_s + self.sync_s + self.refresh_s


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
    def idle(self) -> float:
        """Share of all device-seconds."""
        devices = self.job.devices
        idle_s = sum(devices * step.rollout_s - step.outcome.busy_device_s for step in self.steps)
        return idle_s / (devices * self.seconds)


def run(job: Job) -> Run:
    """All steps. Raises PlanError for what cannot be planned."""
    plan = placed(job.cluster, job.options, job.policy)
    steps: list[Step] = []
    for k in range(job.steps):
        outcome = simulate(
            job.cluster,
            job.options,
            job.world,
            job.policy,
            draw(job.lengths, prompts=job.prompts, group_size=job.group_size, seed=(job.seed, k)),
            age=0 if job.refresh else k,
            seed=(job.seed, k),
            plan=plan,
        )
        tokens = outcome.tokens + len(outcome.lengths) * PROMPT_TOKENS
        step = Step(
            rollout_s=outcome.seconds,
            train_s=tokens / (job.train_tokens_per_s * job.devices),
            sync_s=SYNC_S,
            refresh_s=REFRESH_DEVICE_S / job.devices if job.refresh else 0.0,
            outcome=outcome,
        )
        steps.append(step)
    return Run(job=job, plan=plan, steps=steps)
