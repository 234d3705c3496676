"""Drafters are woken on the devices of engines that have run dry, one at a time and where that is predicted to pay;
responses do not change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor import recipes
from specactor.rollout import tail
from specactor.rollout.sglang.engine_client import Engine
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.tail import (
    METHOD,
    BorrowedDevices,
    EngineLoad,
    WakeWhereItPays,
    expected_left,
    tail_policy,
)
from tests.rollout.driver_cases import FakeEngine, drive, expected, make_requests


def load(engine: int, count: int = 0, *, emitted: int = 10, limit: int = 200, **more: Any) -> EngineLoad:
    requests = ((emitted, limit),) * count
    return EngineLoad(engine=engine, running=requests, **{"slots": 8} | more)


def woken(loads: Sequence[EngineLoad], policy: WakeWhereItPays, finished: Sequence[int] = ()) -> int | None:
    return policy.engine_to_wake(loads, finished)


@st.composite
def fleets(draw: st.DrawFn) -> list[EngineLoad]:
    loads = []
    for i in range(draw(st.integers(1, 5))):
        limits = draw(st.lists(st.integers(1, 400), max_size=4))
        running = tuple((draw(st.integers(0, n - 1)), n) for n in limits)
        wakes = None if running else draw(st.none() | st.floats(0, 200))
        loads.append(EngineLoad(engine=i, slots=draw(st.integers(1, 4)), running=running, wake_rounds=wakes))
    return loads


@given(fleets(), st.lists(st.integers(1, 400), max_size=20), st.floats(0, 1), st.floats(0, 2))
def test_the_drafter_that_is_awake_soonest(
    loads: list[EngineLoad], finished: list[int], acceptance: float, draft_step: float
) -> None:
    engine = woken(loads, WakeWhereItPays(acceptance=acceptance, draft_step=draft_step), finished)
    wakes = {of.engine: of.wake_rounds for of in loads if of.wake_rounds is not None}
    assert engine is None or wakes[engine] == min(wakes.values())
    assert engine is None or any(of.running for of in loads), "for nobody"


def test_a_drafter_is_woken_where_it_pays() -> None:
    policy = WakeWhereItPays(acceptance=0.8, draft_step=0.1, notice_rounds=10.0)
    busy = load(0, 1, emitted=20)
    dry = load(1, wake_rounds=30.0)
    assert woken([busy, dry], policy) == 1
    assert woken([busy, load(1)], policy) is None, "nobody sleeps there"
    assert woken([busy, load(1, wake_rounds=300.0)], policy) is None, "it would wake too late"
    assert woken([load(0, 1, emitted=160), dry], policy) is None
    assert woken([busy, dry], policy, [30] * 9) is None, "responses have not been that long"
    for worse in (replace(policy, acceptance=0.0), replace(policy, draft_step=2.0), replace(policy, per_request=9.0)):
        assert woken([busy, dry], worse) is None
    two = [load(0, 2), dry, load(2, wake_rounds=5.0)]
    assert woken(two, policy) == 2, "one drafts for both, and the one that is there first"


def test_the_time_of_a_drafter_that_serves_all_is_charged() -> None:
    policy = WakeWhereItPays(acceptance=0.8, draft_step=0.3, per_request=0.3, notice_rounds=0.0)
    one, others = load(0, 1, limit=400), load(1, 20, limit=400, slots=20)
    assert woken([one, load(2, wake_rounds=5.0)], policy) == 2
    assert woken([one, others, load(2, wake_rounds=5.0)], policy) is None


def test_with_many_requests_rows_are_dear_and_nobody_is_woken() -> None:
    assert woken([load(0, 2, limit=400, slots=64), load(1, wake_rounds=10.0)], WakeWhereItPays()) == 1
    assert woken([load(0, 64, limit=400, slots=64), load(1, wake_rounds=10.0)], WakeWhereItPays()) is None


def test_the_next_step_is_planned_with_the_acceptance_of_this_one() -> None:
    policy, seen, few = WakeWhereItPays(), Counts(), Counts()
    seen.round([3] * 1000, [3] * 900 + [0] * 100, verify_s=1.0, draft_s=0.0)
    assert policy.after({}) == policy
    assert policy.after({"suffix": seen}) == policy
    assert policy.after({METHOD: seen}).acceptance == pytest.approx(0.9, abs=0.03)
    few.round([3], [0], verify_s=1.0, draft_s=0.0)
    assert policy.after({METHOD: few}).acceptance == pytest.approx(policy.acceptance, abs=0.02)


def test_a_drafter_that_was_bad_once_is_tried_again() -> None:
    """It is seen only while it is awake, and is not woken while it is believed to be bad; and it learns meanwhile."""
    loads, policy, bad = [load(0, 2, limit=110), load(1, wake_rounds=20.0)], WakeWhereItPays(), Counts()
    bad.round([3] * 1000, [1] * 150 + [0] * 850, verify_s=1.0, draft_s=0.0)
    assert policy.engine_to_wake(loads, ()) == 1
    policy = policy.after({METHOD: bad})
    steps = 0
    while policy.engine_to_wake(loads, ()) is None:
        policy = policy.after({"suffix": bad})
        steps += 1
        assert steps < 20
    assert steps > 3, "not at once, or it would be woken for nothing in most steps"
    assert policy.acceptance < policy.first_acceptance


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

    loads = [load(0, 50, emitted=3, limit=8), load(1, wake_rounds=20.0)]
    assert woken(loads, WakeWhereItPays(), [Length(n) for n in range(1, 9)]) is None
    assert len(added) == 8


def test_the_policy_of_a_configuration() -> None:
    words = [
        "--rollout.speculation.draft-model",
        "x",
        "--rollout.speculation.max-window",
        "3",
        "--parallel.engines",
        "2",
    ]
    lending = recipes.load(["quickstart_plain", *words, "--rollout.speculation.mode", "decoupled"])
    assert tail_policy(lending) == WakeWhereItPays(max_window=3)
    own = replace(lending, parallel=replace(lending.parallel, drafters=1))
    assert tail_policy(own) is tail_policy(recipes.load(["quickstart_plain"])) is None


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
class AtRandom:
    """Wakes any drafter that sleeps on a dry engine."""

    seed: int
    num_asked: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def engine_to_wake(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> int | None:
        self.num_asked += 1
        assert any(not load.running for load in loads)
        assert all(load.wake_rounds is None or not load.running for load in loads)
        dry = [load.engine for load in loads if load.wake_rounds is not None]
        return self.chance.choice(dry) if dry and self.chance.random() < 0.5 else None


def test_waking_drafters_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "ASK_EVERY_S", 0.0)
    num_woken = 0
    for seed in range(30):
        engines, sleepers = [FakeEngine() for _ in range(3)], FakeSleepers()
        for index, engine in enumerate(engines):
            engine.index = 10 + index  # type: ignore[attr-defined]
        requests = make_requests(seed)
        driver, _ = drive(engines, requests, policy=AtRandom(seed), drafters=sleepers)
        assert all(driver.done[r.request_id].token_ids == expected(r) for r in requests)
        assert {engine for _, engine in sleepers.asked} <= {10, 11, 12}
        assert driver.num_woken == len(sleepers.asked) <= 1, "one that is awake drafts for all"
        num_woken += driver.num_woken
    assert num_woken > 0


def borrowed(policy: Any, clock: Sequence[float] = (), sleepers: FakeSleepers | None = None) -> BorrowedDevices:
    times = iter([0.0, *clock])
    engines = cast("list[Engine]", [SimpleNamespace(index=i) for i in range(3)])
    return BorrowedDevices(engines, sleepers or FakeSleepers(), policy, clock=lambda: next(times))


def test_waking_is_counted_in_rounds_of_this_rollout() -> None:
    """A quarter of a second, where the longest response got 8 tokens in two seconds."""
    seen: list[list[float | None]] = []

    class Looks:
        def engine_to_wake(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> None:
            seen.append([load.wake_rounds for load in loads])

    loads, sleepers = [load(0, 1), load(1), load(2)], FakeSleepers()
    devices = borrowed(Looks(), [2.0] * 2 + [4.0] * 2 + [6.0], sleepers)
    devices.lend(lambda: loads, [1, 2], (), 0)
    devices.lend(lambda: loads, [1, 2], (), 16)
    assert seen == [[None] * 3, [None, 0.25 * 16 / 4, 0.25 * 16 / 4]], "nothing was heard of at first"
    sleepers.awake.add(0)
    devices.lend(lambda: loads, [1, 2], (), 24)
    assert len(seen) == 2, "the one that is awake drafts for all"


def test_a_prediction_is_not_made_at_every_event() -> None:
    policy = AtRandom(0)
    policy.chance.random = lambda: 1.0  # type: ignore[method-assign]
    devices = borrowed(policy, [1.0 + i // 2 * tail.ASK_EVERY_S / 10 for i in range(400)])
    for _ in range(200):
        devices.lend(lambda: [load(0, 1), load(1)], [1], (), 8)
    assert 10 < policy.num_asked < 40


@pytest.mark.parametrize("dry", [[1], []])
def test_a_drafter_leaves_before_its_engine_is_busy(dry: list[int]) -> None:
    """Also where the engine's conversations wait for their environments, so that it is not dry."""
    sleepers = FakeSleepers(free_now={1})
    sleepers.free_now.difference_update(dry)
    devices = borrowed(SimpleNamespace(engine_to_wake=lambda loads, finished: 1), [1.0, 1.0], sleepers)
    devices.lend(lambda: [load(0, 1), load(1)], dry, (), 8)
    devices.give_back(0)
    assert sleepers.asked == [("wake", 1)]
    devices.give_back(1)
    devices.give_back(1)
    assert (sleepers.awake, sleepers.free_now) == (set(), set())
    assert sleepers.asked == [("wake", 1), ("sleep", 1)]


def test_drafters_are_not_asked_for_what_was_not_lent() -> None:
    devices = borrowed(None, sleepers=cast("Any", None))
    devices._drafters = cast("Any", SimpleNamespace())  # which knows no `sleep`
    devices.give_back(1)
