"""Rollouts that begin with any layout, with fakes of engines: every response once and the one of an undisturbed run,
each computed once, and nothing on engines that are set aside. Pools with a mistake are seen."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from specactor.rollout.layout_plan import Layout, LayoutPlanner
from specactor.rollout.pool import EnginePool
from specactor.types import RolloutRequest, Trajectory
from tests.rollout import wrong_pools
from tests.rollout.driver_cases import FakeEngine, expected, make_requests

SEEDS = 30


@dataclass
class Recorded(FakeEngine):
    index: int = 0
    ready: str = "it is"
    given: list[str] = field(default_factory=list)

    def generate(self, requests: Sequence[RolloutRequest], **more: Any) -> None:
        self.given += [request.request_id for request in requests]
        super().generate(requests, **more)


@dataclass
class Sleepers:
    """Drafters on the devices of all engines but one."""

    none_on: int
    awake: set[int] = field(default_factory=set)
    stayed: set[int] = field(default_factory=set)
    """Awake at the end of the last rollout."""

    @contextmanager
    def rollout(self) -> Iterator[None]:
        yield
        self.stayed, self.awake = self.awake, set()

    def any_awake(self) -> bool:
        return bool(self.awake)

    def is_awake(self, engine: int) -> bool:
        return engine in self.awake

    def wake_s(self, engine: int) -> float | None:
        return None if engine == self.none_on else 0.25

    def wake(self, engine: int) -> None:
        assert engine != self.none_on, "there is none"
        self.awake.add(engine)

    def free(self, engine: int) -> None:
        pass

    def sleep(self, engine: int) -> None:
        self.awake.discard(engine)


@dataclass
class AnyLayout:
    """Of those that a planner may choose."""

    chance: random.Random
    drafting: tuple[int, ...] = ()

    def layout(self, wakes_s: Sequence[float | None], *, groups: int, requests: int) -> Layout:
        sleeping = [i for i, wake_s in enumerate(wakes_s) if wake_s is not None]
        count = self.chance.randint(0, min(len(sleeping), len(wakes_s) - 1))
        self.drafting = tuple(sorted(self.chance.sample(sleeping, count)))
        serving = tuple(i for i in range(len(wakes_s)) if i not in self.drafting)
        return Layout(serving=serving, drafting=self.drafting, reason="at random")


def check(seed: int, kind: Callable[..., EnginePool]) -> Counter[str]:
    """Rollouts until all have responses, whatever dies on the way; what was seen. The last engine lives."""
    chance = random.Random(seed)
    engines = [Recorded(index=i, dies_after=chance.choice([5, 25, float("inf")])) for i in range(3)]
    engines.append(Recorded(index=3))
    planner, seen = AnyLayout(chance), Counter[str]()
    sleepers = Sleepers(none_on=chance.randrange(4))
    pool = kind([], drafters=cast(Any, sleepers), layouts=cast(LayoutPlanner, planner))
    pool.engines = cast(Any, engines)
    requests = pending = make_requests(seed)
    done: list[Trajectory] = []
    while pending:
        alive = [engine for engine in engines if engine.alive]
        for engine in engines:
            engine.given.clear()
        outcome = pool.generate(pending)
        given = [name for engine in engines for name in engine.given]
        assert sorted(given) == sorted(r.request_id for r in pending), "not each on one engine"
        aside = [alive[i] for i in planner.drafting]
        assert not any(engine.given for engine in aside), "requests for an engine that is set aside"
        assert sleepers.stayed == {engine.index for engine in aside}
        assert outcome.tail.set_aside == outcome.tail.lent == len(aside)
        died = {name for engine in engines if not engine.alive for name in engine.given}
        assert {r.request_id for r in outcome.unfinished} <= died, "lost by nobody"
        seen.update(aside=len(aside), unfinished=len(outcome.unfinished), behind=alive != engines[: len(alive)])
        done += outcome.finished
        pending = outcome.unfinished
    assert {t.request_id: t.token_ids for t in done} == {r.request_id: expected(r) for r in requests}
    assert len(done) == len(requests)
    return seen


def check_all(kind: Callable[..., EnginePool]) -> Counter[str]:
    return sum((check(seed, kind) for seed in range(SEEDS)), Counter[str]())


def test_any_layout_gives_each_response_once() -> None:
    seen = check_all(EnginePool)
    assert min(seen["aside"], seen["unfinished"], seen["behind"]) > 0


WRONG = [kind for kind in vars(wrong_pools).values() if isinstance(kind, type) and issubclass(kind, EnginePool)]


@pytest.mark.parametrize("wrong", [kind for kind in WRONG if kind is not EnginePool], ids=lambda kind: kind.__name__)
def test_a_wrong_pool_is_seen(wrong: Callable[..., EnginePool]) -> None:
    with pytest.raises(AssertionError):
        check_all(wrong)
