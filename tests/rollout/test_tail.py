"""Drafters are woken on the devices of engines that have run dry, one at a time and while there is time for it;
responses do not change."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from specactor.rollout import driver
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.driver import NOTICE_ROUNDS, BorrowedDevices, expected_left, is_worth_waking
from specactor.rollout.sglang.engine_client import Engine
from specactor.waits import LOOK_EVERY_S
from tests.rollout.driver_cases import FakeEngine, drive, expected, make_requests


def test_waking_takes_at_most_half_of_what_is_left() -> None:
    assert is_worth_waking(89.0, [(20, 200)], ())
    assert not is_worth_waking(91.0, [(20, 200)], ()), "it would wake too late"
    assert not is_worth_waking(10.0, [(190, 200)], ())
    assert not is_worth_waking(10.0, [(20, 200)], [30] * 9), "responses have not been that long"
    assert is_worth_waking(10.0, [(20, 200)], [30, 30, 120])
    assert is_worth_waking(10.0, [(190, 200), (20, 200)], ()), "one is enough"
    assert not is_worth_waking(0.0, [], ()), "for nobody"


def test_what_is_left_follows_from_longer_responses() -> None:
    finished = [10, 20, 60, 100], [0, 10, 30, 90, 190]
    assert expected_left(*finished, 0, 200) == 47.5
    assert expected_left(*finished, 20, 200) == 60
    assert expected_left(*finished, 100, 200) == 100, "nothing was longer: the limit is all that is known"
    assert expected_left(*finished, 20, 50) == 30
    assert expected_left(*finished, 199, 200) == 1


def test_a_decision_adds_every_length_once() -> None:
    """Not once per running request: it is made ten times a second, beside the engines' calls."""
    added = []

    class Length(int):
        def __radd__(self, other: int) -> int:
            added.append(self)
            return int(self) + other

    assert not is_worth_waking(20.0, [(3, 8)] * 50, [Length(n) for n in range(1, 9)])
    assert len(added) == 8


@dataclass
class FakeSleepers:
    """Drafters on the devices of all engines."""

    can_lend: bool = True
    awake: set[int] = field(default_factory=set)
    asked: list[tuple[str, int]] = field(default_factory=list)
    free_now: set[int] = field(default_factory=set)
    takes_s: dict[int, float] = field(default_factory=dict)

    def any_awake(self) -> bool:
        return bool(self.awake)

    def free(self, engine: int) -> None:
        assert engine not in self.free_now, "it was told so"
        self.free_now.add(engine)

    def wake_s(self, engine: int) -> float | None:
        return None if engine in self.awake else self.takes_s.get(engine, 0.25)

    def wake(self, engine: int) -> None:
        assert not self.awake
        assert engine in self.free_now
        self.asked.append(("wake", engine))
        self.awake.add(engine)

    def sleep(self, engine: int) -> None:
        self.asked += [("sleep", engine)] * (engine in self.awake)
        self.awake.discard(engine)
        self.free_now.discard(engine)


def test_waking_drafters_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)

    def at_random(waking_rounds: float, running: Iterable[tuple[int, int]], finished: Iterable[int]) -> bool:
        assert waking_rounds > NOTICE_ROUNDS
        assert all(emitted < limit for emitted, limit in running)
        return chance.random() < 0.5

    monkeypatch.setattr(driver, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(driver, "is_worth_waking", at_random)
    num_woken = 0
    for seed in range(30):
        engines, sleepers = [FakeEngine() for _ in range(3)], FakeSleepers()
        for index, engine in enumerate(engines):
            engine.index = 10 + index  # type: ignore[attr-defined]
        requests = make_requests(seed)
        driven, _ = drive(engines, requests, drafters=sleepers)
        assert all(driven.done[r.request_id].token_ids == expected(r) for r in requests)
        assert {engine for _, engine in sleepers.asked} <= {10, 11, 12}
        assert driven.num_woken == len(sleepers.asked) <= 1, "one that is awake drafts for all"
        num_woken += driven.num_woken
    assert num_woken > 0


def borrowed(sleepers: FakeSleepers, clock: Sequence[float] = ()) -> BorrowedDevices:
    times = iter([0.0, *clock])
    engines = cast("list[Engine]", [SimpleNamespace(index=i) for i in range(3)])
    return BorrowedDevices(engines, cast(DrafterPool, sleepers), clock=lambda: next(times))


def long_enough() -> list[tuple[int, int]]:
    return [(0, 10**6)]


def test_the_drafter_that_is_awake_soonest(monkeypatch: pytest.MonkeyPatch) -> None:
    sleepers = FakeSleepers(takes_s={0: 0.1, 1: 3.0, 2: 2.0})
    devices = borrowed(sleepers, [1.0])
    devices.lend([1, 2], long_enough, (), 8)
    assert sleepers.asked == [("wake", 2)], "engine 0 is busy"


def test_waking_is_counted_in_rounds_of_this_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a second, where the longest response got 16 tokens in four seconds."""
    seen: list[float] = []
    monkeypatch.setattr(driver, "is_worth_waking", lambda rounds, running, finished: seen.append(rounds))
    sleepers = FakeSleepers()
    devices = borrowed(sleepers, [2.0, 4.0, 6.0])
    devices.lend([1, 2], long_enough, (), 0)
    devices.lend([1, 2], long_enough, (), 16)
    assert seen == [0.25 * 16 / 4 + NOTICE_ROUNDS], "nothing was heard of at first"
    sleepers.awake.add(0)
    devices.lend([1, 2], long_enough, (), 24)
    assert len(seen) == 1, "the one that is awake drafts for all"


def test_a_prediction_is_not_made_at_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(driver, "is_worth_waking", lambda rounds, running, finished: asked.append(rounds))
    devices = borrowed(FakeSleepers(), [1.0 + i * LOOK_EVERY_S / 10 for i in range(200)])
    for _ in range(200):
        devices.lend([1], long_enough, (), 8)
    assert 10 < len(asked) < 40


def test_a_drafter_leaves_before_its_engine_is_busy() -> None:
    sleepers = FakeSleepers()
    devices = borrowed(sleepers, [1.0, 1.0])
    devices.lend([1], long_enough, (), 8)
    devices.give_back(0)
    assert sleepers.asked == [("wake", 1)]
    devices.give_back(1)
    devices.give_back(1)
    assert (sleepers.awake, sleepers.free_now) == (set(), set())
    assert sleepers.asked == [("wake", 1), ("sleep", 1)]


def test_drafters_are_not_asked_for_what_was_not_lent() -> None:
    sleepers = FakeSleepers(can_lend=False)
    devices = borrowed(sleepers)
    devices.lend([1], long_enough, (), 8)
    devices.give_back(1)
    assert (sleepers.asked, sleepers.free_now) == ([], set())
