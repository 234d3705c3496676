"""The drafter `decoupled` within a speculator's rounds, over a link that the test holds in its hands."""

from __future__ import annotations

import gc
import itertools

import pytest

from specactor.config import SpeculationConfig
from specactor.metrics import SPECULATION
from specactor.rollout.decoupled.drafter_side import MirroredRequests
from specactor.rollout.decoupled.protocol import Header, Pulse, encode
from specactor.rollout.decoupled.remote_drafter import Decoupled
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.speculator import Speculator
from tests.rollout.decoupled.scripted import Scripted, script

ENGINE = 20


class Held:
    """A link to one drafter in this process. What is sent arrives at once; answers take `answer_s`."""

    num_drafters = 1

    def __init__(self, answer_s: float = 0.0) -> None:
        self.now_s = 50.0
        self.mirrors = MirroredRequests(5, max_tokens=10_000)
        self.continuer = Scripted()
        self.answer_s = answer_s
        self.full = False
        self.closed = 0
        self._answers: list[tuple[float, bytes]] = []

    def send(self, drafter: int, frame: bytes) -> bool:
        if self.full:
            return False
        self.mirrors.receive(ENGINE, frame, self.now_s)
        self.draft(1)
        return True

    def draft(self, steps: int) -> None:
        for _ in range(steps):
            lanes = self.mirrors.wanted(100)
            self.mirrors.extended(lanes, self.continuer.extend(lanes))
            due_s = self.now_s + self.answer_s
            for session in self.mirrors.sessions:
                self._answers += [(due_s, frame) for frame in self.mirrors.outgoing(session, version=1, now_s=due_s)]

    def receive(self) -> list[tuple[int, bytes]]:
        due = [(0, frame) for due_s, frame in self._answers if due_s <= self.now_s]
        self._answers = [(due_s, frame) for due_s, frame in self._answers if due_s > self.now_s]
        return due

    def close(self) -> None:
        self.closed += 1


def over(link: Held) -> Decoupled:
    return Decoupled(ENGINE, link, engine="e", window=4, clock=lambda: link.now_s)


def play(drafter: Decoupled, link: Held, *, rounds: int, round_s: float, wrong_every: int = 0) -> int:
    """One request whose target is the script, but for every so-manieth round; returns the draft tokens accepted."""
    config = SpeculationConfig(mode="coupled", window=4)
    speculator = Speculator(config, [drafter], clock=lambda: link.now_s)
    sequence = DraftSequence(request_id="a", prompt_ids=(1, 2, 3))
    speculator.open(sequence)
    total = 0
    for number in range(rounds):
        decision = speculator.decide([sequence], [4])
        draft = decision.drafts[0]
        assert draft == script(sequence.prompt_ids, sequence.output_ids, len(draft))
        link.now_s += round_s
        wrong = wrong_every and number % wrong_every == 0
        emitted = (
            [1000 + number] if wrong else [*draft, *script(sequence.prompt_ids, [*sequence.output_ids, *draft], 1)]
        )
        total += len(emitted) - 1
        speculator.learn([sequence], [emitted[:-1]], round_s=decision.draft_s + round_s)
        sequence.output_ids.extend(emitted)
        link.draft(4)
    assert speculator.estimates.counts["decoupled"].failures == 0
    speculator.close(sequence)
    return total


def test_drafts_reach_the_speculator() -> None:
    link = Held()
    drafter = over(link)
    assert play(drafter, link, rounds=30, round_s=0.02, wrong_every=5) > 40
    assert len(drafter.tails.live) == 1
    assert drafter.proposed > 40
    assert link.mirrors.num_requests == 0, "closed without a further round"


def test_after_plain_rounds_drafts_are_expected_until_the_answer_is_there() -> None:
    link = Held(answer_s=0.003)
    drafter = over(link)
    sequence = DraftSequence(request_id="a", prompt_ids=(1, 2, 3))
    drafter.open(sequence)
    for _ in range(3):
        link.now_s += 0.3
        drafter.propose([], [])
    began_s = link.now_s
    sequence.output_ids.extend(range(30))
    drafter.commit(sequence, range(30))
    assert drafter.propose([sequence], [4]) == [[]]
    assert drafter.expects
    assert link.now_s == began_s, "nobody waits"
    link.now_s += 0.003
    assert drafter.propose([sequence], [4])[0][:1] == script(sequence.prompt_ids, sequence.output_ids, 1)
    assert not drafter.expects
    sequence.output_ids.append(7)
    drafter.commit(sequence, [7])
    drafter.propose([sequence], [4])
    assert not drafter.expects, "a token that differs is nothing to catch up with"


