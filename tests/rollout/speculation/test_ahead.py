"""Drafters elsewhere, in mode auto: chosen when they are good, again too, and no burden when they are gone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import pytest

from specactor.rollout.decoupled import engine_side
from specactor.rollout.decoupled.drafter_side import Continuer, Lane, MirroredRequests
from specactor.rollout.decoupled.remote_drafter import Decoupled
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.planner import Planner
from specactor.rollout.speculation.probing import BackOff
from tests.rollout.speculation.test_resting import Rests
from tests.rollout.speculation.world import STEP_S, Coin, auto

ENGINE, OTHER_ENGINE = 20, 30
"""Requests of the other engine; seconds of its rounds."""
TOKEN_S = STEP_S / 4
"""A draft token for all requests."""


class Half(Continuer):
    """Right with a probability, per token."""

    version = 1

    def __init__(self, right: float) -> None:
        self.right = right

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        return [[self._next(lane)] for lane in lanes]

    def _next(self, lane: Lane) -> int:
        return self.token(lane.seed, len(lane.tokens))

    def token(self, seed: int, position: int) -> int:
        coin = zlib.crc32(f"{seed} {position}".encode()) / 2**32
        return 2 * ((7 * position + seed) % 40) + (coin >= self.right)


class Elsewhere:
    """A link to a drafter that goes on while the engine does, on the engine's clock."""

    num_drafters = 1

    def __init__(self, right: float) -> None:
        self.clock: Callable[[], float] = lambda: 0.0
        self.continuer = Half(right)
        self.mirrors = MirroredRequests(5, max_tokens=10_000_000)
        self.is_alive = True
        self.drafts = True
        self.sent = 0
        self.delay_s = 0.0
        """Of an answer."""
        self._done_s = 0.0
        self._answers: list[tuple[float, bytes]] = []

    def send(self, drafter: int, frame: bytes) -> bool:
        self._go_on()
        self.sent += 1
        if self.is_alive:
            self.mirrors.receive(ENGINE, frame, self.clock())
            self._say(self.clock())
        return self.is_alive

    def receive(self) -> list[tuple[int, bytes]]:
        self._go_on()
        now_s = self.clock()
        due = [(0, frame) for due_s, frame in self._answers if due_s + self.delay_s <= now_s]
        self._answers = [answer for answer in self._answers if answer[0] + self.delay_s > now_s]
        return due

    def close(self) -> None:
        pass

    def _go_on(self) -> None:
        now_s = self.clock()
        self._done_s = max(self._done_s, now_s - 1.0)
        while self._done_s + TOKEN_S <= now_s:
            lanes = self.mirrors.wanted(1000) if self.drafts and self.is_alive else []
            if not lanes:
                self._done_s = now_s
                return
            self._done_s += TOKEN_S
            self.mirrors.extended(lanes, self.continuer.extend(lanes))
            self._say(self._done_s)

    def _say(self, at_s: float) -> None:
        for session in self.mirrors.sessions:
            self._answers += [(at_s, frame) for frame in self.mirrors.outgoing(session, version=1, now_s=at_s)]


class Apart(Rests):
    """An engine with a drafter elsewhere."""

    def __init__(self, link: Elsewhere, *beside: Drafter, requests: int = 4, window: int | None = None) -> None:
        self.link = link
        config = auto(window=window)
        self.drafter = Decoupled(ENGINE, link, engine="e", window=config.largest_window, clock=lambda: self.now)
        super().__init__(config, self.drafter, *beside, requests=requests, row_s=1e-4 / requests)
        link.clock = lambda: self.now


MANY = [1, 4, 20, pytest.param(64, marks=pytest.mark.deep)]
"""Of more than 16 requests, some are looked at."""


@pytest.mark.parametrize("requests", MANY)
def test_a_good_drafter_is_chosen(requests: int) -> None:
    world = Apart(Elsewhere(0.9), requests=requests)
    world.play(400)
    assert world.play(400) > 1.3 * world.plain_speed()
    counts = world.speculator.report()
    assert counts["decoupled"].failures == 0
    assert counts["decoupled"].accepted > 0.5 * counts["decoupled"].drafted


def noticed(requests: int) -> bool:
    """Whether a drafter that was bad for long, and has become good, drafts again."""
    world = Apart(Elsewhere(0.0), requests=requests)
    world.play(1000)
    assert world.unasked > 700
    world.speculator.report()
    world.link.continuer.right = 0.95
    world.play(1000)
    return world.speculator.report()["decoupled"].speculative_rounds > 100


@pytest.mark.parametrize("requests", MANY)
def test_a_drafter_that_has_become_good_is_chosen_again(requests: int) -> None:
    assert noticed(requests)


def test_a_look_that_does_not_wait_for_drafts_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackOff, "waits", lambda *_, **__: False)
    assert not noticed(20)


def test_while_decoding_is_plain_it_hears_little() -> None:
    world = Apart(Elsewhere(0.0), requests=64)
    world.play(1000)
    before = world.link.sent
    world.play(1000)
    assert world.link.sent - before < 200, "frames; with drafts there is one in every round"


