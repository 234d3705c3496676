"""A rollout in virtual time, as discrete events. PURE.

Invariants: time is monotonic; every request finishes once; no device is busy for longer than there is time; equal input
gives equal bits. Shapes: N requests, B those on an engine, W positions.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from specactor.planning.plans import Candidates, Cluster, RolloutPlan, VerifierOption
from specactor.rollout.requests import assign
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.simulator.engine import Decider, Engine, Policy, placed, show
from specactor.simulator.requests import (
    DECOUPLED,
    Floats,
    Ints,
    Lengths,
    Progress,
    Remote,
    Requests,
    World,
    draw,
    round_of,
    survivals,
)
from specactor.types import RolloutRequest, SamplingParams


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    plan: RolloutPlan
    lengths: Ints  # [N], tokens
    finish_s: Floats  # [N]: seconds from the rollout's begin
    busy_device_s: float  # of engines that start or verify, and of drafters that draft
    rounds: float
    emitted: float  # tokens, as engines counted them
    drafted: float  # draft tokens that were verified
    accepted: float
    decisions: int
    events: int

    @property
    def seconds(self) -> float:
        return float(self.finish_s.max())

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def simulate(
    cluster: Cluster,
    options: Candidates,
    world: World,
    policy: Policy,
    requests: Requests,
    *,
    age: int = 0,
    seed: Sequence[int] = (0,),
    plan: RolloutPlan | None = None,
) -> Outcome:
    """Simulate one rollout, `age` versions after the drafters' refresh, by `plan` or a search. Raises PlanError where
    nothing fits."""
    assert len(requests) == cluster.requests, len(requests)
    return Rollout(plan or placed(cluster, options, policy), cluster, options, world, policy, requests, age, seed).run()


class Rollout:
    """Events: a request finishes, an engine decides anew."""

    def __init__(
        self,
        plan: RolloutPlan,
        cluster: Cluster,
        options: Candidates,
        world: World,
        policy: Policy,
        requests: Requests,
        age: int,
        seed: Sequence[int],
    ) -> None:
        self.plan, self.cluster, self.options, self.world, self.policy = plan, cluster, options, world, policy
        self.requests, self.age, self.rng = requests, age, np.random.default_rng([*seed, 1])
        self.ids = [str(i) for i in range(len(requests))]
        self.sequences = [DraftSequence(request_id=name, prompt_ids=()) for name in self.ids]
        drawn_N = np.random.default_rng([*seed, 2]).standard_normal(len(requests))
        self.progress = Progress(requests.lengths, drawn_N if requests.luck is None else requests.luck)
        self.finish_N: Floats = np.full(len(requests), np.nan)
        option = next(v for v in options.verifiers if v.devices == plan.verifiers.devices_each)
        self.remote = self._remote()
        self.engines = self._engines(option)
        # a plan that drafts on engines' devices keeps memory for its drafter.
        own = options.drafter(plan.drafter) if plan.mode == "coupled" else None
        self.room = option.requests(own.footprint) if own else option.requests()
        self.ahead_E = np.zeros(len(self.engines), np.int64)
        self.drafting_since: float | None = None
        self.drafting_s = 0.0
        self.left = len(requests)
        self.events = 0
        self._heap: list[tuple[float, int, int]] = []
        self._order = count()

    def _remote(self) -> Remote | None:
        if not self.plan.drafters.engines:
            return None
        drafter, devices = self.options.drafter(self.plan.drafter), self.plan.drafters.devices_each
        assert drafter is not None
        seconds = next(e.seconds for e in drafter.engines if e.devices == devices)
        return Remote(seconds=seconds, served=1.0, message_s=self.cluster.message_s)

    def _engines(self, option: VerifierOption) -> list[Engine]:
        slow_E = np.exp(self.world.jitter * self.rng.standard_normal(self.plan.verifiers.engines))
        fits = {
            name: option.requests(own.footprint)
            for name in option.costs.drafters
            if (own := self.options.drafter(name))
        }
        survivals = {drafter.name: drafter.survival for drafter in self.options.drafters}
        return [
            Engine(
                i, option, Decider(self.plan, option, self.policy, self.remote, fits=fits, survivals=survivals), slow
            )
            for i, slow in enumerate(slow_E.tolist())
        ]

    def run(self) -> Outcome:
        for engine, part in zip(self.engines, self._parts(), strict=True):
            engine.waiting.extend(part)
            engine.since = self.world.start_s
            self._push(engine.since, engine)
        now = 0.0
        while self._heap:
            at, _, index = heapq.heappop(self._heap)
            assert at >= now - 1e-6, f"an event at {at} s after one at {now} s"
            now, self.events = max(now, at), self.events + 1
            self._turn(self.engines[index], now)
        return self._outcome()

    def _parts(self) -> list[list[int]]:
        sampling = SamplingParams(temperature=1.0, max_new_tokens=int(self.requests.lengths.max()))
        all_requests = [
            RolloutRequest(request_id=name, prompt_ids=(), sampling=sampling, seed=0, group_id=group)
            for name, group in zip(self.ids, self.requests.groups.tolist(), strict=True)
        ]
        parts = assign(all_requests, len(self.engines))
        return [[int(request.request_id) for request in part] for part in parts]

    def _push(self, at: float, engine: Engine) -> None:
        heapq.heappush(self._heap, (at, next(self._order), engine.index))

    def _turn(self, engine: Engine, now: float) -> None:
        engine.settle(now, self.progress)
        if engine.round is not None and len(engine.running):
            gone_B = self.progress.rounds_left(engine.running, engine.round) <= 1e-6  # rounds: they add up with errors
            if gone_B.any():
                engine.lucky(self.progress.finish(engine.running[gone_B]))
                gone = engine.remove(gone_B)
                self.finish_N[gone] = now
                self.left -= len(gone)
                for i in gone.tolist():
                    engine.decider.forget(self.ids[i])
        engine.admit(self.room)
        if len(engine.running):
            self._go_on(engine, now)
        else:
            self.ahead_E[engine.index] = 0
            self._drafters_busy(now)

    def _go_on(self, engine: Engine, now: float) -> None:
        engine.since = max(now, engine.since)
        if engine.decisions == 0 or (engine.decider.adapts and engine.is_due()):
            self._decide(engine)
        self._set_round(engine)
        assert engine.round is not None
        self._push(engine.next_s(self.progress.rounds_left(engine.running, engine.round)), engine)

    def _decide(self, engine: Engine) -> None:
        if engine.decider.adapts:
            show(engine, self._survivals, self.ids.__getitem__, self.rng, max_window=self.policy.max_window)
            engine.since += self.world.replan_s * (engine.decisions > 0)
        sequences = [self.sequences[i] for i in engine.running.tolist()]
        engine.decided(engine.decider.decide(sequences, self._served()))

    def _survivals(self, which: Ints, method: str) -> Floats:
        return survivals(
            self.world.methods[method],
            self.requests.odds[which],
            self.progress.done_N[which],
            window=self.policy.max_window + 1,
            age=self.age,
        )

    def _set_round(self, engine: Engine) -> None:
        of, ahead = engine.decision, int((engine.decision.modes == DECOUPLED).sum())
        self.ahead_E[engine.index] = ahead
        self._drafters_busy(engine.since)
        drafting = bool((of.windows > 0).any())
        shape = (len(engine.running), self.policy.max_window + 1)
        remote = self.remote
        if remote is not None:
            remote = replace(remote, served=self._served(), rollback_s=self.world.rollback_s)
        found = round_of(
            self._survivals(engine.running, of.drafter) if drafting else np.zeros(shape),
            of.modes,
            of.windows,
            table=engine.option.costs,
            drafter=of.drafter,
            remote=remote,
            host_s=self.world.host_s,
        )
        engine.set_round(replace(found, seconds=found.seconds * engine.slow))

    def _served(self) -> float:
        return float(self.ahead_E.sum()) / max(1, self.plan.drafters.engines)

    def _drafters_busy(self, now: float) -> None:
        if self.drafting_since is not None:
            self.drafting_s += max(0.0, now - self.drafting_since)
        self.drafting_since = max(now, self.drafting_since or now) if self.ahead_E.any() else None

    def _outcome(self) -> Outcome:
        assert not self.left, f"{self.left} requests were lost"
        assert np.isfinite(self.finish_N).all(), self.finish_N
        verifying_s = sum(self.world.start_s + engine.busy_s for engine in self.engines)
        busy_device_s = verifying_s * self.plan.verifiers.devices_each + self.drafting_s * self.plan.drafters.devices
        return Outcome(
            plan=self.plan,
            lengths=self.requests.lengths,
            finish_s=self.finish_N,
            busy_device_s=busy_device_s,
            rounds=sum(e.rounds for e in self.engines),
            emitted=sum(e.emitted for e in self.engines),
            drafted=sum(e.drafted for e in self.engines),
            accepted=sum(e.accepted for e in self.engines),
            decisions=sum(e.decisions for e in self.engines),
            events=self.events,
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    devices: int
    prompts: int
    group_size: int
    lengths: Lengths
    options: Candidates
    world: World
    policy: Policy
    train_tokens_per_s: float  # of a device: prompt and response tokens, forward and backward
    refresh: bool = False  # the drafter is distilled after each step
    steps: int = 1
    seed: int = 0

    @property
    def cluster(self) -> Cluster:
        return Cluster(devices=self.devices, requests=self.prompts * self.group_size)


@dataclass(frozen=True, kw_only=True)
class Step:
    rollout_s: float
    train_s: float
    sync_s: float
    refresh_s: float
    outcome: Outcome

    @property
    def seconds(self) -> float:
        return self.rollout_s + self.train_s + self.sync_s + self.refresh_s


@dataclass(frozen=True, kw_only=True)
class Run:
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
        return sum(step.rollout_s for step in self.steps)

    @property
    def idle(self) -> float:
        devices = self.job.devices
        idle_s = sum(devices * step.rollout_s - step.outcome.busy_device_s for step in self.steps)
        return idle_s / (devices * self.seconds)


def run(job: Job) -> Run:
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
        tokens = outcome.tokens + len(outcome.lengths) * 512  # of a prompt, which is trained on, too
        step = Step(
            rollout_s=outcome.seconds,
            train_s=tokens / (job.train_tokens_per_s * job.devices),
            sync_s=2.0,
            refresh_s=512.0 / job.devices if job.refresh else 0.0,
            outcome=outcome,
        )
        steps.append(step)
    return Run(job=job, plan=plan, steps=steps)
