"""Drafters hear of everything that they are asked about, once and in order. They draft from what they were told, get
nothing that belongs to the engine, and what is wrong with one is told once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import pytest

from specactor.config import SpeculationConfig
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.drafter_set import FAILURES, DrafterSet
from specactor.rollout.speculation.estimates import Estimates


class Notes(Drafter):
    """Notes what it hears."""

    def __init__(self, name: str = "notes", *, drafts_first: bool = True, drafts_ahead: bool = False) -> None:
        self.name, self.drafts_first, self.drafts_ahead = name, drafts_first, drafts_ahead
        self.running: dict[str, list[int]] = {}
        self.ended: list[tuple[tuple[int, ...], list[int]]] = []
        self.policies = 0

    def policy_changed(self) -> None:
        self.policies += 1

    def open(self, sequence: DraftSequence) -> None:
        assert sequence.request_id not in self.running
        assert sequence.output_ids == []
        self.running[sequence.request_id] = []

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        self.running[sequence.request_id] += tokens

    def close(self, sequence: DraftSequence) -> None:
        self.ended.append((sequence.prompt_ids, self.running.pop(sequence.request_id)))

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        """The last token that it knows. It is asked for what it was told of."""
        assert all(self.running[s.request_id] == s.output_ids for s in sequences)
        return [s.output_ids[-1:] for s in sequences]


class Scene:
    """Requests that come, grow and end."""

    def __init__(self, *, decides: bool = True) -> None:
        self.text, self.other = Notes(), Notes("other", drafts_first=False)
        self.ahead = Notes("ahead", drafts_ahead=True)
        config = SpeculationConfig(mode="auto", max_window=3)
        drafters = [self.text, self.other, self.ahead]
        self.estimates = Estimates({drafter.name: drafter for drafter in drafters}, max_window=3)
        self.drafter_set = DrafterSet(drafters, config, self.estimates, decides=decides)
        self.running: list[DraftSequence] = []
        self.ended: list[DraftSequence] = []
        self.number = 0

    def open(self, prompt: int) -> DraftSequence:
        self.number += 1
        sequence = DraftSequence(request_id=str(self.number), prompt_ids=(prompt,))
        self.running.append(sequence)
        self.drafter_set.open(sequence)
        return sequence

    def grow(self, sequence: DraftSequence, *tokens: int) -> None:
        sequence.output_ids.extend(tokens)

    def close(self, sequence: DraftSequence) -> None:
        self.running.remove(sequence)
        self.ended.append(sequence)
        self.drafter_set.close(sequence)


@pytest.mark.parametrize("seed", range(20))
def test_all_text_is_known_when_drafters_are_asked(seed: int) -> None:
    rng, scene = random.Random(seed), Scene()
    for _ in range(200):
        match rng.randrange(5):
            case 0:
                scene.open(rng.randrange(4))
            case 1 if scene.running:
                scene.close(rng.choice(scene.running))
            case 2 | 3:
                for sequence in scene.running:
                    scene.grow(sequence, *(rng.randrange(9) for _ in range(rng.randrange(3))))
            case 4:
                scene.drafter_set.tell()
                for drafter in (scene.text, scene.other, scene.ahead):
                    assert drafter.running == {s.request_id: s.output_ids for s in scene.running}
        assert set(scene.ahead.running) <= {s.request_id for s in scene.running}, "what has ended is closed at once"
        assert scene.text.ended == [(s.prompt_ids, s.output_ids) for s in scene.ended]
    ended = [(s.prompt_ids, s.output_ids) for s in scene.ended]
    assert all(of in ended for of in scene.other.ended), "of what they hear of, they hear all"


def test_nothing_is_told_before_somebody_asks_but_what_has_ended_to_drafters_over_text() -> None:
    scene = Scene()
    one, two = scene.open(1), scene.open(2)
    scene.grow(one, 5, 6)
    assert (scene.text.running, scene.ahead.running) == ({}, {})
    scene.close(one)
    assert scene.text.ended == [((1,), [5, 6])]
    assert scene.ahead.ended == []
    scene.drafter_set.tell()
    assert list(scene.ahead.running) == list(scene.text.running) == [two.request_id]


def test_on_ranks_that_do_not_decide_those_that_draft_first_hear_of_nothing() -> None:
    scene = Scene(decides=False)
    one, two = scene.open(1), scene.open(2)
    scene.grow(one, 5)
    scene.drafter_set.policy_changed()
    scene.drafter_set.tell([one, two])
    assert scene.drafter_set.draft("other", [one, two], [1, 1]) == [[5], []]
    scene.close(one)
    assert scene.other.ended == [((1,), [5])]
    assert scene.other.policies == 1
    assert list(scene.drafter_set.drafters) == ["notes", "other", "ahead"], "an index means the same on all ranks"
    for drafter in (scene.text, scene.ahead):
        assert (drafter.running, drafter.ended, drafter.policies) == ({}, [], 0)


def test_who_drafts_ahead_hears_of_what_is_asked_for_and_of_no_other() -> None:
    scene = Scene()
    one, two = scene.open(1), scene.open(1)
    scene.drafter_set.tell([two])
    assert list(scene.text.running) == [one.request_id, two.request_id]
    assert list(scene.ahead.running) == [two.request_id]
    scene.close(one)
    scene.close(two)
    assert scene.ahead.running == {}
    assert len(scene.ahead.ended) == 1


def test_drafts_from_some_tokens_ago_are_made_without_knowing_these() -> None:
    """So what was emitted since tells how good they are; then it is told, too."""
    scene = Scene()
    first = scene.open(1)
    scene.grow(first, 1, 2)
    scene.drafter_set.tell()
    mate = scene.open(1)
    for sequence in (first, mate):
        scene.grow(sequence, 3, 3, 5, 6)
    rate = scene.estimates.acceptance["notes"].rate
    scene.drafter_set.hindsight([first, mate], [3, 3])
    assert scene.text.running == {first.request_id: [1, 2, 3], mate.request_id: [3]}
    assert scene.estimates.acceptance["notes"].rate > rate, "the next token was another 3"
    assert scene.ahead.running == {first.request_id: [1, 2]}, "drafters over text alone are asked so"
    scene.drafter_set.tell()
    assert scene.text.running == {s.request_id: s.output_ids for s in scene.running}
    assert [s.output_ids for s in (first, mate)] == [[1, 2, 3, 3, 5, 6], [3, 3, 5, 6]]


class Knows(DrafterSet):
    """Wrong: drafters over text are told of all tokens before they draft in hindsight."""

    def _tell(self, requests: Iterable[object], kind: str, *, but: int = 0) -> None:
        super()._tell(requests, kind)  # type: ignore[arg-type]


def test_hindsight_that_knows_what_came_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rollout.speculation.test_drafter_set.DrafterSet", Knows)
    with pytest.raises(AssertionError):
        test_drafts_from_some_tokens_ago_are_made_without_knowing_these()


class Vandal(Notes):
    """Changes all lists that it is given."""

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        sequence.output_ids.clear()
        assert isinstance(tokens, list)
        tokens.append(7)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        for sequence in sequences:
            sequence.output_ids[:] = [7]
        return [[7] for _ in sequences]


@pytest.mark.parametrize("ahead", [False, True])
def test_no_drafter_can_change_what_the_engine_holds(ahead: bool) -> None:
    vandal = Vandal(drafts_ahead=ahead)
    drafter_set = DrafterSet([vandal], SpeculationConfig(mode="auto"), Estimates({vandal.name: vandal}, max_window=8))
    sequence = DraftSequence(request_id="a", prompt_ids=(1,))
    drafter_set.open(sequence)
    for token in range(5):
        sequence.output_ids.append(token)
        drafter_set.tell()
        drafter_set.draft("notes", [sequence], [2])
        drafter_set.hindsight([sequence], [2])
        drafter_set.tell()
        assert sequence.output_ids == list(range(token + 1))


def asked(
    lie: Callable[[list[int]], object], rounds: int = 5, **attributes: object
) -> tuple[list[list[list[int]]], Counts]:
    """What is verified of what a drafter returns for two requests, round by round; and what is told of it.
    `attributes` are what it has after each."""

    class Liar(Notes):
        def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
            vars(self).update(attributes)
            return lie(list(windows))  # type: ignore[return-value]

    estimates = Estimates({"notes": Liar()}, max_window=8)
    counts = estimates.counts["notes"]
    drafter_set = DrafterSet([Liar()], SpeculationConfig(mode="auto"), estimates)
    drafter_set.vocab_size = 10
    sequences = [DraftSequence(request_id=name, prompt_ids=(1,)) for name in "ab"]
    for sequence in sequences:
        drafter_set.open(sequence)
    drafter_set.tell()
    found = []
    for _ in range(rounds):
        found.append(drafter_set.draft("notes", sequences, [2, 3]))
        # As rounds use what was told, where nobody catches what is wrong.
        assert drafter_set.read_up <= {0, 1}
        model = estimates.acceptance["notes"]
        model.observe_all([*"ab"], [*map(len, found[-1])], [0, 0], asked=[2, 3])
        assert model.survivals([*"ab"], covered=True).shape == (2, 8)
    return found, counts


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"confidence": [0.9, 0.2]}, "TypeError: 'float' object cannot be interpreted as an integer"),
        ({"confidence": [1, float("nan")]}, "TypeError: 'float' object cannot be interpreted as an integer"),
        ({"confidence": [2]}, "ValueError: zip() argument 2 is shorter than argument 1"),
        ({"confidence": [2, 2, 2]}, "ValueError: zip() argument 2 is longer than argument 1"),
        ({"confidence": None}, "TypeError: 'NoneType' object is not iterable"),
        ({"read_up": None}, "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_drafter_whose_word_of_its_drafts_is_wrong_loses_them(attributes: dict[str, object], reason: str) -> None:
    drafts, counts = asked(lambda windows: [[1], [2]], **attributes)
    assert drafts == [[[], []]] * 5
    assert counts.failures == FAILURES
    assert counts.problems == [f"Liar: {reason}", "Liar: failed 3 times, and is not asked again"]


@pytest.mark.parametrize("sure", [[True, False], np.array([1, 0]), [-7, 10**30], (np.int8(3), 0)])
def test_confidence_is_any_integer(sure: Sequence[int]) -> None:
    drafts, counts = asked(lambda windows: [[1], [2]], confidence=sure)
    assert drafts == [[[1], [2]]] * 5
    assert counts.failures == 0


def test_figures_are_finite_numbers() -> None:
    """They travel as JSON's like, and are added."""

    class Counting(Notes):
        def figures(self) -> dict[str, float]:
            return dict(told)

    told: dict[str, float] = {"a": np.float32(0.5), "b": np.int64(2), "c": float("nan"), "d": float("-inf"), "e": 10**9}
    drafter = Counting()
    estimates = Estimates({"notes": drafter}, max_window=8)
    drafter_set = DrafterSet([drafter], SpeculationConfig(mode="auto"), estimates)
    drafter_set.note_figures()
    kept = estimates.report()["notes"]
    assert (kept.figures, kept.failures) == ({"a": 0.5, "b": 2.0, "e": 1e9}, 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=Counts) == kept
    told["f"] = None  # type: ignore[assignment]
    drafter_set.note_figures()
    lost = estimates.report()["notes"]
    assert (lost.figures, lost.failures) == ({}, 1)
    assert (kept + lost).figures == kept.figures


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ([[1]], "ValueError: propose returned 1 drafts for 2 requests"),
        ([[1], [2], [3]], "ValueError: propose returned 3 drafts for 2 requests"),
        ([[1], None], "TypeError: 'NoneType' object is not subscriptable"),
        (None, "TypeError: object of type 'NoneType' has no len()"),
    ],
)
def test_a_drafter_that_fails_is_dropped_and_that_is_told_once(returned: object, reason: str) -> None:
    drafts, counts = asked(lambda windows: returned)
    assert drafts == [[[], []]] * 5
    assert counts.failures == FAILURES
    assert counts.problems == [f"Liar: {reason}", "Liar: failed 3 times, and is not asked again"]


