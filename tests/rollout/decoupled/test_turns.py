"""A drafter process says what its turns take, drafting and loop together, and not the time it had nothing to do in."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest

from specactor.rollout.decoupled.drafter_side import Continuer, Lane
from specactor.rollout.decoupled.engine_side import Tails
from specactor.rollout.decoupled.main import DrafterLoop
from specactor.rollout.decoupled.protocol import Drops

STEP_S = 0.002
HEARING_S = 0.0005
WINDOW = 4


class Ticking(Continuer):
    """A continuer, a hub with one engine behind it, and the clock of both."""

    def __init__(self, step_s: float = STEP_S, hearing_s: float = HEARING_S) -> None:
        self.step_s, self.hearing_s = step_s, hearing_s
        self.num_sent = 0
        self.drops = Drops("hub")
        self.now_s = 0.0
        self.tails = Tails(1, engine="engine", num_drafters=1, window=WINDOW)
        self.outputs: list[list[int]] = []

    def clock(self) -> float:
        return self.now_s

    def extend(self, lanes: Sequence[Lane]) -> Sequence[list[int] | None]:
        self.now_s += self.step_s * len(lanes)
        return [[7] for _ in lanes]

    def receive(self) -> list[tuple[int, bytes]]:
        self.now_s += self.hearing_s
        return [(1, frame) for frame in self.tails.outgoing(0, self.now_s)]

    def send(self, session: int, frame: bytes) -> bool:
        self.num_sent += 1
        self.tails.receive([(0, frame)], self.now_s)
        return True

    def open(self, requests: int) -> None:
        for i in range(len(self.outputs), len(self.outputs) + requests):
            self.outputs.append([1])
            self.tails.open(f"r{i}", (1, 2), self.outputs[-1], 0, 1.0)


class Choosing(Ticking):
    """Has 8 for a second choice where these are wanted, and goes on from one with 9."""

    wants_runners_up = True
    after_second: tuple[int, ...] = (9,)
    asked: Sequence[int | None] = ()

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        self.asked = [lane.branch for lane in lanes]
        return [[7] if lane.branch is None else [*self.after_second] for lane in lanes]

    def runners_up(self) -> list[int | None]:
        return [8 if self.wants_runners_up else None for _ in self.asked]


class Refusing(Choosing):
    """Computes no branch."""

    after_second = ()


def loop_of(world: Ticking) -> DrafterLoop:
    return DrafterLoop(world, world, max_tokens=100_000, clock=world.clock)  # type: ignore[arg-type]


def test_turns_that_follow_at_once_are_timed_as_a_whole() -> None:
    world = Ticking()
    loop = loop_of(world)
    loop.turn()  # they meet
    world.open(3)
    for _ in range(2 * WINDOW):
        loop.turn()
    turns = loop.work(trace=False).turns
    assert len(turns) == 2 * WINDOW - 1, "the last one's end is not known yet"
    for requests, tokens, seconds in turns:
        assert (requests, tokens) == (3, 3)
        assert seconds == pytest.approx(3 * STEP_S + HEARING_S)
    assert loop.work(trace=False).turns == []


def test_idleness_is_no_part_of_a_turn() -> None:
    world = Ticking()
    loop = loop_of(world)
    loop.turn()
    world.open(1)
    for _ in range(2 * WINDOW + 1):  # as far ahead as it may be
        loop.turn()
    assert not loop.busy
    world.now_s += 9.0
    world.outputs[0] += [7, 7]
    world.tails.commit(["r0"])
    for _ in range(3):
        loop.turn()
    assert max(seconds for _, _, seconds in loop.work(trace=False).turns) < 1.0


def test_fast_turns_are_told_together_and_an_idle_drafter_holds_nothing_back() -> None:
    world = Ticking(step_s=1e-5, hearing_s=1e-6)
    loop = loop_of(world)
    loop.turn()
    world.open(1)
    sent = world.num_sent
    loop.turn()
    while loop.busy:
        loop.turn()
    assert world.tails.drafts(["r0"], [2 * WINDOW]) == [[7] * 2 * WINDOW]
    assert world.num_sent - sent == 2, "the first token, then all"


class Reading(Ticking):
    """The first batch with a request takes long; what the engine holds for the first request meanwhile."""

    def __init__(self) -> None:
        super().__init__(step_s=1e-5, hearing_s=1e-6)
        self.read = 0
        self.held: list[list[list[int]]] = []

    def extend(self, lanes: Sequence[Lane]) -> Sequence[list[int] | None]:
        if self.read < len(self.outputs):
            self.read = len(self.outputs)
            self.held.append(self.tails.drafts(["r0"], [2 * WINDOW]))
            self.now_s += 0.05
        return super().extend(lanes)


def test_what_was_drafted_does_not_wait_for_a_prompt_to_be_read() -> None:
    world = Reading()
    loop = loop_of(world)
    loop.turn()
    world.open(1)
    for _ in range(3):
        loop.turn()
    world.open(1)
    loop.turn()
    assert world.held == [[[]], [[7] * 3]]


class Reader(Ticking):
    """Reads three texts by four passes each, 3 s in sum, while its engine's rounds go on and frames wait in the hub."""

    pass_s, passes = 0.25, 4

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        self.unread: dict[Hashable, int] = {}
        self.num_passes = 0
        self.waiting: list[tuple[int, bytes]] = []

    def extend(self, lanes: Sequence[Lane]) -> Sequence[list[int] | None]:
        while behind := [lane.key for lane in lanes if self.unread.setdefault(lane.key, self.passes)]:
            self.unread[behind[0]] -= 1
            self.num_passes += 1
            self.go_on(self.pass_s)
            if not self.at_once:
                break
        self.go_on(STEP_S)
        return [None if self.unread[lane.key] else [7] for lane in lanes]

    def forget(self, key: Hashable) -> None:
        self.unread.pop(key, None)

    def go_on(self, seconds: float) -> None:
        """Let rounds of the engine pass."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += STEP_S
            self.tails.tick(self.now_s)
            self.waiting += super().receive()

    def receive(self) -> list[tuple[int, bytes]]:
        self.go_on(STEP_S)
        waiting, self.waiting = self.waiting, []
        return waiting


@pytest.mark.parametrize("at_once", [False, True])
def test_a_drafter_that_reads_for_seconds_is_heard_all_the_time_and_reads_nothing_twice(at_once: bool) -> None:
    """One that is silent until all is read loses its requests, and begins again without end."""
    world = Reader(at_once=at_once)
    loop = loop_of(world)
    loop.turn()
    world.open(3)
    names = ["r0", "r1", "r2"]
    first_s: dict[str, float] = {}
    silent = False
    while world.now_s < 20.0:
        loop.turn()
        silent = silent or not world.tails.live
        for name, draft in zip(names, world.tails.drafts(names, [WINDOW] * 3), strict=True):
            if draft:
                first_s.setdefault(name, world.now_s)
    if at_once:
        assert not first_s
        assert world.num_passes > 3 * 3 * world.passes
        return
    assert world.num_passes == 3 * world.passes
    assert sorted(first_s) == names
    assert first_s["r0"] < 1.5 < 3.0 < first_s["r2"] < 3.5, "who has been read waits for nobody"
    assert not silent
    turns = [seconds for *_, seconds in loop.work(trace=False).turns]
    assert sum(seconds >= world.pass_s for seconds in turns) <= 1, "reading is no drafting"


def test_rollbacks_are_events_of_the_trace() -> None:
    world = Ticking()
    loop = loop_of(world)
    loop.turn()
    world.open(1)
    loop.work(trace=True)
    for fresh in ([7], [7, 7], [9], [7], [9]):
        for _ in range(2 * WINDOW):
            loop.turn()
        world.outputs[0] += fresh
        world.tails.commit(["r0"])
    loop.turn()
    rollbacks = [span for span in loop.work(trace=False).spans if span.name == "rollback"]
    assert [span.details["tokens"] for span in rollbacks] == [2 * WINDOW, 2 * WINDOW], "at each 9, all that was ahead"
    assert loop.mirrors.num_wasted == 4 * WINDOW


def test_what_is_remembered_is_bounded() -> None:
    world = Ticking()
    loop = loop_of(world)
    loop.turn()
    world.open(1)
    for _ in range(1024):
        loop.turn()
        world.outputs[0].append(7)
        world.tails.commit(["r0"])
    assert len(loop.work(trace=False).turns) == 512


def test_lanes_that_were_refused_say_nothing_of_what_lanes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Refusing()
    loop = loop_of(world)
    counted: list[int] = []
    monkeypatch.setattr(loop._timing, "free", lambda lanes, max_lanes: 5)
    monkeypatch.setattr(loop._timing, "batch", lambda lanes, seconds: counted.append(lanes))
    world.open(2)
    branches = 0
    for _ in range(2 * WINDOW):
        loop.turn()
        branches += sum(branch is not None for branch in world.asked)
    assert branches > 0
    assert set(counted) == {2}


def test_second_choices_are_wanted_where_branches_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Refusing()
    loop = loop_of(world)
    world.open(2)
    loop.turn()
    assert not world.wants_runners_up, "nothing is known of what lanes take"
    monkeypatch.setattr(loop._timing, "free", lambda lanes, max_lanes: 1)
    loop.turn()
    assert world.wants_runners_up


@pytest.mark.parametrize("free", [9, 0])
def test_a_commit_of_a_second_choice_finds_a_window_drafted_where_lanes_are_free(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next turn."""
    world = Choosing()
    loop = loop_of(world)
    monkeypatch.setattr(loop._timing, "free", lambda lanes, max_lanes: free)
    loop.turn()
    world.open(1)
    loop.turn()
    while loop.busy:
        loop.turn()
    assert world.tails.drafts(["r0"], [WINDOW]) == [[7] * WINDOW]
    world.outputs[0] += [7, 8]
    world.tails.commit(["r0"])
    assert world.tails.drafts(["r0"], [WINDOW]) == [[9] * WINDOW if free else []]
