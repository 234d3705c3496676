"""Drafters are woken on engines that have run dry, and have left when requests come; responses do not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specactor.errors import PlanError
from specactor.rollout.lending import Lending
from specactor.rollout.sglang.engine import Engine
from specactor.rollout.tail_plan import EngineLoad, Lend
from tests.rollout.driver_cases import AtRandom, FakeEngine, drive, expected, make_requests


@dataclass
class FakeSleepers:
    """Drafters on the devices of all engines."""

    awake: set[int] = field(default_factory=set)
    asked: list[tuple[str, int]] = field(default_factory=list)

    free_now: set[int] = field(default_factory=set)

    def any_awake(self) -> bool:
        return bool(self.awake)

    def free(self, engine: int) -> None:
        assert engine not in self.free_now, "it was told so"
        self.free_now.add(engine)

    def is_awake(self, engine: int) -> bool:
        return engine in self.awake

    def wake_s(self, engine: int) -> float | None:
        return None if engine in self.awake else 0.25

    def wake(self, engine: int) -> None:
        assert not self.awake
        assert engine in self.free_now
        self.asked.append(("wake", engine))
        self.awake.add(engine)

    def sleep(self, engine: int) -> None:
        self.asked += [("sleep", engine)] * (engine in self.awake)
        self.awake.discard(engine)
        self.free_now.discard(engine)


@dataclass
class LendingAtRandom(AtRandom):
    """Wakes a drafter on a dry engine, too."""

    sleepers: FakeSleepers = field(default_factory=FakeSleepers)

    def decide(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> Any:
        plan = super().decide(loads, finished)
        assert all(load.wake_rounds is None or not load.running for load in loads)
        there = {10 + load.engine for load in loads if not all(request.on_its_way for request in load.running)}
        assert not there & (self.sleepers.awake | self.sleepers.free_now), "it left when requests came"
        places = {action.target for action in plan}
        dry = [load.engine for load in loads if load.wake_rounds is not None and load.engine not in places]
        assert not (dry and self.sleepers.awake), "the one that is awake drafts for all"
        return [*plan, *(Lend(engine=engine) for engine in dry[:1] if self.chance.random() < 0.5)]


def test_drafters_are_woken_on_dry_engines_and_leave_when_requests_come() -> None:
    asked: Counter[str] = Counter()
    lent = 0
    for seed in range(30):
        engines, sleepers = [FakeEngine() for _ in range(3)], FakeSleepers()
        for index, engine in enumerate(engines):
            engine.index = 10 + index  # type: ignore[attr-defined]
        requests = make_requests(seed)
        driver, _ = drive(engines, requests, policy=LendingAtRandom(seed, sleepers=sleepers), drafters=sleepers)
        assert all(driver.done[r.request_id].token_ids == expected(r) for r in requests)
        assert {engine for _, engine in sleepers.asked} <= {10, 11, 12}
        asked.update(what for what, _ in sleepers.asked)
        lent += driver.counts.lent
    assert lent == asked["wake"] > asked["sleep"] > 0


@dataclass
class Mortal(FakeSleepers):
    """Those awake are found dead when that was asked so often."""

    questions: float = float("inf")

    def is_awake(self, engine: int) -> bool:
        self.questions -= 1
        if self.questions <= 0:
            self.awake.clear()
        return super().is_awake(engine)


@pytest.mark.parametrize("questions", [float("inf"), 20])
def test_an_engine_that_is_set_aside_gets_nothing_while_its_drafter_lives(questions: float) -> None:
    served = lent = 0
    for seed in range(20):
        engines, sleepers = [FakeEngine() for _ in range(3)], Mortal(questions=questions)
        for index, engine in enumerate(engines):
            engine.index = 10 + index  # type: ignore[attr-defined]
        requests = make_requests(seed)
        policy = LendingAtRandom(seed, sleepers=sleepers)
        driver, _ = drive(engines, requests, aside=[2], policy=policy, drafters=sleepers)
        assert all(driver.done[r.request_id].token_ids == expected(r) for r in requests)
        assert sleepers.asked[0] == ("wake", 12)
        assert driver.counts.set_aside == 1
        served += engines[2].num_calls
        lent += driver.counts.lent
    assert (served > 0) == (questions < float("inf"))
    assert (lent > 20) == (questions < float("inf")), "another may be woken when it is dead"


def test_waking_is_counted_in_rounds_of_this_rollout() -> None:
    """A quarter of a second, where the longest response got 8 tokens in two seconds."""
    clock = iter([0.0, *[2.0] * 100])
    engines = cast("list[Engine]", [SimpleNamespace(index=i) for i in range(3)])
    sleepers = FakeSleepers()
    lending = Lending(engines, sleepers, clock=lambda: next(clock))
    assert lending.wake_rounds([1], 0) == {}, "nothing was heard of"
    assert lending.wake_rounds([1, 2], 8) == {1: 0.25 * 8 / 2.0, 2: 0.25 * 8 / 2.0}
    sleepers.awake.add(0)
    assert lending.wake_rounds([1, 2], 8) == {}, "the one that is awake drafts for all, also a dead engine's"
    assert Lending(engines).wake_rounds([1], 8) == {}


def test_a_drafter_that_cannot_be_woken_is_an_error() -> None:
    class Wrong:
        needs_dry = False

        def decide(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> Sequence[Lend]:
            return [Lend(engine=0)]

    with pytest.raises(PlanError, match="with drafters to wake"):
        drive([FakeEngine(), FakeEngine()], make_requests(1), policy=Wrong())
