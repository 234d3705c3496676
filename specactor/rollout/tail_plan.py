"""What to do with the requests that are left when an engine has run dry, and with that engine's device. PURE: loads in;
moves, replicas and drafters to be woken out.

Most responses are short, a few are long, so late in a rollout some engines have nothing left and others have. A
**move** takes a request to a dry engine, which computes the keys of its prefix again and goes on. A **replica** is the
same request on a dry engine as well (Algorithm 3 of 2511.16193, with engines in place of drafters): whichever ends
first is kept. All engines emit the same tokens, so neither changes a response, up to rounding (`continuation`).
Where neither is done, a **drafter** that sleeps on the dry engine's device can be woken, and drafts for the engines
that still work (Algorithm 3 as published, `planning.fastest`).

Time is counted in rounds of an engine with one request. A round of b requests takes 1 + per_request (b - 1), a request
that is moved `per_prefill_token` for each token of its prefix. A round reads a row per token that it verifies, and a
row costs what a request does; a drafter's round of b requests takes `draft_step` of a round of b. A request is expected
to go on as responses of this rollout did that were longer than it is now.

Invariants: no request is lost or moved twice in one plan; only engines that were dry get requests; a move is predicted
to end the rollout of the two engines earlier, by more than `margin` of it; a request never runs twice on one engine,
nor on more engines than allowed; at most one drafter is woken in one plan, on a dry engine, and it drafts for all
requests; equal input gives equal plans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import ClassVar, Protocol

import numpy as np

from specactor.config import TailConfig
from specactor.errors import PlanError
from specactor.rollout.draft.counts import Counts
from specactor.rollout.planning.costs import METHOD
from specactor.rollout.planning.fastest import DryWorker, Straggler, while_it_pays
from specactor.rollout.planning.freed import gain, gain_after
from specactor.rollout.planning.reconfiguration import LiveCosts

NEWS_SHARE = 0.125
"""Change of an engine's requests, or of the tokens so far, after which a plan may come out differently."""
RETURN_SHARE = 0.2
"""Of the way back to the first belief about their acceptance, per step without any draft of theirs."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A request on an engine."""

    request_id: str
    length: int
    """Tokens of prompt and response so far: what another engine would have to compute again."""
    emitted: int
    max_new_tokens: int
    on_its_way: bool = False
    """To the engine that it is counted on, and ending on another."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """What an engine that is alive has to do, and what is on its way to it."""

    engine: int
    slots: int
    """Requests that it decodes together; others wait."""
    running: tuple[Running, ...]
    wake_rounds: float | None = None
    """Rounds until the drafter on its device is awake, if one may be woken there: none is while another is awake."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """End the request on one engine, and go on with it on another."""

    request_id: str
    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Let another engine generate the request as well."""

    request_id: str
    target: int


@dataclass(frozen=True, kw_only=True)
class Lend:
    """Wake the drafter on the device of this engine, which is dry."""

    engine: int


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What of a rollout's state decides whether to plan again: numbers that are at hand at every event."""

    requests: Mapping[int, int]
    """Per engine that is alive, how many it has, and are on their way to it."""
    longest: int
    """Most tokens that a request has emitted."""


def is_news(before: Standing | None, now: Standing) -> bool:
    """Whether to plan again, when nothing was to be done `before`. A plan looks at every request, and events come by
    the hundred per second, so it is made when an engine's requests, or the tokens so far, have changed by `NEWS_SHARE`:
    with few requests at every end of one, and whenever an engine runs dry, has requests again, or dies."""
    if before is None or before.requests.keys() != now.requests.keys():
        return True
    changes = [(before.requests[engine], count) for engine, count in now.requests.items()]
    return any(abs(new - old) >= max(1, NEWS_SHARE * old) for old, new in [*changes, (before.longest, now.longest)])


class Lengths:
    """Of the responses that finished in this rollout."""

    def __init__(self, finished: Iterable[int] = ()) -> None:
        self._sorted = sorted(finished)
        self._sums = list(accumulate(reversed(self._sorted), initial=0))

    def left(self, emitted: int, limit: int) -> float:
        """Tokens that a response of `emitted` tokens is expected to get yet: 1 at least, the limit keeps."""
        longer = len(self._sorted) - bisect_right(self._sorted, emitted)
        mean = self._sums[longer] / longer if longer else float(limit)
        return max(1.0, min(mean, limit) - emitted)


