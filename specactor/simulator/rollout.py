"""A rollout in virtual time: engines, drafters and requests as discrete events. PURE: values and a seed in, values out.

An event is: an engine's next request finishes, an engine looks at its decisions again, an engine that ran dry begins
to draft for others. In between rounds are aggregated (`engine.py`). An engine reads how busy a drafter is when its own
round changes; a load that others change meanwhile counts from its next event on, at most `LAST_LOOK` rounds later.

Invariants: time is monotonic; every request finishes exactly once, with all its tokens and no more; the emitted tokens
of all engines are those of all requests; no device does two things at once; equal input gives equal bits.

Shape legend: N requests, B those that run on an engine, W positions.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from specactor.errors import PlanError
from specactor.planning.plans import Candidates, Cluster, RolloutPlan, VerifierOption
from specactor.rollout.requests import assign
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.simulator.decide import Decider, placed
from specactor.simulator.engine import DONE, Engine, show
from specactor.simulator.freed import Freed
from specactor.simulator.ledger import ROUNDING_S, Outcome, Span, checked, merged
from specactor.simulator.requests import Floats, Ints, Requests, survivals
from specactor.simulator.speed import DECOUPLED, Beside, Remote, round_of
from specactor.simulator.world import Policy, Truth, drafter_engine, drafter_option
from specactor.types import RolloutRequest, SamplingParams

SHARE_EVERY_S = 0.5
"""Between two times that requests are shared out because engines ran dry."""


def simulate(
    cluster: Cluster,
    belief: Candidates,
    truth: Truth,
    policy: Policy,
    requests: Requests,
    *,
    age: int = 0,
    seed: Sequence[int] = (0,),
    plan: RolloutPlan | None = None,
) -> Outcome:
    """One rollout. `age`: policy versions since the drafters were refreshed; `plan`: instead of searching one.

    Raises PlanError where nothing fits, or truth lacks what belief has.
    """
    if len(requests) != cluster.requests:
        raise PlanError(f"simulate: got {len(requests)} requests, expected the cluster's {cluster.requests}.")
    return Rollout(plan or placed(cluster, belief, policy), cluster, belief, truth, policy, requests, age, seed).run()


class Rollout:
    """The state of one, and its events."""

    def __init__(
        self,
        plan: RolloutPlan,
        cluster: Cluster,
        belief: Candidates,
        truth: Truth,
        policy: Policy,
        requests: Requests,
        age: int,
        seed: Sequence[int],
    ) -> None:
        self.plan, self.cluster, self.belief, self.truth, self.policy = plan, cluster, belief, truth, policy
        self.requests, self.age, self.rng = requests, age, np.random.default_rng([*seed, 1])
        self.ids = [str(i) for i in range(len(requests))]
        self.sequences = [DraftSequence(request_id=name, prompt_ids=()) for name in self.ids]
        self.done_N: Floats = np.zeros(len(requests))
        self.length_N = requests.lengths.astype(np.float64)
        self.finish_N: Floats = np.full(len(requests), np.nan)
        believed = next(v for v in belief.verifiers if v.devices == plan.verifiers.devices_each)
        self.remote, believed_remote = self._remotes(belief)
        self.engines = self._engines(truth.verifier(believed.devices), believed, believed_remote)
        self.room = self._room(belief, believed)
        self.freed = Freed(policy, belief, truth)
        self.ahead_E = np.zeros(len(self.engines), np.int64)
        self.drafting_since: float | None = None
        self.drafter_spans: list[Span] = []
        self.left, self.left_assigned = len(requests), len(requests)
        self.shared_at = -SHARE_EVERY_S
        self.events = 0
        self._heap: list[tuple[float, int, int, int]] = []
        self._order = count()

    def _remotes(self, belief: Candidates) -> tuple[Remote | None, Remote | None]:
        """(true, believed) drafters of the plan, on devices of their own."""
        if not self.plan.drafters.engines:
            return None, None
        name, devices = self.plan.draft.drafter, self.plan.drafters.devices_each
        own = drafter_engine(belief, name, devices)
        assert own is not None
        true = Remote(
            seconds=self.truth.drafter(name, devices).seconds,
            served=1.0,
            message_s=self.truth.message_s,
            rollback_s=self.truth.delays.rollback_s,
        )
        return true, Remote(seconds=own.seconds, served=1.0, message_s=self.cluster.message_s)

    def _engines(self, option: VerifierOption, believed: VerifierOption, remote: Remote | None) -> list[Engine]:
        number = self.plan.verifiers.engines
        slow_E = np.exp(self.truth.jitter * self.rng.standard_normal(number))
        return [
            Engine(i, i * option.devices, option, self._decider(believed, remote), float(slow_E[i]))
            for i in range(number)
        ]

    def _decider(self, believed: VerifierOption, remote: Remote | None) -> Decider:
        fits = {
            name: believed.requests(own.footprint)
            for name in believed.costs.drafters
            if (own := drafter_option(self.belief, name))
        }
        return Decider(self.plan, believed, self.policy, remote, fits=fits)

    def _room(self, belief: Candidates, believed: VerifierOption) -> int | None:
        """Requests at once. A plan that drafts on the verifiers' devices keeps memory for its drafter."""
        own = drafter_option(belief, self.plan.draft.drafter) if self.plan.mode == "coupled" else None
        return believed.requests(own.footprint) if own else believed.requests()

    def run(self) -> Outcome:
        for engine, part in zip(self.engines, self._parts(), strict=True):
            engine.waiting.extend(part)
            engine.since = self.truth.delays.start_s
            self._push(engine.since, engine)
        now = 0.0
        while self._heap:
            at, _, index, version = heapq.heappop(self._heap)
            engine = self.engines[index]
            if version != engine.version:
                continue
            if at < now - ROUNDING_S:
                raise PlanError(
                    f"simulate: got an event at {at} s after one at {now} s. This is a bug of the simulator."
                )
            now, self.events = max(now, at), self.events + 1
            if index in self.freed.lent:
                self._ready(engine, now)
            else:
                self._turn(engine, now)
        return self._outcome()

    def _parts(self) -> list[list[int]]:
        """As the real engines' requests are assigned: groups stay together."""
        sampling = SamplingParams(temperature=1.0, max_new_tokens=int(self.length_N.max()))
        all_requests = [
            RolloutRequest(request_id=name, prompt_ids=(), sampling=sampling, seed=0, group_id=group)
            for name, group in zip(self.ids, self.requests.groups.tolist(), strict=True)
        ]
        parts = assign(all_requests, len(self.engines))
        return [[int(request.request_id) for request in part] for part in parts]

    def _push(self, at: float, engine: Engine) -> None:
        engine.version += 1
        heapq.heappush(self._heap, (at, next(self._order), engine.index, engine.version))

    def _turn(self, engine: Engine, now: float) -> None:
        """An engine's event: what finished leaves, what waits begins, what is due is decided."""
        engine.settle(now, self.done_N)
        left_B = self.length_N[engine.running] - self.done_N[engine.running]
        gone = engine.remove(left_B <= DONE)
        if len(gone):
            self._finished(engine, gone, now)
        engine.admit(self.room)
        before = engine.decisions
        if len(engine.running):
            self._go_on(engine, now)
        else:
            self._dry(engine, now)
        if self.freed.lent and self.left * 8 <= self.left_assigned * 7:
            self._share(now)
        elif self.freed.lent and engine.decisions > before:
            self._share_with([engine], now)

    def _finished(self, engine: Engine, gone: Ints, now: float) -> None:
        self.finish_N[gone] = now
        self.done_N[gone] = self.length_N[gone]
        self.left -= len(gone)
        self.freed.drop(engine, gone, now)
        for i in gone.tolist():
            engine.decider.forget(self.ids[i])

    def _go_on(self, engine: Engine, now: float, *, decide: bool = True) -> None:
        """Its next round from now on, and when it ends to be like that."""
        engine.since = max(now, engine.since)
        if decide and (engine.decisions == 0 or (engine.decider.adapts and engine.is_due())):
            self._decide(engine)
        self._set_round(engine)
        left_B = self.length_N[engine.running] - self.done_N[engine.running]
        self._push(engine.next_s(left_B), engine)

    def _decide(self, engine: Engine) -> None:
        if engine.decider.adapts:
            show(engine, self._survivals, self.ids.__getitem__, self.rng, max_window=self.policy.max_window)
            engine.since += self.truth.delays.replan_s * (engine.decisions > 0)
        sequences = [self.sequences[i] for i in engine.running.tolist()]
        served = float(self.ahead_E.sum()) / max(1, self.plan.drafters.engines)
        plans = engine.plans if engine.decider.remote is not None else ()  # what they do is asked there only
        engine.decided(engine.decider.decide(sequences, plans, served))

    def _survivals(self, which: Ints, method: str) -> Floats:
        return survivals(
            self.truth.methods[method],
            self.requests.odds[which],
            self.done_N[which],
            window=self.policy.max_window + 1,
            age=self.age,
        )

    def _set_round(self, engine: Engine) -> None:
        """What a round truly does."""
        of, ahead = engine.decision, int((engine.decision.modes == DECOUPLED).sum())
        self.ahead_E[engine.index] = ahead
        self._drafters_busy(engine.since)
        drafting = bool((of.windows > 0).any())
        shape = (len(engine.running), self.policy.max_window + 1)
        remote = self.remote
        if remote is not None:
            remote = replace(remote, served=float(self.ahead_E.sum()) / self.plan.drafters.engines)
        found = round_of(
            self._survivals(engine.running, of.drafter) if drafting else np.zeros(shape),
            of.modes,
            of.windows,
            table=engine.option.costs,
            drafter=of.drafter,
            remote=remote,
            beside=[self._beside(engine, method) for method in sorted(engine.beside)],
            alike=self.truth.alike,
        )
        engine.set_round(replace(found, seconds=found.seconds * engine.slow))

    def _beside(self, engine: Engine, method: str) -> Beside:
        some = engine.beside[method]
        rows_R = np.flatnonzero(np.isin(engine.running, list(some)))
        busiest = max((self.freed.lent[w] for w in set(some.values())), key=lambda one: one.load())
        window = self.freed.window(engine, busiest)
        remote = Remote(
            seconds=busiest.true,
            served=busiest.load(),
            message_s=self.truth.message_s,
            rollback_s=self.truth.delays.rollback_s,
        )
        return Beside(
            method=method,
            rows=rows_R,
            survival=self._survivals(engine.running[rows_R], method),
            window=window,
            window_s=remote.window_s(window, 1.0),
        )

    def _drafters_busy(self, now: float) -> None:
        """Spans of the plan's drafters: while any request is drafted for."""
        busy = bool(self.ahead_E.any())
        if busy and self.drafting_since is None:
            self.drafting_since = now
        elif not busy and self.drafting_since is not None:
            own, first = self.plan.drafters, self.plan.verifiers.devices
            for k in range(own.engines):
                self.drafter_spans.append(
                    Span(
                        first=first + k * own.devices_each,
                        devices=own.devices_each,
                        start_s=self.drafting_since,
                        end_s=max(now, self.drafting_since),
                        kind="drafting",
                    )
                )
            self.drafting_since = None

    def _dry(self, engine: Engine, now: float) -> None:
        """Nothing to run here any more."""
        self.ahead_E[engine.index] = 0
        engine.round = None
        self._drafters_busy(now)
        busy = [e for e in self.engines if len(e.running)]
        if self.policy.mode != "auto" or not busy:
            return
        ready = now + self.truth.delays.drafter_start_s
        if self.policy.fastest and self.freed.lend(engine, busy, ready):
            self._push(ready, engine)

    def _ready(self, engine: Engine, now: float) -> None:
        """An engine that ran dry can draft: requests are shared out anew, for several such engines at once."""
        next_s = self.shared_at + SHARE_EVERY_S
        if now >= next_s:
            self._share(now)
        elif self.freed.lent[engine.index].since > self.shared_at:
            self._push(next_s, engine)

    def _share(self, now: float) -> None:
        """Algorithm 3 for what runs; the engines that it touches go on differently."""
        self.left_assigned, self.shared_at = self.left, now
        self._share_with([e for e in self.engines if len(e.running)], now)

    def _share_with(self, busy: Sequence[Engine], now: float) -> None:
        self.freed.served = float(self.ahead_E.sum()) / max(1, self.plan.drafters.engines)
        for index in sorted(self.freed.assign(busy, self.ids, now)):
            engine = self.engines[index]
            engine.settle(now, self.done_N)
            self._go_on(engine, now, decide=False)

    def _outcome(self) -> Outcome:
        if self.left or np.isnan(self.finish_N).any():
            raise PlanError(f"simulate: {self.left} requests were lost. This is a bug of the simulator.")
        spans = [span for engine in self.engines for span in engine.spans] + self.drafter_spans
        for engine in self.engines:
            start = Span(
                first=engine.first,
                devices=engine.option.devices,
                start_s=0.0,
                end_s=self.truth.delays.start_s,
                kind="start",
            )
            spans.append(start)
        spans += self.freed.spans()
        return Outcome(
            plan=self.plan,
            lengths=self.requests.lengths,
            finish_s=self.finish_N,
            spans=checked(merged(spans), self.cluster.devices),
            rounds=sum(e.rounds for e in self.engines),
            emitted=sum(e.emitted for e in self.engines),
            drafted=sum(e.drafted for e in self.engines),
            accepted=sum(e.accepted for e in self.engines),
            decisions=sum(e.decisions for e in self.engines),
            events=self.events,
            lent=len(self.freed.lent),
            pairs=self.freed.pairs,
        )
