"""Whole RL steps in virtual time: rollout, reward, train, sync, refresh; and what devices did meanwhile. PURE.

    synchronous    all devices generate, then all train, then weights are synced, then drafters refreshed
    one-step-off   some devices train on the last step's responses while the others generate; both meet at the sync

Responses are scored as they finish, by a number of workers that take equally long for each. The drafter is refreshed
after the sync, or never, and then its acceptance falls by `Method.staleness` per policy version. The plan is made once,
as Algorithm 1 is.

Invariants: a step's phases follow each other; busy and idle device-seconds add up to devices x seconds; no device does
two things at once; equal input gives equal bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from specactor.errors import PlanError
from specactor.planning.plans import Candidates, Cluster, RolloutPlan
from specactor.simulator.decide import placed
from specactor.simulator.ledger import Outcome, Span, busy_s, checked, moved
from specactor.simulator.requests import Floats, Lengths, draw
from specactor.simulator.rollout import simulate
from specactor.simulator.world import Policy, Truth

Schedule = Literal["synchronous", "one-step-off"]
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
    belief: Candidates
    truth: Truth
    policy: Policy
    phases: Phases
    steps: int = 1
    schedule: Schedule = "synchronous"
    train_devices: int = 0
    """One-step-off: of `devices`, those that train."""
    message_s: float = 1e-4
    """Believed."""
    seed: int = 0

    def __post_init__(self) -> None:
        split = self.schedule == "one-step-off"
        if self.steps < 1 or not (0 < self.train_devices < self.devices if split else self.train_devices == 0):
            raise PlanError(
                f"job: got {self.steps} steps, {self.train_devices} of {self.devices} devices to train, "
                f"{self.schedule}; expected >= 1 step, and devices to train and to generate if one-step-off, else 0."
            )

    @property
    def rollout_devices(self) -> int:
        return self.devices - self.train_devices

    @property
    def cluster(self) -> Cluster:
        """That generates."""
        return Cluster(devices=self.rollout_devices, requests=self.prompts * self.group_size, message_s=self.message_s)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of one step's phases, as far as nothing else runs beside them."""

    start_s: float
    rollout_s: float
    reward_s: float
    """After the last response, until all are scored."""
    train_s: float
    sync_s: float
    refresh_s: float
    """Beyond what idle devices did during the rollout."""
    seconds: float
    outcome: Outcome
    """Of its rollout, in seconds from `start_s`."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Some steps."""

    job: Job
    plan: RolloutPlan
    steps: Sequence[Step]
    spans: Sequence[Span]

    @property
    def seconds(self) -> float:
        return self.steps[-1].start_s + self.steps[-1].seconds

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
        whole = self.job.devices * self.seconds
        found = {kind: spent / whole for kind, spent in busy_s(self.spans).items()}
        return found | {"idle": 1.0 - sum(found.values())}


def run(job: Job) -> Run:
    """All steps. Raises PlanError for what cannot be planned."""
    plan = placed(job.cluster, job.belief, job.policy)
    steps: list[Step] = []
    spans: list[Span] = []
    now, age, pending = 0.0, 0, 0.0
    for k in range(job.steps):
        requests = draw(job.lengths, prompts=job.prompts, group_size=job.group_size, seed=(job.seed, k))
        outcome = simulate(
            job.cluster, job.belief, job.truth, job.policy, requests, age=age, seed=(job.seed, k), plan=plan
        )
        step, own = _step(job, outcome, now, pending)
        steps.append(step)
        spans += own
        now += step.seconds
        age = age + 1 if job.phases.refresh == "never" else 0
        pending = _train_s(job, outcome)
    if job.schedule == "one-step-off":
        last = replace(steps[-1], train_s=pending, seconds=steps[-1].seconds + pending)
        spans.append(_block(job.rollout_devices, job.devices, now, pending, "train"))
        steps[-1] = last
    return Run(job=job, plan=plan, steps=steps, spans=checked([s for s in spans if s.device_s > 0], job.devices))


def scored_s(finish_N: Floats, *, each_s: float, workers: int) -> float:
    """When the last response is scored, if they are scored in the order in which they finish."""
    ends: list[float] = np.sort(finish_N).tolist()
    for i in range(len(ends)):
        before = ends[i - workers] if i >= workers else 0.0
        ends[i] = max(ends[i], before) + each_s
    return max(ends)


def _train_s(job: Job, outcome: Outcome) -> float:
    tokens = outcome.tokens + len(outcome.lengths) * job.phases.prompt_tokens
    return tokens / (job.phases.train_tokens_per_s_per_device * (job.train_devices or job.devices))


def _step(job: Job, outcome: Outcome, now: float, pending_s: float) -> tuple[Step, list[Span]]:
    """`pending_s`: of training on the last step's responses, one-step-off."""
    phases, split = job.phases, job.schedule == "one-step-off"
    scored = scored_s(outcome.finish_s, each_s=phases.reward_s, workers=phases.reward_workers)
    spans = moved(outcome.spans, by_s=now)
    reward_s = max(0.0, scored - outcome.seconds)
    if split:
        train_s, ready = pending_s, now + max(scored, pending_s)
        spans.append(_block(job.rollout_devices, job.devices, now, pending_s, "train"))
    else:
        train_s = _train_s(job, outcome)
        ready = now + scored + train_s
        spans.append(_block(0, job.devices, now + scored, train_s, "train"))
    spans.append(_block(0, job.devices, ready, phases.sync_s, "sync"))
    end = ready + phases.sync_s
    refresh_s = phases.refresh_device_s / job.rollout_devices if phases.refresh == "after" else 0.0
    spans.append(_block(0, job.rollout_devices, end, refresh_s, "refresh"))
    step = Step(
        start_s=now,
        rollout_s=outcome.seconds,
        reward_s=reward_s,
        train_s=train_s,
        sync_s=phases.sync_s,
        refresh_s=refresh_s,
        seconds=end + refresh_s - now,
        outcome=outcome,
    )
    return step, spans


def _block(first: int, end: int, start_s: float, seconds: float, kind: str) -> Span:
    """Devices first..end-1 do one thing."""
    return Span(first=first, devices=end - first, start_s=start_s, end_s=start_s + seconds, kind=kind)