def test_a_drafter_that_is_gone_is_not_asked_and_found_again() -> None:
    link = Elsewhere(0.9)
    link.is_alive = False
    world = Apart(link)
    world.play(1000)
    assert world.unasked > 950
    assert world.speculator.report()["decoupled"].rounds == 0
    assert not world.drafter.proposed
    link.is_alive = True
    world.play(1000)
    assert world.speculator.report()["decoupled"].speculative_rounds > 400
    link.is_alive = False
    world.play(2500)  # it is silent for a second
    world.speculator.report()
    world.unasked = 0
    world.play(1000)
    assert world.unasked > 900
    assert world.speculator.report()["decoupled"].speculative_rounds == 0


def rounds_until_found() -> float:
    """Mean of plain rounds until a drafter that begins to answer is there; a beat is one round long."""
    found = []
    for silent in range(200, 264, 7):
        link = Elsewhere(0.9)
        link.is_alive, link.delay_s = False, 1e-4
        world = Apart(link)
        world.play(silent)
        link.is_alive, before = True, world.unasked
        while not world.speculator.drafter_set.there:
            world.play(1)
        found.append(world.unasked - before)
    return sum(found) / len(found)


def test_one_that_begins_to_answer_is_found_in_the_round_after_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer to a beat is not left lying until the next look, 32 rounds later."""
    monkeypatch.setattr(engine_side, "BEAT_EVERY_S", 1e-3)
    assert rounds_until_found() < 24
    monkeypatch.setattr(Decoupled, "expects", property(lambda _: False, lambda *_: None))
    assert rounds_until_found() > 32


def test_one_that_is_asked_and_never_answers_is_seldom_looked_for() -> None:
    link = Elsewhere(0.9)
    link.delay_s = float("inf")
    world = Apart(link)
    world.play(1000)
    assert world.unasked > 900


def test_one_that_answers_and_never_drafts_costs_little() -> None:
    link = Elsewhere(0.9)
    link.drafts = False
    world = Apart(link, Coin(0.0))
    world.play(1000)
    world.unasked = 0
    world.play(2000)
    assert world.unasked > 0.85 * 2000


@pytest.mark.parametrize("is_alive", [False, True])
def test_another_drafter_takes_the_place_of_one_that_is_gone_or_silent(is_alive: bool) -> None:
    link = Elsewhere(0.9)
    link.is_alive, link.drafts = is_alive, False
    world = Apart(link, Coin(0.9))
    world.play(500)
    assert world.speculator.report()["coin"].speculative_rounds > 300


def verified(right: float, *beside: Drafter) -> int:
    """Times, in a thousand rounds, that a drafter of that kind is told that its drafts would be verified."""
    world = Apart(Elsewhere(right), *beside)
    world.play(500)
    told: list[bool] = []
    propose = world.drafter.propose

    def noting(sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        told.append(world.drafter.is_verified)
        return propose(sequences, windows)

    world.drafter.propose = noting  # type: ignore[method-assign]
    world.play(1000)
    assert told
    return sum(told)


def test_drafters_are_told_of_a_look() -> None:
    """While decoding is plain, or another drafter leads."""
    assert verified(0.9) > 100
    assert verified(0.0) == 0
    assert verified(0.0, Coin(0.95)) == 0


class Here(Drafter):
    """The drafter of a link, in the engine: a token takes half as long again, and the engine waits for it."""

    name = "here"
    drafts_first = False

    def __init__(self, link: Elsewhere) -> None:
        self.link = link

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        self.world.now += 1.5 * TOKEN_S * max(windows)
        return [self._draft(sequence, window) for sequence, window in zip(sequences, windows, strict=True)]

    def _draft(self, sequence: DraftSequence, window: int) -> list[int]:
        start = len(sequence.output_ids)
        return [self.link.continuer.token(sequence.seed, position) for position in range(start, start + window)]

    world: Apart


def speed_beside_one_here(right: float, requests: int) -> float:
    """Tokens per second."""
    link = Elsewhere(right)
    here = Here(link)
    here.world = world = Apart(link, here, requests=requests)
    world.play(300)
    return world.play(1200)


@pytest.mark.parametrize(
    ("right", "requests", "gain"),
    [
        (0.6, 1, 1.1),
        (0.7, 2, 1.05),
        (0.8, 2, 0.99),
        pytest.param(0.8, 4, 1.05, marks=pytest.mark.deep),
        pytest.param(0.8, 8, 0.99, marks=pytest.mark.deep),
    ],
)
def test_one_that_has_no_drafts_in_a_round_is_not_left_for_it(
    right: float, requests: int, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a choice by what is there in the round alone."""
    found = speed_beside_one_here(right, requests)
    monkeypatch.setattr(Planner, "usual_gain", lambda *_, **__: 0.0)
    assert found > gain * speed_beside_one_here(right, requests)


def test_two_windows_are_two_of_those_that_are_used() -> None:
    for window in (2, None):
        world = Apart(Elsewhere(1.0), window=window)
        world.play(100)
        [mirror, *_] = world.link.mirrors._oldest.values()
        assert mirror.window == (window or world.speculator.config.max_window)
