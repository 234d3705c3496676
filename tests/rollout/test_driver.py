"""Any moves, replicas, stops and deaths, with fakes of engines: every response is the one of an undisturbed run."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from specactor.errors import EngineError, PlanError
from specactor.rollout import continuation
from specactor.rollout.assignment import assign
from specactor.rollout.driver import Driver, TailCounts
from specactor.rollout.sglang.engine import Engine
from specactor.rollout.tail_plan import EngineLoad, Move, Planned, Replica
from specactor.types import RolloutRequest, Trajectory
from tests.rollout.driver_cases import GROUPS, AtRandom, FakeEngine, drive, expected, make_requests


@pytest.mark.parametrize("seed", range(30))
def test_random_moves_and_replicas_change_nothing(seed: int) -> None:
    requests = make_requests(seed)
    driver, seen = drive([FakeEngine() for _ in range(3)], requests, policy=AtRandom(seed))
    assert sorted(t.request_id for t in seen) == sorted(r.request_id for r in requests), "each once"
    for request in requests:
        response = driver.done[request.request_id]
        assert response.token_ids == expected(request)
        assert len(response.logprobs) == len(response.token_ids)
        assert [(span.start, span.end) for span in response.spans] == [(0, len(response.token_ids))]
    assert driver.counts.differing == 0
    assert not driver.stopped


def test_random_moves_and_replicas_happen() -> None:
    total = TailCounts()
    for seed in range(30):
        total += drive([FakeEngine() for _ in range(3)], make_requests(seed), policy=AtRandom(seed))[0].counts
    assert min(total.moved, total.moved_tokens, total.replicas, total.lost_tokens) > 0


def restarted(request: RolloutRequest, emitted: int) -> int:
    """The noise begins anew where the request does."""
    return len(request.prompt_ids) + emitted - continuation.num_begun(request)


def one_off(request: RolloutRequest, emitted: int) -> int:
    """The last token of the beginning was dropped."""
    return len(request.prompt_ids) + emitted - (1 if request.begun else 0)


@pytest.mark.parametrize("wrong", [restarted, one_off])
def test_a_wrong_seam_is_caught(wrong: Callable[[RolloutRequest, int], int]) -> None:
    """By the tokens, and, where the request has a replica, by the driver itself."""
    changed = differing = 0
    for seed in range(30):
        requests = make_requests(seed)
        driver, _ = drive([FakeEngine(position_of=wrong) for _ in range(3)], requests, policy=AtRandom(seed))
        changed += sum(driver.done[r.request_id].token_ids != expected(r) for r in requests)
        differing += driver.counts.differing
    assert changed > 0
    assert differing > 0


@pytest.mark.parametrize("seed", range(20))
def test_engines_that_die_lose_only_what_ran_there_alone(seed: int) -> None:
    requests = make_requests(seed)
    engines = [FakeEngine(), FakeEngine(dies_after=3 + seed), FakeEngine()]
    driver, seen = drive(engines, requests, policy=AtRandom(seed))
    assert len({t.request_id for t in seen}) == len(seen)
    for response in seen:
        request = next(r for r in requests if r.request_id == response.request_id)
        assert response.token_ids == expected(request)
    assert driver.counts.differing == 0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("moving", [False, True])
def test_enough_groups(seed: int, moving: bool) -> None:
    """It stops; what was begun goes on from there in another rollout, to the same tokens."""
    requests = make_requests(seed)
    policy = AtRandom(seed) if moving else None
    driver, _ = drive([FakeEngine(), FakeEngine()], requests, policy=policy, enough_groups=2)
    assert set(driver.done) | set(driver.stopped) == {r.request_id for r in requests}
    assert not set(driver.done) & set(driver.stopped)
    missing = Counter(r.group_id for r in driver.stopped.values())
    assert GROUPS - len(missing) >= 2
    rest, _ = drive([FakeEngine()], list(driver.stopped.values()))
    for request in requests:
        assert (driver.done | rest.done)[request.request_id].token_ids == expected(request)


def test_no_group_is_wanted() -> None:
    requests = make_requests(0)
    driver, _ = drive([FakeEngine()], requests, enough_groups=0)
    assert driver.done == {}
    assert list(driver.stopped.values()) == requests


@dataclass
class Counting:
    """Never does anything; told apart by whether it takes part in `is_news`."""

    needs_dry: bool
    asked: list[dict[int, int]] = field(default_factory=list)

    def decide(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> Sequence[Move]:
        self.asked.append({load.engine: len(load.running) for load in loads})
        return []


def test_a_policy_that_does_nothing_is_not_asked_at_every_event() -> None:
    """And is asked at each end of the last requests."""
    requests = [
        replace(r, sampling=replace(r.sampling, max_new_tokens=20 + 2 * i)) for i, r in enumerate(make_requests(0))
    ]
    always, seldom = Counting(needs_dry=False), Counting(needs_dry=True)
    for policy in (always, seldom):
        engines = cast("list[Engine]", [FakeEngine(), FakeEngine()])
        Driver(engines, notify=lambda trajectory: None, policy=policy, report_tokens=1).run([requests, []])
    assert len(always.asked) > 300
    assert len(seldom.asked) < 60
    assert {asked[0] for asked in seldom.asked} >= set(range(9)), "few requests: each end is news"


def test_the_shipped_policy_empties_nobody_and_moves_the_queue() -> None:
    """All groups on one engine: the other one is dry from the start."""
    requests = make_requests(5)
    seen: list[Trajectory] = []
    engines = [FakeEngine(), FakeEngine()]
    driver = Driver(
        cast("list[Engine]", engines), notify=seen.append, policy=Planned(migrate=True, replicas=2), report_tokens=1
    )
    driver.run([requests, []])
    assert {r.request_id: expected(r) for r in requests} == {t.request_id: t.token_ids for t in seen}
    assert driver.counts.moved > 0


class Late(FakeEngine):
    """Takes its requests only when it was told to end some of them, and after its first report of them goes no further
    before it was told again."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.told_again = threading.Event(), threading.Event()

    def generate(self, requests: Sequence[RolloutRequest], **more: Any) -> None:
        self.told.wait(20)
        on_progress = more["on_progress"]

        def report(request: RolloutRequest, so_far: Trajectory) -> None:
            on_progress(request, so_far)
            self.told_again.wait(20)
            self.told_again.set()  # so that a driver that does not repeat itself fails soon

        super().generate(requests, **more | {"on_progress": report})

    def abort_requests(self, ids: Sequence[str]) -> None:
        super().abort_requests(ids)
        (self.told_again if self.told.is_set() else self.told).set()


