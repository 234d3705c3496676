"""Which devices verify, which draft, with what window: a search over all plans. PURE: tables and counts in, plans out.

A plan is one of
    off        every verifier decodes plainly
    coupled    every verifier drafts and verifies on its own devices: verify_s + draft_s a round
    decoupled  some devices draft for all verifiers (N drafters serve M verifiers): a round takes the longer of the
               two, where drafting is w + 1 tokens and one exchange of messages; how many rounds have a window follows
               from acceptance (`pipelined`). For a drafter process that was measured, nobody waits, and the
               tokens that are there follow from its pace, too (`running`)
and is charged for every device of the cluster, used or idle: plans are compared by tokens per second of the whole.
Costs are `CostTable`s and `Grid`s, measured (`specactor profile`) or predicted from device figures (`rooflines.py`).

Compared with Algorithm 1 of 2511.16193 (`benchmarks/paper_algorithms.py`): off and coupled are plans too, drafters and
verifiers need not come in equal numbers, tables take the place of lines, and memory bounds how many requests run at
once. The 1:1 groups of Algorithm 1 are among the plans.

Invariants: the first plan has the most tokens per second, and off wins ties, and wherever no other plan is faster by
more than `margin`; a drafter with acceptance 0 is never in the first plan; survivals that rise never lower the first
plan's speed (where nobody waits: but for rows that cost more than they bring); no plan uses more devices than there
are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, isfinite

from specactor.errors import PlanError
from specactor.planning.plans import (
    Cluster,
    DrafterEngine,
    DrafterOption,
    Placement,
    RolloutPlan,
    VerifierOption,
    fitting,
)
from specactor.planning.throughput_model import AHEAD, Pace, coupled_tokens, pipelined, running
from specactor.rollout.speculation.costs import Grid
from specactor.rollout.speculation.reconfiguration import PLAIN, DraftPlan

MESSAGE_BYTES = 64
"""Of a commit or a tail without its tokens: request, position, versions, lengths, framing."""
TOKEN_BYTES = 4


def search(
    cluster: Cluster,
    verifiers: Sequence[VerifierOption],
    drafters: Sequence[DrafterOption] = (),
    *,
    max_window: int = 16,
    margin: float = 0.0,
) -> list[RolloutPlan]:
    """The best plan of every mode, drafter and pair of engine sizes, fastest first; then off, fewer devices, smaller
    window. `margin`: share by which a plan must be faster than off, to come before it: what predictions err by.

    Raises PlanError where the target fits nowhere, and for a negative margin.
    """
    if not margin >= 0:
        raise PlanError(f"search.margin: got {margin}, expected >= 0. Use 0 where predictions are to be believed.")
    found = [_off(cluster, v) for v in verifiers if v.devices <= cluster.devices and v.requests() != 0]
    if not found:
        raise PlanError(
            f"cluster: got {cluster.devices} devices, verifiers of {sorted(v.devices for v in verifiers)}; expected "
            "one that fits, with memory for its weights and a request. Use more devices, or a shorter context."
        )
    plain = max(plan.tokens_per_s for plan in found)
    for verifier in (v for v in verifiers if v.devices <= cluster.devices):
        for drafter in drafters:
            largest = min(max_window, len(drafter.survival))
            if drafter.name in verifier.costs.drafters:
                found += _best(_coupled(cluster, verifier, drafter, w) for w in range(1, largest + 1))
            for engine in drafter.engines:
                found += _decoupled(cluster, verifier, drafter, engine, largest)
    found = [replace(plan, speedup=plan.tokens_per_s / plain) for plan in found]

    def believed(plan: RolloutPlan) -> float:
        return plan.tokens_per_s / (1.0 if plan.mode == "off" else 1.0 + margin)

    return sorted(found, key=lambda plan: (-believed(plan), plan.mode != "off", *_order(plan)))


def _off(cluster: Cluster, verifier: VerifierOption) -> RolloutPlan:
    engines = cluster.devices // verifier.devices
    load = _Load.of(cluster.requests, engines, verifier.requests())
    seconds = verifier.costs.plain_s(load.requests)
    return _plan(
        cluster,
        PLAIN,
        _Found(engines=engines, load=load, round_s=seconds, tokens=1.0, verifier=verifier),
        reason=f"1 token per {1e3 * seconds:.2f} ms step of {load.requests} requests",
    )


def _coupled(cluster: Cluster, verifier: VerifierOption, drafter: DrafterOption, window: int) -> RolloutPlan | None:
    """None where it does not fit, or nothing would be accepted."""
    engines = cluster.devices // verifier.devices
    fit = verifier.requests(drafter.footprint)
    tokens = coupled_tokens(drafter.survival, window)
    if fit == 0 or tokens <= 1.0:
        return None
    load = _Load.of(cluster.requests, engines, fit)
    verify_s = verifier.costs.verify_s(load.requests, load.requests * (1 + window))
    draft_s = verifier.costs.draft_s(drafter.name, load.requests, window)
    found = _Found(
        engines=engines, load=load, round_s=verify_s + draft_s, tokens=tokens, verifier=verifier, coupled=drafter
    )
    return _plan(
        cluster,
        DraftPlan(mode="coupled", drafter=drafter.name, window=window),
        found,
        reason=f"{tokens:.2f} tokens per round of {1e3 * verify_s:.2f} ms verify + {1e3 * draft_s:.2f} ms draft",
    )


def _decoupled(
    cluster: Cluster,
    verifier: VerifierOption,
    drafter: DrafterOption,
    engine: DrafterEngine,
    max_window: int,
) -> list[RolloutPlan]:
    """The best; none if there is none. Looked at: every number of verifiers, with as many drafters as there is room
    for, and the 1:1 groups of Algorithm 1. Of the best one's drafters those are left idle that it does not need.
    """
    fit = verifier.requests()
    if fit == 0 or drafter.survival[0] <= 0.0:
        return []
    pairs = {(n, (cluster.devices - n * verifier.devices) // engine.devices) for n in _counts(cluster, verifier)}
    groups = cluster.devices // (verifier.devices + engine.devices)
    best: tuple[RolloutPlan, _Pair] | None = None
    for verifying, drafting in sorted(pairs | {(groups, groups)}):
        if verifying and drafting:
            load = _Load.of(cluster.requests, verifying, fit)
            pair = _Pair(
                cluster=cluster,
                verifier=verifier,
                drafter=drafter,
                engine=engine,
                load=load,
                verifying=verifying,
                most=AHEAD * max_window,
            )
            for window in range(1, max_window + 1):
                plan = pair.plan(drafting, window)
                if plan is not None and (best is None or _order(plan) < _order(best[0])):
                    best = (plan, pair)
    if best is None:
        return []
    plan, pair = best
    return [pair.fewest(plan.drafters.engines, plan.window)]


def _order(plan: RolloutPlan) -> tuple[float, int, int]:
    """Fastest first; among equals fewer devices, then the smaller window."""
    return (-plan.tokens_per_s, _used(plan), plan.window)


def _counts(cluster: Cluster, verifier: VerifierOption) -> range:
    """Of verifiers."""
    return range(1, cluster.devices // verifier.devices + 1)


@dataclass(frozen=True, kw_only=True)
class _Load:
    """Of one verifier."""

    requests: int
    """At once."""
    waiting: bool
    """Whether more requests are there than memory for them."""

    @classmethod
    def of(cls, requests: int, engines: int, fit: int | None) -> _Load:
        each = ceil(requests / engines)
        return cls(requests=each if fit is None else min(each, fit), waiting=fit is not None and each > fit)

    def running(self, cluster: Cluster, engines: int) -> int:
        """In all."""
        return min(cluster.requests, engines * self.requests)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What a plan is described by."""

    engines: int
    """Verifiers."""
    load: _Load
    round_s: float
    tokens: float
    verifier: VerifierOption
    coupled: DrafterOption | None = None
    """Drafts on the verifiers' devices."""
    drafters: Placement = field(default_factory=lambda: Placement(engines=0, devices_each=0))


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A verifier's and a drafter's engines at one load."""

    cluster: Cluster
    verifier: VerifierOption
    drafter: DrafterOption
    engine: DrafterEngine
    load: _Load
    verifying: int
    """Verifiers."""
    most: int
    """Draft tokens of a request that its drafter may be ahead."""

    def fewest(self, drafting: int, window: int) -> RolloutPlan:
        """With as few of these drafters as it takes to be as fast as with all."""
        best = self.plan(drafting, window)
        assert best is not None
        low, high = 0, drafting  # with `low` it is slower, with `high` as fast
        while high - low > 1:
            middle = (low + high) // 2
            plan = self.plan(middle, window)
            if plan is not None and plan.tokens_per_s >= best.tokens_per_s:
                best, high = plan, middle
            else:
                low = middle
        return best

    def plan(self, drafting: int, window: int) -> RolloutPlan | None:
        """None where it does not fit, or nothing would be accepted."""
        running = self.load.running(self.cluster, self.verifying)
        served = ceil(running / drafting)
        fit = fitting(self.engine.capacity_bytes, self.drafter.footprint)
        if fit is not None and served > fit:
            return None
        paced = self._lasting(served, window) if self.engine.token_s is None else None
        share, tokens, round_s, bound = paced or self._running(served, window)
        if tokens <= 1.0:
            return None
        sent = MESSAGE_BYTES * 2 + TOKEN_BYTES * (tokens + share * (window + 1))
        memory = self.drafter.footprint
        found = _Found(
            engines=self.verifying,
            load=self.load,
            round_s=round_s,
            tokens=tokens,
            verifier=self.verifier,
            drafters=Placement(
                engines=drafting,
                devices_each=self.engine.devices,
                weights_bytes=memory.weights_bytes / self.engine.devices,
                kv_bytes=memory.request_bytes * served / self.engine.devices,
            ),
        )
        plan = _plan(
            self.cluster,
            DraftPlan(mode="decoupled", drafter=self.drafter.name, window=window),
            found,
            reason=f"{tokens:.2f} tokens per {1e3 * round_s:.2f} ms round {bound}; windows in {share:.0%} of "
            f"rounds, {served} requests per drafter",
        )
        return replace(plan, message_bytes_per_s=sent * running / round_s)

    def _lasting(self, served: int, window: int) -> tuple[float, float, float, str]:
        """(share of rounds with a window, tokens of a round, its seconds, and what they are bound by), where it lasts
        until the next windows are there."""
        draft_s = self.engine.seconds.at(served, window + 1) + self.cluster.message_s
        rounds = pipelined(self.drafter.survival, window)
        share, round_s = self._fastest(window, rounds.ready, rounds.tokens_when_ready, draft_s)
        bound = "bound by drafting" if draft_s >= round_s else "bound by verifying"
        return share, rounds.tokens_at(share), round_s, bound

    def _running(self, served: int, window: int) -> tuple[float, float, float, str]:
        """The same, where it takes what is there."""
        assert self.engine.token_s is not None
        token_s = self.engine.token_s.at(served, 1.0)
        found = running(
            self.drafter.survival,
            window,
            Pace(
                requests=self.load.requests,
                round_s=_raised(self.verifier.costs.verify, self._ahead_s()),
                token_s=token_s,
                message_s=self.cluster.message_s,
                most=self.most,
            ),
        )
        drafted = f"in which {found.round_s / token_s:.1f} tokens are drafted and {found.window:.1f} verified"
        return found.ready, found.tokens, found.round_s, drafted

    def _ahead_s(self) -> float:
        return self.verifier.ahead_s.at(self.load.requests, 1.0) if self.verifier.ahead_s else 0.0

    def _fastest(self, window: int, ready: float, tokens: float, draft_s: float) -> tuple[float, float]:
        """(share of rounds with a window, seconds of a round): the most tokens per second with a share of at most
        `ready`. A verifier may leave windows unverified where rows cost more than they bring. Between the points
        looked at, speed is a ratio of lines, so it is largest at one of them.
        """
        n, grid = self.load.requests, _raised(self.verifier.costs.verify, self._ahead_s())
        rows = [1.0, *(k for k in grid.per_request if 1.0 < k < 1.0 + ready * window), 1.0 + ready * window]
        points = [(k, grid.at(n, k)) for k in rows]
        for (k, a), (m, b) in pairwise(tuple(points)):
            if min(a, b) < draft_s < max(a, b):  # where drafting and verifying take equally long
                points.append((k + (draft_s - a) / (b - a) * (m - k), draft_s))
        shares = [((k - 1.0) / window, max(seconds, draft_s)) for k, seconds in points]
        return max(shares, key=lambda at: ((1.0 + at[0] * (tokens - 1.0)) / at[1], at[0]))


def _plan(cluster: Cluster, draft: DraftPlan, found: _Found, *, reason: str) -> RolloutPlan:
    verifier, load = found.verifier, found.load
    tokens_per_s = load.running(cluster, found.engines) * found.tokens / found.round_s
    assert isfinite(tokens_per_s)
    memory = [verifier.footprint, *([found.coupled.footprint] if found.coupled else [])]
    used = found.engines * verifier.devices + found.drafters.devices
    return RolloutPlan(
        draft=draft,
        verifiers=Placement(
            engines=found.engines,
            devices_each=verifier.devices,
            weights_bytes=sum(m.weights_bytes for m in memory) / verifier.devices,
            kv_bytes=sum(m.request_bytes for m in memory) * load.requests / verifier.devices,
        ),
        drafters=found.drafters,
        idle_devices=cluster.devices - used,
        requests_per_engine=load.requests,
        round_s=found.round_s,
        tokens_per_round=found.tokens,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / cluster.devices,
        reason=f"{reason}; more requests wait" if load.waiting else reason,
    )


def _raised(grid: Grid, seconds: float) -> Grid:
    """By as much everywhere."""
    return replace(grid, seconds=tuple(tuple(s + seconds for s in row) for row in grid.seconds)) if seconds else grid


def _best(plans: Iterable[RolloutPlan | None]) -> list[RolloutPlan]:
    """The fastest, with the fewest devices and the smallest window among equals; none if there is none."""
    there = [plan for plan in plans if plan is not None]
    return [min(there, key=_order)] if there else []


def _used(plan: RolloutPlan) -> int:
    return plan.verifiers.devices + plan.drafters.devices
