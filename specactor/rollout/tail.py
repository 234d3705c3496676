"""Wakes drafters that sleep on idle engines' devices (Algorithm 3 of 2511.16193).

Invariants: at most one is awake; it leaves before its engine gets requests; no token changes; who lends or takes back
waits for no process.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate

from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.sglang.engine_client import Engine
from specactor.rollout.speculation.drafter_set import ABSENT

ASK_EVERY_S = 0.1  # events come by the hundred per second, and all requests are looked at
NOTICE_ROUNDS = 2.0**ABSENT  # until an engine that found no drafter looks for one again
Running = Iterable[tuple[int, int]]  # tokens emitted, and at most, of each running request


def is_worth_waking(waking_rounds: float, running: Running, finished: Iterable[int]) -> bool:
    """Return whether a request is expected to go on for twice as long as waking takes. PURE. `finished` are lengths in
    tokens."""
    # Whether drafts then pay is decided by the engines that verify them: the device has nothing else to do.
    lengths = sorted(finished)
    sums = [*accumulate(lengths, initial=0)]
    return any(expected_left(lengths, sums, emitted, limit) > 2 * waking_rounds for emitted, limit in running)


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
        self, engines: Sequence[Engine], drafters: DrafterPool, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_woken = 0
        self._engines, self._drafters, self._clock = engines, drafters, clock
        self._began_s, self._asked_s = clock(), -float("inf")
        self._dry: set[int] = set()  # engines of which the drafters know that they have nothing to do

    def give_back(self, engine: int) -> None:
        """Call it before the engine gets requests."""
        if engine in self._dry:
            self._dry.discard(engine)
            self._drafters.sleep(self._engines[engine].index)

    def lend(self, dry: Collection[int], running: Callable[[], Running], finished: Iterable[int], rounds: int) -> None:
        """Wake the drafter that is awake soonest, if that is worth it. `finished` are lengths in tokens, `rounds` those
        of this rollout so far."""
        if not self._drafters.can_lend:
            return
        for engine in set(dry) - self._dry:
            self._dry.add(engine)
            self._drafters.free(self._engines[engine].index)
        now_s = self._clock()
        # One that is awake drafts for all, also for a dead engine's successor.
        if now_s - self._asked_s < ASK_EVERY_S or self._drafters.any_awake() or not rounds:
            return
        self._asked_s = now_s
        wakes = [(self._drafters.wake_s(self._engines[engine].index), engine) for engine in dry]
        soonest_s, engine = min(((s, engine) for s, engine in wakes if s is not None), default=(None, -1))
        if soonest_s is None:
            return
        rounds_per_s = rounds / max(now_s - self._began_s, 1e-6)
        if is_worth_waking(soonest_s * rounds_per_s + NOTICE_ROUNDS, running(), finished):
            self._drafters.wake(self._engines[engine].index)
            self.num_woken += 1
