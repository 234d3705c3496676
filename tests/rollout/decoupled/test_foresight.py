"""Branches are drafted where they are predicted to pay, by a clock of the test's own."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor.rollout.decoupled import foresight
from specactor.rollout.decoupled.foresight import LOOK_EVERY_TURNS, LOOK_TURNS, MAX_LOOK_TURNS, Foresight, Judged

ROUND_S = 0.01
WINDOW = 4


@dataclass(frozen=True, kw_only=True)
class World:
    """What a drafter process sees."""

    right: float = 0.6
    """P(a draft token is right | those before it are)."""
    hit: float = 0.8
    """P(its second choice is right | it is wrong)."""
    token_s: float = 0.0008
    second_s: float = 0.00002
    """That a turn takes longer with second choices."""
    row_s: float = 0.00005
    requests: int = 1


PAYS = World()
HOPELESS = World(hit=0.0)
BUSY = World(token_s=ROUND_S / 4, requests=64)
"""There is never time for a branch."""
DEAR = World(second_s=0.0012)


VERIFIED = Judged(window=WINDOW, ahead=2, examined=2, right=1, foreseen=None, fresh=2)
"""One round."""


class Clock:
    def __init__(self, seed: int = 0) -> None:
        self.sight = Foresight()
        self.now_s = 0.0
        self.turns = Counter[bool]()
        self.changes = 0
        self._rng = random.Random(seed)

    def run(self, world: World, rounds: int) -> float:
        """Share of the turns that had branches."""
        before = self.turns.copy()
        for _ in range(rounds):
            judged = [self._judged(world) for _ in range(world.requests)]
            rows = sum(1 + each.ahead for each in judged) / world.requests
            round_s = ROUND_S + world.row_s * rows * world.requests
            ends_s = self.now_s + round_s
            while self.now_s < ends_s:
                on = self.sight.look(self.now_s, world.requests)
                turn_s = world.token_s + (world.second_s if on else 0.0)
                self.sight.turn(world.requests, turn_s)
                self.turns[on] += 1
                self.now_s += turn_s
            self.sight.commits(7, self.now_s, judged)
        seen = self.turns - before
        return seen[True] / seen.total()

    def _judged(self, world: World) -> Judged:
        ahead = WINDOW + 1
        right = next((i for i in range(ahead) if self._rng.random() >= world.right), ahead)
        foreseen = self._rng.random() < world.hit if right < ahead and self.sight.on else None
        fresh = min(right, WINDOW) + 1
        return Judged(
            window=WINDOW, ahead=WINDOW, examined=min(right + 1, ahead), right=right, foreseen=foreseen, fresh=fresh
        )


def test_branches_that_pay_are_drafted() -> None:
    clock = Clock()
    clock.run(PAYS, 60)
    assert clock.run(PAYS, 2000) > 0.95
    assert clock.sight.gain > 1.1


@pytest.mark.parametrize("world", [HOPELESS, BUSY, DEAR], ids=["hopeless", "busy", "dear"])
def test_branches_that_do_not_pay_are_not(world: World) -> None:
    clock = Clock()
    clock.run(world, 600)
    assert clock.run(world, 1000) < 0.1
    assert clock.sight.gain < foresight.MIN_GAIN


def test_nothing_is_drafted_while_little_is_known() -> None:
    clock = Clock()
    assert clock.run(replace(PAYS, requests=1), 2) == 0.0
    sight = Foresight()
    for i in range(200):
        sight.turn(1, 0.001)
        assert not sight.look(0.001 * i, 1) or i >= LOOK_TURNS - 1, "to look, before any round"


def test_what_has_changed_is_seen() -> None:
    clock = Clock()
    clock.run(HOPELESS, 500)
    rounds = round(1.2 * LOOK_EVERY_TURNS * HOPELESS.token_s / ROUND_S)
    clock.run(PAYS, rounds)
    assert clock.run(PAYS, 500) > 0.95, "looked again"
    clock.run(HOPELESS, 400)
    assert clock.run(HOPELESS, 500) < 0.2


def test_only_turns_of_about_equal_sizes_are_compared() -> None:
    sight = Foresight()
    for _ in range(20):
        sight.turn(64, 0.010)
    sight._do(True)
    for _ in range(20):
        sight.turn(2, 0.001)
    assert sight._times_as_long() is None, "few with second choices, many without"
    for _ in range(20):
        sight.turn(70, 0.011)
    assert sight._times_as_long() == pytest.approx(1.1)


def test_looks_are_few() -> None:
    clock = Clock()
    clock.run(HOPELESS, 200)
    most = (MAX_LOOK_TURNS + 1) / LOOK_EVERY_TURNS
    assert 0 < clock.run(HOPELESS, round(3.3 * LOOK_EVERY_TURNS * HOPELESS.token_s / ROUND_S)) <= 1.5 * most
    clock = Clock()
    clock.run(PAYS, 200)
    share = clock.run(PAYS, round(3.3 * LOOK_EVERY_TURNS * PAYS.token_s / ROUND_S))
    assert 1 - 1.5 * most <= share < 1, "also at what turns take without"


def test_the_model_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = foresight.running
    monkeypatch.setattr(foresight, "running", lambda *a, **k: asked.append(1) or real(*a, **k))
    clock = Clock()
    clock.run(PAYS, 1000)
    assert 2 <= len(asked) <= 2 * (clock.now_s / foresight.ASK_EVERY_S + 3)


def test_engines_that_decoded_plainly_or_are_gone_say_nothing_of_rounds() -> None:
    clock = Clock()
    clock.run(PAYS, 200)
    grid = clock.sight._round_s()
    for _ in range(10):
        clock.now_s += 0.9
        clock.run(PAYS, 1)
    clock.now_s += 100.0
    clock.run(PAYS, 1)
    after = clock.sight._round_s()
    assert after.at(1, 3.0) == pytest.approx(grid.at(1, 3.0), rel=0.1)
    clock.sight.forget(7)
    assert clock.sight._heard == {}


def test_rounds_that_are_shorter_than_turns_are_told_apart() -> None:
    """An engine's rounds take 4 ms, and the drafter's turns 10: two or three are heard in each."""
    sight, heard = Foresight(), 0
    for turn in range(1, 101):
        while (heard + 1) * 0.004 <= turn * 0.010:
            heard += 1
            sight.commits(7, turn * 0.010, [VERIFIED])
    assert sight._round_s().at(1, 3.0) == pytest.approx(0.004, rel=0.05)


def test_a_commit_of_several_rounds_tells_nothing_of_them() -> None:
    sight = Foresight()
    for i in range(100):
        looked = i % 2 == 1
        sight.commits(7, 0.040 * (i // 2) + 0.036 * looked, [VERIFIED._replace(fresh=9) if looked else VERIFIED])
    assert sight._round_s().at(1, 3.0) == pytest.approx(0.004)


@settings(max_examples=40, deadline=None)
@given(
    judged=st.lists(
        st.builds(
            lambda window, ahead, right, foreseen: Judged(
                window=window,
                ahead=min(ahead, window),
                examined=min(right + 1, ahead),
                right=min(right, ahead),
                foreseen=foreseen if right < ahead else None,
                fresh=right + 1,
            ),
            st.just(3),
            st.integers(0, 6),
            st.integers(0, 6),
            st.booleans(),
        ),
        min_size=1,
        max_size=30,
    ),
    seconds=st.lists(st.floats(1e-6, 2.0), min_size=1, max_size=30),
    requests=st.integers(0, 300),
)
def test_whatever_is_seen_there_is_an_answer(judged: list[Judged], seconds: list[float], requests: int) -> None:
    sight, now_s = Foresight(), 0.0
    for i in range(300):
        now_s += seconds[i % len(seconds)]
        sight.commits(i % 2, now_s, [judged[i % len(judged)]])
        sight.turn(requests, seconds[i % len(seconds)])
        assert sight.look(now_s, requests) in (True, False)
        assert sight.gain > 0