class Fails(Drafter):
    """Raises whenever it is told one thing."""

    name = "fails"

    def __init__(self, action: str, *, drafts_ahead: bool) -> None:
        self.action, self.drafts_ahead = action, drafts_ahead
        self.calls = 0
        setattr(self, action, self.fail)

    def fail(self, *_: object) -> None:
        self.calls += 1
        raise ValueError(f"no {self.action}")

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [[9] for _ in sequences]


TOLD = ["open", "commit", "close", "policy_changed", "is_there", "figures", "stop"]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("action", TOLD)
def test_a_drafter_that_raises_when_it_is_told_something_is_dropped(action: str, ahead: bool) -> None:
    fails, healthy = Fails(action, drafts_ahead=ahead), Notes(drafts_ahead=ahead)
    estimates = Estimates({"fails": fails, "notes": healthy}, max_window=8)
    drafter_set = DrafterSet([fails, healthy], SpeculationConfig(mode="auto"), estimates)
    rounds = FAILURES + 2
    for number in range(rounds):
        sequence = DraftSequence(request_id=str(number), prompt_ids=(number,))
        drafter_set.open(sequence)
        sequence.output_ids += [5, 6]
        drafter_set.find()
        drafter_set.tell()
        assert drafter_set.there >= {"notes"}
        drafts = drafter_set.first([sequence], [1])
        assert (drafts["notes"], sequence.output_ids) == ([[6]], [5, 6])
        drafter_set.close(sequence)
        drafter_set.policy_changed()
        drafter_set.note_figures()
        drafter_set.stop()
    assert healthy.ended == [((number,), [5, 6]) for number in range(rounds)], "it hears all"
    assert fails.calls == estimates.counts["fails"].failures == FAILURES
    problems = [f"ValueError: no {action}", "failed 3 times, and is not asked again"]
    assert estimates.counts["fails"].problems == [f"Fails: {problem}" for problem in problems]
    assert drafter_set.draft("fails", [sequence], [1]) == [[]]
    assert (estimates.counts["notes"].failures, estimates.counts["notes"].problems) == (0, [])


