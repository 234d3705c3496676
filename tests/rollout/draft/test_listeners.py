"""Drafters hear of everything that they are asked about, once and in order, and of the rest later."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specactor.rollout.draft.drafter import Drafter, DraftSequence
from specactor.rollout.draft.listeners import FAILURES, Listeners


class Notes(Drafter):
    """Notes what it hears."""

    def __init__(self, name: str = "notes", *, drafts_first: bool = True, drafts_ahead: bool = False) -> None:
        self.name, self.drafts_first, self.drafts_ahead = name, drafts_first, drafts_ahead
        self.running: dict[str, list[int]] = {}
        self.ended: list[tuple[tuple[int, ...], list[int]]] = []

    def open(self, sequence: DraftSequence) -> None:
        assert sequence.request_id not in self.running
        assert sequence.output_ids == []
        self.running[sequence.request_id] = []

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        self.running[sequence.request_id] += tokens

    def close(self, sequence: DraftSequence) -> None:
        self.ended.append((sequence.prompt_ids, self.running.pop(sequence.request_id)))

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [[] for _ in sequences]


class Scene:
    """Requests that come, grow and end."""

    def __init__(self, *, max_tokens: int = 10_000) -> None:
        self.text, self.other = Notes(), Notes("other", drafts_first=False)
        self.ahead = Notes("ahead", drafts_ahead=True)
        self.listeners = Listeners([self.text, self.other, self.ahead], max_tokens=max_tokens)
        self.running: list[DraftSequence] = []
        self.ended: list[DraftSequence] = []
        self.number = 0

    def open(self, prompt: int) -> DraftSequence:
        self.number += 1
        sequence = DraftSequence(request_id=str(self.number), prompt_ids=(prompt,))
        self.running.append(sequence)
        self.listeners.open(sequence)
        return sequence

    def grow(self, sequence: DraftSequence, *tokens: int) -> None:
        sequence.output_ids.extend(tokens)
        self.listeners.commit(sequence)

    def close(self, sequence: DraftSequence) -> None:
        self.running.remove(sequence)
        self.ended.append(sequence)
        self.listeners.close(sequence)

    def check(self, prompts: set[int]) -> None:
        """All requests with these prompts are known."""
        for sequence in self.running:
            if sequence.prompt_ids[0] in prompts:
                assert self.text.running[sequence.request_id] == sequence.output_ids
        known = [ended for ended in self.text.ended if ended[0][0] in prompts]
        expected = [(s.prompt_ids, s.output_ids) for s in self.ended if s.prompt_ids[0] in prompts]
        assert sorted(known) == sorted(expected)


@pytest.mark.parametrize("seed", range(20))
def test_all_text_of_a_prompt_is_known_when_it_is_asked_for(seed: int) -> None:
    rng, scene = random.Random(seed), Scene()
    for _ in range(200):
        match rng.randrange(6):
            case 0:
                scene.open(rng.randrange(4))
            case 1 if scene.running:
                scene.close(rng.choice(scene.running))
            case 2 | 3:
                for sequence in scene.running:
                    scene.grow(sequence, *(rng.randrange(9) for _ in range(rng.randrange(3))))
            case 4:
                scene.listeners.pause()
            case 5 if scene.running:
                if rng.random() < 0.5:
                    scene.listeners.resume()
                    scene.check({s.prompt_ids[0] for s in scene.running})
                    assert scene.other.running == {s.request_id: s.output_ids for s in scene.running}
                    assert scene.ahead.running == scene.other.running
                else:
                    asked = rng.sample(scene.running, 1)
                    scene.listeners.resume(asked)
                    scene.check({s.prompt_ids[0] for s in asked})
                    assert all(scene.ahead.running[s.request_id] == s.output_ids for s in asked)
        assert set(scene.ahead.running) <= {s.request_id for s in scene.running}, "what has ended is closed at once"
    assert [output for _, output in scene.other.ended] == [s.output_ids for s in scene.ended]


def test_nothing_is_told_during_a_pause_and_only_what_is_asked_for_after_it() -> None:
    scene = Scene()
    scene.listeners.pause()
    one, two = scene.open(1), scene.open(2)
    scene.grow(one, 5, 6)
    scene.close(one)
    assert (scene.text.running, scene.text.ended) == ({}, [])
    assert (scene.ahead.running, scene.ahead.ended) == ({}, [])
    scene.listeners.resume([two])
    assert list(scene.text.running) == [two.request_id]
    assert scene.text.ended == []
    scene.listeners.resume()
    assert scene.text.ended == []
    scene.open(1)
    assert scene.text.ended == [((1,), [5, 6])], "when its prompt comes again"


def test_who_drafts_ahead_hears_of_what_is_asked_for_and_of_no_other() -> None:
    scene = Scene()
    scene.listeners.pause()
    one, two = scene.open(1), scene.open(1)
    scene.listeners.resume([two])
    assert list(scene.text.running) == [one.request_id, two.request_id]
    assert list(scene.ahead.running) == [two.request_id]
    scene.close(one)
    scene.close(two)
    assert scene.ahead.running == {}
    scene.listeners.resume()
    assert len(scene.ahead.ended) == 1


def test_what_waits_is_bounded_and_the_oldest_goes_first() -> None:
    scene = Scene(max_tokens=10)
    begun = scene.open(1)
    scene.listeners.pause()
    for prompt in (2, 3):
        sequence = scene.open(prompt)
        scene.grow(sequence, *range(4))
        scene.close(sequence)
    scene.grow(begun, *range(4))
    scene.close(begun)
    scene.listeners.resume()
    for prompt in (1, 2, 3):
        scene.open(prompt)
    assert [prompt for prompt, _ in scene.text.ended] == [(1,), (3,)]


def test_a_request_that_was_opened_is_closed_even_if_its_text_is_dropped() -> None:
    scene = Scene(max_tokens=3)
    sequence = scene.open(1)
    scene.listeners.pause()
    scene.grow(sequence, *range(4))
    scene.close(sequence)
    assert scene.text.running == {}


def test_a_drafter_that_raises_is_dropped() -> None:
    failures: list[str] = []
    drafter = Notes()
    listeners = Listeners([drafter], max_tokens=0, on_failure=failures.append)
    for _ in range(FAILURES + 2):
        listeners.call(drafter, lambda: 1 / 0)
    assert failures == ["notes"] * FAILURES
    assert not listeners.works("notes")


def test_asked_as_if_the_last_tokens_were_not_there_yet() -> None:
    scene = Scene()
    first = scene.open(1)
    scene.grow(first, 1, 2)
    scene.listeners.pause()
    mate, stranger = scene.open(1), scene.open(2)
    for sequence in (first, mate, stranger):
        scene.grow(sequence, 3, 4, 5, 6)
    with scene.listeners.earlier([mate], 3):
        assert (first.output_ids, mate.output_ids, stranger.output_ids) == ([1, 2, 3], [3], [3, 4, 5, 6])
        assert scene.text.running == {first.request_id: [1, 2, 3], mate.request_id: [3]}
    assert (first.output_ids, mate.output_ids) == ([1, 2, 3, 4, 5, 6], [3, 4, 5, 6])
    with scene.listeners.earlier([mate], 8):  # not before what is known
        assert mate.output_ids == [3]
    scene.listeners.resume()
    assert scene.text.running == {s.request_id: s.output_ids for s in scene.running}
