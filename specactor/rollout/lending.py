"""Drafters on the devices of engines that have run dry, or were set aside, as one rollout uses them.

Engines are positions here, and `EngineSpec.index` for `Sleepers`.

Invariants: a drafter is told once that its engine has nothing to do, and again only after the engine had something; it
leaves before its engine is given requests; an engine that was set aside stays so while its drafter lives; nothing here
waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from specactor.errors import PlanError
from specactor.rollout.sglang.engine import Engine


class Sleepers(Protocol):
    """Drafters on devices of engines, by `EngineSpec.index`; see `DrafterPool`. Nothing here waits."""

    def any_awake(self) -> bool: ...

    def free(self, engine: int) -> None: ...

    def is_awake(self, engine: int) -> bool: ...

    def wake_s(self, engine: int) -> float | None: ...

    def wake(self, engine: int) -> None: ...

    def sleep(self, engine: int) -> None: ...


class Lending:
    """May be without any drafter; then it does nothing."""

    def __init__(
        self,
        engines: Sequence[Engine],
        drafters: Sleepers | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The rollout begins now."""
        self.times = 0
        """That a drafter was woken."""
        self._engines = engines
        self._drafters = drafters
        self._clock = clock
        self._began_s = clock()
        self._dry: set[int] = set()
        """Engines of which the drafters know that they have nothing to do."""
        self._aside: set[int] = set()

    def busy(self, engine: int) -> None:
        """It is about to be given requests."""
        if self._drafters is not None:
            self._dry.discard(engine)
            self._drafters.sleep(self._engines[engine].index)

    def dry(self, engines: Iterable[int]) -> None:
        """These have nothing to do."""
        if self._drafters is not None:
            for engine in set(engines) - self._dry:
                self._dry.add(engine)
                self._drafters.free(self._engines[engine].index)

    def set_aside(self, engines: Sequence[int]) -> None:
        """These have nothing to do, so that the drafters on their devices draft from the start."""
        self.dry(engines)
        for engine in engines:
            self.wake(engine)
        self._aside = set(engines)

    def aside(self) -> set[int]:
        """Of those that were set aside, the ones whose drafter lives: once it is gone, its engine is free."""
        if self._drafters is not None and self._aside:
            self._aside = {i for i in self._aside if self._drafters.is_awake(self._engines[i].index)}
        return self._aside

    def wake_rounds(self, engines: Iterable[int], longest: int) -> dict[int, float]:
        """Of these engines, which have nothing to do: rounds, as they were in this rollout, until the drafter there is
        awake. Those are left out where none sleeps, and all while one is awake, since it drafts for all, and before a
        round was seen. Args: most tokens that a request has emitted."""
        if self._drafters is None or not longest or self._drafters.any_awake():
            return {}
        rounds_per_s = longest / max(self._clock() - self._began_s, 1e-6)
        each = {engine: self._drafters.wake_s(self._engines[engine].index) for engine in engines}
        return {engine: wake_s * rounds_per_s for engine, wake_s in each.items() if wake_s is not None}

    def wake(self, engine: int) -> None:
        """The drafter on its device. Raises PlanError where there can be none."""
        if self._drafters is None or engine not in range(len(self._engines)):
            raise PlanError(
                f"tail: got a drafter to wake on engine {engine}, expected one of {len(self._engines)} engines, with "
                "drafters to wake."
            )
        self._drafters.wake(self._engines[engine].index)
        self.times += 1