class DropsNobody(DrafterSet):
    """Wrong: one that failed is told for ever."""

    def _count_failure(self, drafter: Drafter, error: Exception) -> None:
        super()._count_failure(drafter, error)
        self._failures[drafter.name] = 0


class FailsWithIt(DrafterSet):
    """Wrong: what a drafter raises ends the engine's round."""

    def _count_failure(self, drafter: Drafter, error: Exception) -> None:
        raise error


@pytest.mark.parametrize("wrong", [DropsNobody, FailsWithIt])
@pytest.mark.parametrize("action", TOLD)
def test_a_set_that_goes_on_telling_one_that_raises_is_caught(
    action: str, wrong: type[DrafterSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.rollout.speculation.test_drafter_set.DrafterSet", wrong)
    with pytest.raises((AssertionError, ValueError)):
        test_a_drafter_that_raises_when_it_is_told_something_is_dropped(action, ahead=False)


def test_one_that_raises_has_its_reason_told_in_one_short_line() -> None:
    _, counts = asked(lambda windows: [][0 if windows else 1])
    assert counts.problems[0] == "Liar: IndexError: list index out of range"
    _, counts = asked(lambda windows: int("x" * 1000 + "\n"), rounds=1)
    assert len(counts.problems) == 1
    assert len(counts.problems[0]) < 250
    assert "\n" not in counts.problems[0]


@pytest.mark.parametrize(
    ("draft", "kept", "reasons"),
    [
        ([1, 2, 3], [1, 2], ["drafted more tokens than it was asked for; they are cut"]),
        ([1, -1], [1], ["drafted a negative token; the draft ends before it"]),
        ([10, 1], [], ["drafted a token beyond the vocabulary; the draft ends before it"]),
        ([1, 2.5], [1], ["drafted a float, which is no token; the draft ends before it"]),
        (["1"], [], ["drafted a str, which is no token; the draft ends before it"]),
        ([np.int64(1), np.int32(2)], [1, 2], []),
        (
            [1, 10**6, 1, 1],
            [1],
            [
                "drafted more tokens than it was asked for; they are cut",
                "drafted a token beyond the vocabulary; the draft ends before it",
            ],
        ),
    ],
)
def test_what_is_no_token_and_what_is_too_long_is_cut_and_told_once(
    draft: list[object], kept: list[int], reasons: list[str]
) -> None:
    drafts, counts = asked(lambda windows: [draft, []])
    assert drafts == [[kept, []]] * 5
    assert all(type(token) is int for of in drafts for one in of for token in one)
    assert counts.failures == 0
    assert counts.cut_drafts == (5 if reasons else 0)
    assert counts.problems == [f"Liar: {reason}" for reason in reasons]


def test_problems_of_several_engines_are_one() -> None:
    one, other = (asked(lambda windows: [[1, -1], []])[1] for _ in range(2))
    more = asked(lambda windows: [[1.5], []])[1]
    total = one + other + more
    assert total == more + other + one, "in any order"
    assert len(total.problems) == 2
    assert total.cut_drafts == 15
