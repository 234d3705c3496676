"""Engines that ran dry draft for the others: which method, and for whom (Algorithm 3). PURE.

The method of such an engine is, best first, the one that fewest of them draft with, so the best comes first.
Requests get methods by `fastest`. Beliefs decide; the truth is only looked at for what a window then takes.

Invariants: a request has each method at most once, the one that its engine drafts with included; no drafter exceeds
its bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isfinite
from operator import itemgetter

import numpy as np

from specactor.planning.plans import Candidates, DrafterEngine
from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.costs import Grid
from specactor.rollout.speculation.reconfiguration import LiveCosts
from specactor.rollout.speculation.stragglers import (
    DryWorker,
    Straggler,
    as_published,
    best_window,
    ranked,
    while_it_pays,
)
from specactor.simulator.engine import Engine
from specactor.simulator.ledger import Span
from specactor.simulator.speed import Beside, Ints, Remote, round_of
from specactor.simulator.world import Policy, Truth

ROUGHLY = 10
"""Steps of acceptance in which gains are predicted."""
PUBLISHED_WINDOW = 4
"""Of a further method where `Policy.published` leaves it open."""


@dataclass(slots=True, kw_only=True)
class Lent:
    """An engine that drafts for others."""

    engine: Engine
    method: str
    believed: Grid
    true: Grid
    copies: int
    """Drafters that fit on its devices."""
    since: float
    """When it can draft."""
    requests: set[int] = field(default_factory=set)
    busy_since: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def load(self) -> int:
        """Requests of one copy."""
        return ceil(len(self.requests) / self.copies)

    def remove(self, request: int, now: float) -> None:
        self.requests.discard(request)
        if not self.requests:
            engine = self.engine
            self.spans.append(
                Span(
                    first=engine.first,
                    devices=engine.option.devices,
                    start_s=self.busy_since,
                    end_s=now,
                    kind="fastest",
                )
            )


class Freed:
    """All engines that ran dry."""

    def __init__(self, policy: Policy, belief: Candidates, truth: Truth) -> None:
        self.policy, self.belief, self.truth = policy, belief, truth
        self.lent: dict[int, Lent] = {}
        """By engine."""
        self.served = 1.0
        """Requests of each drafter of the plan, as of late."""
        self.pairs = 0
        """(request, method) pairs that were ever assigned."""
        self._windows: dict[tuple[object, ...], int] = {}

    def lend(self, engine: Engine, busy: Sequence[Engine], now: float) -> bool:
        """Whether there is anything for it to draft with."""
        engines = self._drafters(engine.option.devices)
        if not engines or not busy:
            return False
        counts = {name: sum(one.method == name for one in self.lent.values()) for name in engines}
        method = min(self._ranked(engines, busy), key=lambda name: counts[name])
        own = engines[method]
        self.lent[engine.index] = Lent(
            engine=engine,
            method=method,
            believed=own.seconds,
            true=self.truth.drafter(method, own.devices).seconds,
            copies=engine.option.devices // own.devices,
            since=now,
        )
        return True

    def _drafters(self, devices: int) -> dict[str, DrafterEngine]:
        """By method, the smallest engine for it that fits there."""
        found = {}
        for option in self.belief.drafters:
            own = [e for e in option.engines if e.devices <= devices]
            if own:
                found[option.name] = min(own, key=lambda e: e.devices)
        return found

    def _ranked(self, engines: Mapping[str, DrafterEngine], busy: Sequence[Engine]) -> list[str]:
        """Methods, the best first, at the acceptance seen so far."""
        table = busy[0].decider.believed.costs
        requests = max(1, sum(len(e.running) for e in busy) // len(busy))
        live = {
            name: LiveCosts.of(
                table,
                requests=requests,
                max_window=self.policy.max_window,
                remote=own.seconds,
                served=requests,
                message_s=self.truth.message_s,
            )
            for name, own in engines.items()
        }
        seen = {name: float(np.mean([e.decider.model(name).rate for e in busy])) for name in engines}
        return ranked(seen, live)

    def assign(self, busy: Sequence[Engine], requests_of: Sequence[str], now: float) -> set[int]:
        """Algorithm 3 over what runs; returns the engines whose requests got a method. `requests_of`: ids by index."""
        there = {index: one for index, one in self.lent.items() if one.since <= now and self._room(one) > 0}
        if not there or not busy:
            return set()
        methods = {one.method: one for one in there.values()}
        if all(methods.keys() <= engine.beside.keys() and _is_full(engine, methods) for engine in busy):
            return set()
        by_id = {requests_of[i]: (i, engine) for engine in busy for i in engine.running.tolist()}
        stragglers = [s for engine in busy for s in self._stragglers(engine, requests_of)]
        best_first = self._ranked(
            {name: self._drafters(one.engine.option.devices)[name] for name, one in methods.items()}, busy
        )
        workers = self._least_loaded(there, len(stragglers))
        if self.policy.published:
            found = as_published(stragglers, best_first, workers)
        else:
            gains = _Gains(self, {name: engine for name, (_, engine) in by_id.items()}, methods)
            found = while_it_pays(stragglers, best_first, workers, pays=gains)
        touched = set()
        for pair in found:
            i, engine = by_id[pair.request_id]
            one = self.lent[int(pair.worker)]
            one.busy_since = one.busy_since if one.requests else now
            one.requests.add(i)
            engine.beside.setdefault(pair.method, {})[i] = int(pair.worker)
            touched.add(engine.index)
        self.pairs += len(found)
        return touched

    def _least_loaded(self, there: Mapping[int, Lent], most: int) -> list[DryWorker]:
        """Of each method as many as could get a request each; Algorithm 3 takes none of the others."""
        by_method: dict[str, list[tuple[int, str, Lent]]] = {}
        for index, one in there.items():
            by_method.setdefault(one.method, []).append((len(one.requests), str(index), one))
        return [
            DryWorker(name=name, method=method, load=load, max_load=self.policy.max_load * one.copies)
            for method, some in by_method.items()
            for load, name, one in heapq.nsmallest(most, some, key=itemgetter(0, 1))
        ]

    def _room(self, one: Lent) -> int:
        return self.policy.max_load * one.copies - len(one.requests)

    def _stragglers(self, engine: Engine, requests_of: Sequence[str]) -> Iterable[Straggler]:
        decision = engine.decision
        ids = [requests_of[i] for i in engine.running.tolist()]
        of = decision.drafter if decision.drafter in engine.decider.acceptance else ""
        rates = engine.decider.acceptance[of].survivals(ids, covered=False)[:, 0].tolist() if of else [0.0] * len(ids)
        for i, name, rate, window in zip(engine.running.tolist(), ids, rates, decision.windows.tolist(), strict=True):
            has = {method for method, some in engine.beside.items() if i in some} | ({of} if window else set())
            yield Straggler(request_id=name, acceptance=rate, methods=frozenset(has))

    def window(self, engine: Engine, one: Lent) -> int:
        """Of a further method there: the one of the highest predicted speed."""
        rate = round(engine.decider.model(one.method).rate * ROUGHLY) / ROUGHLY
        requests, load = len(engine.running), max(1, one.load())
        key = (id(engine.decider.believed), one.method, requests, load, rate)
        if key not in self._windows:
            most = self.policy.max_window
            live = LiveCosts.of(
                engine.decider.believed.costs,
                requests=requests,
                max_window=most,
                remote=one.believed,
                served=load,
                message_s=self.truth.message_s,
            )
            self._windows[key] = best_window(rate, live)
        return self._windows[key]

    def drop(self, engine: Engine, gone: Ints, now: float) -> None:
        """These requests have finished, or moved."""
        for method in list(engine.beside):
            some = engine.beside[method]
            for i in gone.tolist():
                worker = some.pop(i, None)
                if worker is not None:
                    self.lent[worker].remove(i, now)
            if not some:
                del engine.beside[method]

    def spans(self) -> list[Span]:
        """While they drafted for anyone."""
        return [span for one in self.lent.values() for span in one.spans]


def _is_full(engine: Engine, methods: Iterable[str]) -> bool:
    """Whether all its requests have all of these already."""
    return all(len(engine.beside[method]) == len(engine.running) for method in methods)


class _Gains:
    """Predicted speed of an engine with a further method for all its requests, over that without."""

    def __init__(self, freed: Freed, engine_of: Mapping[str, Engine], lent: Mapping[str, Lent]) -> None:
        self._freed, self._engine_of, self._lent = freed, engine_of, lent
        self._known: dict[tuple[object, ...], float] = {}

    def __call__(self, request: Straggler, has: frozenset[str], method: str, load: int) -> float:
        engine = self._engine_of[request.request_id]
        rate = round(request.acceptance * ROUGHLY) / ROUGHLY
        key = (engine.index, has, method, load.bit_length(), rate)
        if key not in self._known:
            before = self._speed(engine, rate, has, load)
            self._known[key] = self._speed(engine, rate, has | {method}, load) / before
        return self._known[key]

    def _speed(self, engine: Engine, rate: float, methods: frozenset[str], load: int) -> float:
        requests, most, of = len(engine.running), self._freed.policy.max_window, engine.decision
        own = of.drafter if of.drafter in methods else ""
        survival_BW = np.tile(survival_of(rate if own else 0.0, most), (requests, 1))
        which_B = of.windows > 0 if own else np.zeros(requests, bool)
        remote = engine.decider.remote
        beside = []
        for name in sorted(methods - {own}):
            one = self._lent.get(name)
            if one is None:
                continue
            each = ceil(load / one.copies)
            window = self._freed.window(engine, one)
            beside.append(
                Beside(
                    method=name,
                    rows=np.arange(requests),
                    survival=np.tile(survival_of(engine.decider.model(name).rate, most), (requests, 1)),
                    window=window,
                    window_s=Remote(seconds=one.believed, served=each, message_s=self._freed.truth.message_s).window_s(
                        window
                    ),
                )
            )
        found = round_of(
            survival_BW,
            np.where(which_B, of.modes, 0),
            np.where(which_B, of.windows, 0),
            table=engine.decider.believed.costs,
            drafter=own,
            remote=replace(remote, served=max(1.0, self._freed.served)) if remote else None,
            beside=beside,
        )
        speed = float(found.tokens.mean()) / found.seconds
        assert isfinite(speed)
        return speed