def test_a_drafter_that_does_not_answer_is_not_there() -> None:
    link = Held()
    drafter = over(link)
    assert drafter.is_there()
    link.full = True
    for _ in range(8):
        link.now_s += 0.3
        drafter.propose([], [])
    assert not drafter.is_there()
    link.full = False
    link.now_s += 0.3
    drafter.is_there()
    assert drafter.is_there()


def test_a_link_that_takes_nothing_costs_nothing() -> None:
    link = Held()
    drafter = over(link)
    link.full = True
    assert play(drafter, link, rounds=10, round_s=0.3) == 0
    assert drafter.tails.drops.counts["nobody"] > 5
    link.full = False
    assert play(drafter, link, rounds=10, round_s=0.3) > 0


def test_beats_to_a_drafter_that_sleeps_are_no_loss() -> None:
    """They cannot be sent, all the time that it sleeps; what is lost on the way to one that answers is seen."""
    link = Held()
    drafter = over(link)
    link.full = True
    play(drafter, link, rounds=10, round_s=0.3)
    assert drafter.figures()["dropped_frames"] == 0
    link.full = False
    play(drafter, link, rounds=10, round_s=0.3)
    assert drafter.is_there()
    assert drafter.figures()["dropped_frames"] == 0
    link.full = True
    play(drafter, link, rounds=2, round_s=0.3)
    assert drafter.figures()["dropped_frames"] > 0


def test_nobody_hears_of_a_request_without_a_prompt() -> None:
    """Its drafter would drop the whole frame."""
    link = Held()
    drafter = over(link)
    sequences = [DraftSequence(request_id=str(number), prompt_ids=(5,) * number) for number in range(2)]
    for sequence in sequences:
        drafter.open(sequence)
    for _ in range(3):
        drafts = drafter.propose(sequences, [4, 4])
        link.draft(4)
    assert drafts[0] == []
    assert len(drafts[1]) == 4
    assert not link.mirrors.drops.counts


def test_stop_tells_the_drafter_and_closes_once() -> None:
    link = Held()
    drafter = over(link)
    drafter.open(DraftSequence(request_id="a", prompt_ids=(1,)))
    drafter.propose([], [])
    drafter.propose([], [])
    assert link.mirrors.num_requests == 1
    drafter.stop()
    drafter.stop()
    assert (link.mirrors.num_requests, link.closed) == (0, 1)


def test_what_is_not_stopped_closes_when_it_goes() -> None:
    link = Held()
    drafter = over(link)
    del drafter
    gc.collect()
    assert link.closed == 1


def test_figures_are_those_since_the_last_call() -> None:
    link = Held(answer_s=0.03)  # when it arrives, a tail is of the round before
    drafter = over(link)
    play(drafter, link, rounds=30, round_s=0.02, wrong_every=5)
    first = drafter.figures()
    assert first["live_drafters"] == 1
    assert first["drafted_ahead"] > first["wasted_ahead"] > 0
    assert first["stale_tails"] > 0
    assert set(first) <= set(SPECULATION)
    assert drafter.figures() == dict.fromkeys(first, 0) | {"live_drafters": 1}


class Tells:
    """A link on which two drafters tell what the test says."""

    num_drafters = 2

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._frames: list[tuple[int, bytes]] = []

    def tell(self, drafter: int, session: int, *, drafted: int) -> None:
        header = Header(sender=session, receiver=ENGINE, number=next(self._numbers))
        pulse = Pulse(version=1, requests=0, drafted=drafted, wasted=drafted // 2)
        self._frames.append((drafter, encode(header, [pulse])))

    def send(self, drafter: int, frame: bytes) -> bool:
        return True

    def receive(self) -> list[tuple[int, bytes]]:
        frames, self._frames = self._frames, []
        return frames

    def close(self) -> None:
        pass


@pytest.mark.parametrize("session", [3, 5], ids=["the same incarnation", "a new one"])
def test_a_drafter_that_counts_anew_takes_nothing_from_the_others(session: int) -> None:
    link = Tells()
    drafter = Decoupled(ENGINE, link, engine="e", window=4, clock=lambda: 50.0)

    def figures(*told: tuple[int, int, int]) -> tuple[float, float]:
        for index, number, drafted in told:
            link.tell(index, number, drafted=drafted)
        drafter.propose([], [])
        now = drafter.figures()
        return now["drafted_ahead"], now["wasted_ahead"]

    assert figures((0, 3, 1000), (1, 4, 1000)) == (2000, 1000)
    assert figures((0, session, 10), (1, 4, 2000)) == (1010, 505)
    assert figures((0, session, 30)) == (20, 10)


def test_a_new_incarnation_counts_from_nothing() -> None:
    link = Tells()
    drafter = Decoupled(ENGINE, link, engine="e", window=4, clock=lambda: 50.0)
    link.tell(0, 3, drafted=10)
    link.tell(0, 5, drafted=30)
    drafter.propose([], [])
    assert drafter.tails.drafted == 40
