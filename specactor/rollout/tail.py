"""Wakes drafters that sleep on idle engines' devices (Algorithm 3 of 2511.16193).

Invariants: at most one is awake; it leaves before its engine gets requests; it is woken only where it should pay; no
token changes; who lends or takes back waits for no process.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

import numpy as np

from specactor.config import Config
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.sglang.engine_client import Engine
from specactor.rollout.speculation.costs import METHOD
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.decoupled_rounds import LiveCosts
from specactor.rollout.speculation.fastest_of_n import gain_after, speedup

ASK_EVERY_S = 0.1  # events come by the hundred per second, and a prediction looks at every request
RETURN_SHARE = 0.2  # of the way back to the first belief, per step without any draft of theirs


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    engine: int
    slots: int  # requests that it decodes together; others wait
    running: tuple[tuple[int, int], ...]  # tokens emitted, and at most, of each request
    wake_rounds: float | None = None  # until the drafter on its device is awake; None: it is busy, or none sleeps


@dataclass(frozen=True, kw_only=True)
class WakeWhereItPays:
    """Decides whether to wake a drafter. Its costs are in rounds of an engine with one request."""

    per_request: float = 0.05  # of a round, per request beyond the first, or per verified row
    margin: float = 0.05  # share of a request's time left that a drafter must save
    draft_step: float = 0.2  # of a round: a draft token of each request
    acceptance: float = 0.6  # P(the first draft token is accepted) of a woken drafter, as believed now
    first_acceptance: float = 0.6  # what is believed before any was seen
    max_window: int = 8
    notice_rounds: float = 32.0  # until an engine that found no drafter looks for one again

    def engine_to_wake(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> int | None:
        """Return the engine whose drafter is awake soonest, if that pays. PURE. `loads` are of living engines,
        `finished` lengths in tokens."""
        wakes = [(load.wake_rounds, load.engine) for load in loads if load.wake_rounds is not None]
        if not wakes:
            return None
        soonest, engine = min(wakes)
        lengths = sorted(finished)
        sums = [*accumulate(lengths, initial=0)]
        # One drafter drafts for all requests, so its time is charged for all.
        served = sum(min(len(load.running), load.slots) for load in loads)

        @cache
        def faster(requests: int) -> float:
            return max(1.0, speedup(self.acceptance, self._live_costs(requests, served)))

        pays = any(
            gain_after(
                soonest + self.notice_rounds,
                expected_left(lengths, sums, emitted, limit),
                faster(min(len(load.running), load.slots)),
            )
            > 1.0 + self.margin
            for load in loads
            for emitted, limit in load.running
        )
        return engine if pays else None

    def after(self, counts: Mapping[str, Counts]) -> WakeWhereItPays:
        """Return the next step's policy, given each drafter's counts."""
        own, believed, first = counts.get(METHOD, Counts()), self.acceptance, self.first_acceptance
        # a drafter that is believed to be bad is not woken, so nothing of it is seen, though it may have learned
        # since: such a belief goes back to the first one, until the drafter is tried again.
        acceptance = own.acceptance(believed) if own.drafted_at[0] else believed + RETURN_SHARE * (first - believed)
        return replace(self, acceptance=acceptance)

    def _live_costs(self, requests: int, served: int) -> LiveCosts:
        rows_W = requests * np.arange(1.0, self.max_window + 2)
        verify_W = 1.0 + self.per_request * (rows_W - 1.0)
        step = self.draft_step * (1.0 + self.per_request * (served - 1))
        return LiveCosts(
            plain_s=float(verify_W[0]),
            verify_s=verify_W,
            draft_s=step * np.arange(2.0, self.max_window + 2),
        )


def tail_policy(config: Config) -> WakeWhereItPays | None:
    max_window = config.rollout.speculation.max_window
    return WakeWhereItPays(max_window=max_window) if config.lends_devices else None


def expected_left(lengths: Sequence[int], sums: Sequence[int], emitted: int, limit: int) -> float:
    """Return the tokens left if a response goes on as longer ones did, from 1 to the limit. `lengths` rise; `sums` are
    of the first none, one, two, .. of them."""
    shorter = bisect_right(lengths, emitted)
    longer = len(lengths) - shorter
    mean = (sums[-1] - sums[shorter]) / longer if longer else float(limit)
    return max(1.0, min(mean, limit) - emitted)


class BorrowedDevices:
    """The devices of idle engines in one rollout. Engines are positions."""

    def __init__(
        self,
        engines: Sequence[Engine],
        drafters: DrafterPool | None,
        policy: WakeWhereItPays | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_woken = 0
        self._engines, self._drafters, self._policy, self._clock = engines, drafters, policy, clock
        self._began_s, self._asked_s = clock(), -float("inf")
        self._dry: set[int] = set()  # engines of which the drafters know that they have nothing to do
        self._woken: set[int] = set()  # engines whose drafter was woken, also while an environment is waited for

    def give_back(self, engine: int) -> None:
        """Call it before the engine gets requests."""
        if self._drafters is not None and engine in self._dry | self._woken:
            self._dry.discard(engine)
            self._woken.discard(engine)
            self._drafters.sleep(self._engines[engine].index)

    def lend(
        self, loads: Callable[[], Sequence[EngineLoad]], dry: Iterable[int], finished: Iterable[int], rounds: int
    ) -> None:
        """Wake a drafter, if that pays; `finished` are lengths in tokens."""
        if self._drafters is None or self._policy is None:
            return
        for engine in set(dry) - self._dry:
            self._dry.add(engine)
            self._drafters.free(self._engines[engine].index)
        now_s = self._clock()
        # One that is awake drafts for all, also for a dead engine's successor.
        if now_s - self._asked_s < ASK_EVERY_S or self._drafters.any_awake():
            return
        self._asked_s = now_s
        engine_to_wake = self._policy.engine_to_wake(self._with_wakes(loads(), rounds), list(finished))
        if engine_to_wake is not None:
            self._drafters.wake(self._engines[engine_to_wake].index)
            self._woken.add(engine_to_wake)
            self.num_woken += 1

    def _with_wakes(self, loads: Sequence[EngineLoad], rounds: int) -> list[EngineLoad]:
        assert self._drafters is not None
        rounds_per_s = rounds / max(self._clock() - self._began_s, 1e-6)
        found = []
        for load in loads:
            wake_s = None if load.running or not rounds else self._drafters.wake_s(self._engines[load.engine].index)
            found.append(replace(load, wake_rounds=None if wake_s is None else wake_s * rounds_per_s))
        return found
