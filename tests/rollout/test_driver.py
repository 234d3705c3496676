"""Any moves, replicas, stops and deaths, with fakes of engines: every response is the one of an undisturbed run."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specactor.errors import EngineError, PlanError
from specactor.rollout import continuation
from specactor.rollout.assignment import assign
from specactor.rollout.driver import Driver, TailCounts
from specactor.rollout.lending import Lending
from specactor.rollout.sglang.engine import Engine, EngineDied
from specactor.rollout.tail_plan import EngineLoad, Lend, Move, Planned, Replica
from specactor.types import RolloutRequest, SamplingParams, Trajectory

GROUPS, SIZE = 4, 3


def token(seed: int, position: int) -> int:
    return random.Random(1000 * seed + position).randrange(100)


def make_requests(seed: int) -> list[RolloutRequest]:
    chance = random.Random(seed)
    return [
        RolloutRequest(
            request_id=f"r{i}",
            prompt_ids=(1,) * (1 + i // SIZE),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=chance.randint(1, 30)),
            seed=100 * seed + i,
            group_id=i // SIZE,
        )
        for i in range(GROUPS * SIZE)
    ]


def expected(request: RolloutRequest) -> tuple[int, ...]:
    start = len(request.prompt_ids)
    return tuple(token(request.seed, start + t) for t in range(request.sampling.max_new_tokens))


@dataclass
class FakeEngine:
    """Its noise is keyed as an engine's; it emits one token of every request per round."""

    position_of: Callable[[RolloutRequest, int], int] = lambda request, emitted: len(request.prompt_ids) + emitted
    dies_after: float = float("inf")
    """Rounds."""
    alive: bool = True
    spec: Any = field(
        default_factory=lambda: SimpleNamespace(config=SimpleNamespace(max_running_requests=4, routed_experts=False))
    )
    aborted: set[str] = field(default_factory=set)
    num_aborts: int = 0
    killed: bool = False
    lock: Any = field(default_factory=threading.Lock)

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        on_finished: Callable[[Trajectory], None],
        on_progress: Callable[[RolloutRequest, Trajectory], None],
        report_tokens: int,
    ) -> None:
        emitted: dict[str, list[int]] = {r.request_id: [] for r in requests}
        left = list(requests)
        with self.lock:
            self.aborted -= set(emitted)
        while left:
            time.sleep(0)
            self.dies_after -= 1
            if self.dies_after <= 0:
                self.alive = False
            for request in list(left):
                if not self.alive or self.killed:
                    raise EngineDied("died")
                tokens = emitted[request.request_id]
                with self.lock:
                    aborted = request.request_id in self.aborted
                if not aborted:
                    place = self.position_of(request, continuation.num_begun(request) + len(tokens))
                    tokens.append(token(request.seed, place))
                whole = continuation.num_begun(request) + len(tokens) == request.sampling.max_new_tokens
                response = continuation.whole(
                    request,
                    token_ids=tokens,
                    logprobs=[-1.0] * len(tokens),
                    finish_reason="length" if whole else "abort",
                    version=1,
                )
                if aborted or whole:
                    left.remove(request)
                    on_finished(response)
                elif report_tokens and len(tokens) % report_tokens == 0:
                    on_progress(request, response)

    def abort_requests(self, ids: Sequence[str]) -> None:
        with self.lock:
            self.aborted |= set(ids)
            self.num_aborts += 1

    def abort(self) -> None:
        self.killed = True

    def kill(self) -> None:
        self.killed = True


@dataclass
class AtRandom:
    """Moves and replicates whatever can be, at random."""

    seed: int
    share: float = 0.3
    decisions: int = 0
    needs_dry: bool = False

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def decide(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> Sequence[Move | Replica]:
        self.decisions += 1
        places = Counter(r.request_id for load in loads for r in load.running)
        plan: list[Move | Replica] = []
        for load in loads:
            for request in load.running:
                others = [other.engine for other in loads if other.engine != load.engine]
                free = not request.on_its_way and places[request.request_id] == 1
                if free and others and self.chance.random() < self.share:
                    target = self.chance.choice(others)
                    if self.chance.random() < 0.5:
                        plan.append(Move(request_id=request.request_id, source=load.engine, target=target))
                    else:
                        plan.append(Replica(request_id=request.request_id, target=target))
        return plan


def drive(
    engines: Sequence[FakeEngine], requests: Sequence[RolloutRequest], **options: Any
) -> tuple[Driver, list[Trajectory]]:
    seen: list[Trajectory] = []
    options = {"notify": seen.append, "report_tokens": 1} | options
    driver = Driver(cast("list[Engine]", engines), **options)
    driver.run(assign(requests, len(engines)))
    return driver, seen


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


def test_a_drafter_that_cannot_be_woken_is_an_error() -> None:
    class Wrong:
        needs_dry = False

        def decide(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> Sequence[Lend]:
            return [Lend(engine=0)]

    with pytest.raises(PlanError, match="with drafters to wake"):
        drive([FakeEngine(), FakeEngine()], make_requests(1), policy=Wrong())


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