@pytest.mark.parametrize("policy", [None, Planned(migrate=True)])
def test_an_engine_that_was_asked_before_it_had_the_request_is_asked_again(policy: Planned | None) -> None:
    """Else one that was given its requests late computes them to their end, though nobody wants them any more."""
    quick, slow = (replace(r, group_id=i) for i, r in enumerate(make_requests(1)[:2]))
    slow = replace(slow, sampling=replace(slow.sampling, max_new_tokens=40))
    late = Late()
    driver = Driver(
        cast("list[Engine]", [FakeEngine(), late]),
        notify=lambda trajectory: None,
        policy=policy,
        report_tokens=1,
        enough_groups=1,
    )
    driver.run([[quick], [slow]])
    assert set(driver.done) == {quick.request_id}
    assert set(driver.stopped) == {slow.request_id}
    assert late.num_aborts == 2


def test_what_has_been_heard_of_is_asked_to_end_once() -> None:
    """An engine that has reported has the request: no second round trip for each of the many that are stopped."""
    quick, slow = (replace(r, group_id=i) for i, r in enumerate(make_requests(1)[:2]))
    slow = replace(slow, sampling=replace(slow.sampling, max_new_tokens=10**6))
    heard = threading.Event()

    class Second(FakeEngine):
        def generate(self, requests: Sequence[RolloutRequest], **more: Any) -> None:
            heard.wait(20)
            super().generate(requests, **more)

    engine, other = Second(), FakeEngine()
    driver = Driver(cast("list[Engine]", [engine, other]), notify=lambda trajectory: None, enough_groups=1)
    progressed = driver._progressed

    def see(attempt: Any, so_far: Trajectory) -> None:
        progressed(attempt, so_far)
        heard.set()

    driver._progressed = see  # type: ignore[method-assign]
    driver.run([[quick], [slow]])
    assert set(driver.stopped) == {slow.request_id}
    assert other.num_aborts == 1


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("dies_after", [float("inf"), 9])
def test_an_engine_without_requests_is_noticed_without_looking_at_each(seed: int, dies_after: float) -> None:
    class Watched(Driver):
        seen: tuple[int, ...] = (0, 0)

        def _take(self, event: Any) -> None:
            super()._take(event)
            loads = self._loads()
            assert {load.engine: len(load.running) for load in loads} == {
                i: self._loaded[i] for i in range(3) if i not in self._dead
            }
            dry = any(not load.running for load in loads)
            assert self._any_dry() == dry
            self.seen = (self.seen[0] + dry, self.seen[1] + 1 - dry)

    requests = make_requests(seed)
    engines = [FakeEngine(), FakeEngine(dies_after=dies_after), FakeEngine()]
    driver = Watched(
        cast("list[Engine]", engines), notify=lambda trajectory: None, policy=AtRandom(seed), report_tokens=1
    )
    driver.run(assign(requests, 3))
    assert min(driver.seen) > 0, "both"


def test_a_policy_that_needs_a_dry_engine_is_not_asked_before_there_is_one() -> None:
    @dataclass
    class Asked:
        needs_dry: bool
        loads: list[Sequence[EngineLoad]] = field(default_factory=list)

        def decide(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> Sequence[Move | Replica]:
            self.loads.append(loads)
            return []

    always, seldom = Asked(needs_dry=False), Asked(needs_dry=True)
    for policy in (always, seldom):
        drive([FakeEngine(), FakeEngine()], make_requests(2), policy=policy)
    assert seldom.loads
    assert all(any(not load.running for load in loads) for loads in seldom.loads)
    assert any(all(load.running for load in loads) for loads in always.loads)
    assert Planned(migrate=True).needs_dry


def test_a_plan_that_cannot_be_carried_out_is_an_error() -> None:
    class Wrong:
        needs_dry = False

        def decide(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> Sequence[Move | Replica]:
            return [Move(request_id="r0", source=1, target=1)]

    engines = [FakeEngine(), FakeEngine()]
    with pytest.raises(PlanError, match="expected a request that runs"):
        drive(engines, make_requests(1), policy=Wrong())
    assert all(engine.killed for engine in engines)


def test_an_error_of_an_engine_ends_the_others() -> None:
    class Refusing(FakeEngine):
        def generate(self, *_: Any, **__: Any) -> None:
            raise EngineError("refused")

    engines = [FakeEngine(), Refusing()]
    with pytest.raises(EngineError, match="refused"):
        drive(engines, make_requests(1))
    assert engines[0].killed