@dataclass(frozen=True, kw_only=True)
class TailCosts:
    """In rounds of an engine with one request."""

    per_request: float = 0.05
    """Of a round, for each request beyond the first."""
    per_prefill_token: float = 0.02
    margin: float = 0.05
    """Share of the time left that a move, or a drafter, must save."""
    draft_step: float = 0.2
    """Of a round: a draft token of each request."""
    acceptance: float = 0.6
    """P(the first draft token is accepted), of a drafter on a dry engine's device, as believed now."""
    first_acceptance: float = 0.6
    """As believed before any was seen."""
    max_window: int = 8
    notice_rounds: float = 32.0
    """Until an engine that found no drafter looks for one again."""


class TailPolicy(Protocol):
    """Asked when a response has got longer or has ended. A test may give its own."""

    @property
    def needs_dry(self) -> bool:
        """It plans nothing while all engines have requests, and what it does not do it would not do a little later:
        it is asked while an engine is dry, when there are news (`is_news`)."""

    def decide(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> Sequence[Move | Replica | Lend]:
        """Args: engines that are alive; lengths of the responses that finished."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The shipped policy: moves that pay; else replicas on engines that are dry; else drafters on their devices."""

    needs_dry: ClassVar[bool] = True
    migrate: bool
    replicas: int = 1
    """Engines that one request may run on."""
    drafters: bool = False
    costs: TailCosts = field(default_factory=TailCosts)

    def decide(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> Sequence[Move | Replica | Lend]:
        """See `TailPolicy`."""
        if len(loads) < 2 or all(load.running for load in loads):
            return []
        lengths = Lengths(finished)
        moves = plan_moves(loads, lengths, self.costs) if self.migrate else []
        replicas = [] if moves else plan_replicas(loads, lengths, self.replicas)
        return moves or replicas or (plan_drafters(loads, lengths, self.costs) if self.drafters else [])

    def after(self, counts: Mapping[str, Counts]) -> Planned:
        """The policy of the next step. Args: what speculation did in this one, per drafter.

        A drafter that is believed to be bad is not woken, so nothing of it is seen, though it may have learned since:
        a belief that is not confirmed goes back to the first one, until the drafter is tried again."""
        own, believed, first = counts.get(METHOD, Counts()), self.costs.acceptance, self.costs.first_acceptance
        acceptance = own.acceptance(believed) if own.drafted_at[0] else believed + RETURN_SHARE * (first - believed)
        return replace(self, costs=replace(self.costs, acceptance=acceptance))


def tail_policy(config: TailConfig, *, max_window: int = TailCosts.max_window) -> Planned | None:
    """What a run asked for; None: nothing is done. Args: most draft tokens of a request and round."""
    if not config.is_on:
        return None
    costs = TailCosts(max_window=max_window)
    return Planned(migrate=config.migrate, replicas=config.replicas, drafters=config.drafters, costs=costs)


def plan_moves(loads: Sequence[EngineLoad], lengths: Lengths, costs: TailCosts) -> list[Move]:
    """Requests from the engine that is expected to end last to dry ones, one after the other while that pays."""
    now = {load.engine: load for load in _checked(loads)}
    places = Counter(r.request_id for load in loads for r in load.running)
    fixed = {r.request_id for load in loads for r in load.running if r.on_its_way or places[r.request_id] > 1}
    extra = dict.fromkeys(now, 0.0)  # rounds for the prefixes of what was moved there
    dry = [load.engine for load in loads if not load.running]
    found: list[Move] = []
    while dry:
        ends = {engine: extra[engine] + _rounds(load, lengths, costs) for engine, load in now.items()}
        source = max((e for e in now if e not in dry), key=lambda e: (ends[e], -e), default=None)
        target = min(dry, key=lambda e: (ends[e], e))
        if source is None:
            break
        best: tuple[float, Running] | None = None
        for request in _candidates(now[source], fixed, lengths):
            rest = replace(now[source], running=tuple(r for r in now[source].running if r is not request))
            more = replace(now[target], running=(*now[target].running, request))
            end = max(
                extra[source] + _rounds(rest, lengths, costs),
                extra[target] + costs.per_prefill_token * request.length + _rounds(more, lengths, costs),
            )
            if best is None or end < best[0]:
                best = (end, request)
        if best is None or best[0] >= (1 - costs.margin) * ends[source]:
            break
        request = best[1]
        now[source] = replace(now[source], running=tuple(r for r in now[source].running if r is not request))
        now[target] = replace(now[target], running=(*now[target].running, request))
        extra[target] += costs.per_prefill_token * request.length
        found.append(Move(request_id=request.request_id, source=source, target=target))
    return found


def plan_replicas(loads: Sequence[EngineLoad], lengths: Lengths, replicas: int) -> list[Replica]:
    """The requests that are expected to go on longest, each to the dry engine with the least, up to its slots."""
    places: dict[str, set[int]] = {}
    requests: dict[str, Running] = {}
    for load in _checked(loads):
        for request in load.running:
            if request.on_its_way:
                continue
            places.setdefault(request.request_id, set()).add(load.engine)
            requests[request.request_id] = request
    room = {load.engine: load.slots for load in loads if not load.running}
    slots = dict(room)
    longest = sorted(requests.values(), key=lambda r: (-lengths.left(r.emitted, r.max_new_tokens), r.request_id))
    found: list[Replica] = []
    for request in longest:
        at = places[request.request_id]
        while len(at) < replicas:
            target = max((e for e in room if e not in at), key=lambda e: (room[e] - slots[e], -e), default=None)
            if target is None or room[target] == 0:
                break
            room[target] -= 1
            at.add(target)
            found.append(Replica(request_id=request.request_id, target=target))
    return found


def plan_drafters(loads: Sequence[EngineLoad], lengths: Lengths, costs: TailCosts) -> list[Lend]:
    """The drafter that wakes soonest on a dry engine's device, if it is predicted to pay for some request (Algorithm 3,
    `fastest.while_it_pays`). It will draft for all requests, so one is enough, and its time is charged for all."""
    wakes = {e.engine: e.wake_rounds for e in _checked(loads) if not e.running and e.wake_rounds is not None}
    if not wakes:
        return []
    soonest = min(wakes, key=lambda engine: (wakes[engine], engine))
    wake_rounds = wakes[soonest] + costs.notice_rounds
    on = {request.request_id: (request, load) for load in loads for request in load.running}
    served = sum(min(len(load.running), load.slots) for load in loads)

    @cache
    def faster(requests: int) -> float:
        return gain(costs.acceptance, _live(costs, requests, served))

    def pays(straggler: Straggler, has: frozenset[str], method: str, load_of_worker: int) -> float:
        request, load = on[straggler.request_id]
        left = lengths.left(request.emitted, request.max_new_tokens)
        return gain_after(wake_rounds, left, faster(min(len(load.running), load.slots)))

    found = while_it_pays(
        [Straggler(request_id=name, acceptance=costs.acceptance) for name in on],
        [METHOD],
        [DryWorker(name=str(soonest), method=METHOD, max_load=1)],
        pays=pays,
        margin=costs.margin,
    )
    return [Lend(engine=soonest)] if found else []


def _live(costs: TailCosts, requests: int, served: int) -> LiveCosts:
    """In rounds of an engine with one request. Args: requests of the engine, and of the drafter."""
    rows_W = requests * np.arange(1.0, costs.max_window + 2)
    verify_W = 1.0 + costs.per_request * (rows_W - 1.0)
    step = costs.draft_step * (1.0 + costs.per_request * (served - 1))
    return LiveCosts(
        plain_s=float(verify_W[0]),
        verify_s=verify_W,
        coupled_draft_s=None,
        decoupled_draft_s=step * np.arange(2.0, costs.max_window + 2),
    )


def _rounds(load: EngineLoad, lengths: Lengths, costs: TailCosts) -> float:
    """Until all of its requests have ended."""
    if not load.running:
        return 0.0
    left = [lengths.left(r.emitted, r.max_new_tokens) for r in load.running]
    together = min(len(left), load.slots)
    return max(max(left), sum(left) / load.slots) * (1 + costs.per_request * (together - 1))


def _candidates(load: EngineLoad, fixed: Collection[str], lengths: Lengths) -> list[Running]:
    """The one whose keys are computed again soonest, and the one that goes on longest."""
    movable = [r for r in load.running if r.request_id not in fixed]
    if len(load.running) < 2 or not movable:
        return []
    shortest = min(movable, key=lambda r: (r.length, r.request_id))
    longest = max(movable, key=lambda r: (lengths.left(r.emitted, r.max_new_tokens), r.request_id))
    return [shortest] if shortest is longest else [shortest, longest]


def _checked(loads: Sequence[EngineLoad]) -> Sequence[EngineLoad]:
    if len({load.engine for load in loads}) < len(loads) or any(load.slots < 1 for load in loads):
        raise PlanError(
            f"tail: got engines {[(load.engine, load.slots) for load in loads]}, expected each once with a slot"
        )
    return loads
