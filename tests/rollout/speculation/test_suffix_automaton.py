"""The automaton against a search through all substrings; each test of equality also catches a seeded wrong version."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.speculation.suffix import ROOT, SuffixAutomaton

ALL = 10**9
"""Counts every context."""
STEPS = st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 2)), max_size=40)
"""(text to append to, token); -1 begins a text. Three tokens make many repetitions."""


class Texts:
    """An automaton, and the same texts as lists."""

    def __init__(self, prompt: list[int], make: Callable[[], SuffixAutomaton]) -> None:
        self.automaton = make()
        self.prompt = prompt
        self.prompt_end = self.automaton.extend(ROOT, prompt)
        self.texts: list[list[int]] = []
        self.ends: list[int] = []
        self.newest: list[tuple[int, ...]] = []
        """Every (context, next token), context being all that precedes it in its text, in the order of appending."""
        self.newest += [tuple(prompt[: i + 1]) for i in range(len(prompt))]

    def begin(self) -> None:
        self.texts.append(list(self.prompt))
        self.ends.append(self.prompt_end)

    def append(self, index: int, token: int) -> None:
        self.texts[index].append(token)
        self.newest.append(tuple(self.texts[index]))
        self.ends[index] = self.automaton.extend(self.ends[index], [token])

    def followers(self, context: tuple[int, ...]) -> list[int]:
        """What followed `context`, oldest first. A prompt is one text, however many texts begin with it."""
        n = len(context)
        return [text[-1] for text in self.newest if len(text) > n and text[len(text) - 1 - n : -1] == context]

    def longest_match(self, index: int) -> tuple[int, ...]:
        text = tuple(self.texts[index])
        return next((text[i:] for i in range(len(text)) if self.followers(text[i:])), ())

    def favourite(self, context: tuple[int, ...]) -> int:
        """The most frequent follower; of equal ones the newest."""
        followers = self.followers(context)
        counts = Counter(followers)
        return next(token for token in reversed(followers) if counts[token] == max(counts.values()))


def play(prompt: list[int], steps: list[tuple[int, int]], make: Callable[[], SuffixAutomaton]) -> Texts:
    texts = Texts(prompt, make)
    for index, token in steps:
        if index < 0 or index >= len(texts.texts):
            texts.begin()
            index = -1
        texts.append(index, token)
    return texts


def check_matches(texts: Texts) -> None:
    for index, end in enumerate(texts.ends):
        _, length = texts.automaton.match(end)
        assert length == len(texts.longest_match(index))


def check_drafts(texts: Texts, min_length: int = 1) -> None:
    """Every draft token is the most frequent, newest follower of the longest context that has any."""
    for index, end in enumerate(texts.ends):
        context = texts.longest_match(index)
        draft = texts.automaton.continuation(texts.automaton.match(end)[0], 6, min_length)
        for token in [*draft, None]:
            while len(context) >= min_length and not texts.followers(context):
                context = context[1:]
            if token is None:
                assert len(draft) == 6 or len(context) < min_length
            else:
                assert len(context) >= min_length
                assert token == texts.favourite(context)
                context = (*context, token)


def counting_all() -> SuffixAutomaton:
    return SuffixAutomaton(counted=ALL)


@given(st.lists(st.integers(0, 2), max_size=8), STEPS)
def test_matches_the_longest_suffix_that_was_continued(prompt: list[int], steps: list[tuple[int, int]]) -> None:
    check_matches(play(prompt, steps, SuffixAutomaton))


@given(st.lists(st.integers(0, 2), max_size=8), STEPS, st.integers(1, 3))
def test_drafts_the_most_frequent_continuations(
    prompt: list[int], steps: list[tuple[int, int]], min_length: int
) -> None:
    check_drafts(play(prompt, steps, counting_all), min_length)


class NeverSplits(SuffixAutomaton):
    """Wrong: substrings keep sharing a state after one of them was seen elsewhere alone."""

    def _split(self, state: int, target: int) -> int:
        return target


class OldestWins(SuffixAutomaton):
    """Wrong: the first continuation stays the favourite."""

    def extend(self, end: int, tokens: object) -> int:
        for token in tokens:  # type: ignore[attr-defined]
            before = list(self._best)
            end = super().extend(end, [token])
            self._best[: len(before)] = [old or new for old, new in zip(before, self._best, strict=False)]
        return end


def random_steps(seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    num_tokens = rng.choice([2, 3, 4])
    return [(rng.randint(-1, 3), rng.randrange(num_tokens)) for _ in range(rng.choice([20, 40, 80]))]


@pytest.mark.parametrize("seed", range(60))
def test_long_random_texts(seed: int) -> None:
    texts = play([0, 1][: seed % 3], random_steps(seed), counting_all)
    check_matches(texts)
    check_drafts(texts)


def test_the_checks_catch_wrong_versions() -> None:
    with pytest.raises(AssertionError):
        check_matches(play([], random_steps(0), NeverSplits))
    with pytest.raises(AssertionError):
        check_drafts(play([], random_steps(0), lambda: OldestWins(counted=ALL)))


def test_texts_never_join() -> None:
    automaton = SuffixAutomaton()
    first = automaton.extend(ROOT, [1, 2])
    automaton.extend(ROOT, [3, 4])
    assert automaton.match(first) == (ROOT, 0), "nothing followed 2, though 3 was appended after it"
    other = automaton.extend(ROOT, [9, 1])
    state, length = automaton.match(other)
    assert (length, automaton.continuation(state, 5)) == (1, [2])


def test_of_equal_counts_the_newest_wins_and_then_the_majority() -> None:
    automaton = SuffixAutomaton()

    def after_5() -> list[int]:
        state, _ = automaton.match(automaton.extend(ROOT, [5]))
        return automaton.continuation(state, 1)

    automaton.extend(ROOT, [5, 1])
    automaton.extend(ROOT, [5, 2])
    assert after_5() == [2]
    automaton.extend(ROOT, [7, 5, 1])
    assert after_5() == [1]


def test_a_draft_goes_on_where_the_text_that_it_follows_ends() -> None:
    automaton = SuffixAutomaton()
    automaton.extend(ROOT, [1, 2, 3])
    automaton.extend(ROOT, [9, 3, 4, 5])
    state, length = automaton.match(automaton.extend(ROOT, [1, 2]))
    assert length == 2
    assert automaton.continuation(state, 8) == [3, 4, 5]
    assert automaton.continuation(state, 8, min_length=2) == [3]


def test_equal_calls_give_equal_drafts() -> None:
    first, second = (play([1, 0, 1], random_steps(7), SuffixAutomaton) for _ in range(2))
    assert first.ends == second.ends
    for end in first.ends:
        drafts = [texts.automaton.continuation(texts.automaton.match(end)[0], 8) for texts in (first, second)]
        assert drafts[0] == drafts[1]


def test_size_and_steps_grow_with_the_tokens_alone() -> None:
    """At most two states per token; equal texts share theirs. Repetitions are where a naive version is quadratic."""
    for tokens in ([0] * 10_000, [0, 1] * 5_000, [*range(10_000)]):
        automaton = SuffixAutomaton()
        started = time.thread_time()
        end = automaton.extend(ROOT, tokens)
        assert time.thread_time() - started < 1.0, "about 0.02 s when every token costs the same"
        assert automaton.num_tokens == 10_000
        size = automaton.num_states
        assert size <= 20_000
        assert automaton.extend(ROOT, tokens) == end
        assert automaton.num_states == size
