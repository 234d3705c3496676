"""What a suffix drafter drafts and from where, also under random calls; what its corpus finds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.suffix import CORPUS_MAX_N, CORPUS_MIN_N, TOKENS_PER_MATCH, Corpus, SuffixDrafter

PROMPT = (91, 92, 93)


def start(drafter: Drafter, name: str, prompt: tuple[int, ...] = PROMPT, output: Iterable[int] = ()) -> DraftSequence:
    sequence = DraftSequence(request_id=name, prompt_ids=prompt)
    drafter.open(sequence)
    commit(drafter, sequence, output)
    return sequence


def commit(drafter: Drafter, sequence: DraftSequence, tokens: Iterable[int]) -> None:
    tokens = list(tokens)
    sequence.output_ids.extend(tokens)
    drafter.commit(sequence, tokens)


def draft(drafter: Drafter, sequence: DraftSequence, window: int = 8) -> list[int]:
    return drafter.propose([sequence], [window])[0]


def test_drafts_from_the_prompt_and_the_own_output() -> None:
    drafter = SuffixDrafter()
    assert draft(drafter, start(drafter, "a", (1, 2, 3, 4, 5, 6), [9, 2, 3])) == [4, 5, 6, 9]
    own = start(drafter, "b", (1,), [10, 11, 12, 13, 14, 10, 11])
    assert draft(drafter, own) == [12, 13, 14, 10]


def test_drafts_from_running_group_mates_as_their_text_appears() -> None:
    drafter = SuffixDrafter()
    ahead, behind = start(drafter, "a"), start(drafter, "b")
    assert draft(drafter, behind) == []
    commit(drafter, ahead, [1, 2])
    assert draft(drafter, behind) == [1, 2], "both are at the end of the same prompt"
    commit(drafter, ahead, [3, 4])
    commit(drafter, behind, [1])
    assert draft(drafter, behind) == [2, 3, 4]
    assert draft(drafter, ahead) == []


def test_the_majority_of_the_group_decides() -> None:
    drafter = SuffixDrafter()
    for name, output in (("a", [1, 5, 6]), ("b", [1, 5, 7]), ("c", [1, 4, 4])):
        start(drafter, name, output=output)
    assert draft(drafter, start(drafter, "d"))[:2] == [1, 5]


def test_drafts_from_earlier_steps_after_the_policy_has_changed() -> None:
    drafter = SuffixDrafter()
    drafter.close(start(drafter, "0", output=range(1, 7)))
    drafter.policy_changed()
    assert draft(drafter, start(drafter, "1")) == [1, 2, 3, 4, 5, 6]


def test_a_request_that_is_begun_again_is_foretold_by_its_first_attempt() -> None:
    """After a retract, with and without a close, or with the engine's next process."""
    output = [random.Random(1).randrange(50) for _ in range(60)]
    for closed in (True, False):
        drafter = SuffixDrafter()
        first = start(drafter, "a", output=output)
        if closed:
            drafter.close(first)
        again = start(drafter, "a", output=output[:7])
        while len(again.output_ids) < 60:
            at = len(again.output_ids)
            proposed = draft(drafter, again)
            assert proposed[: 60 - at] == output[at : at + 8]
            commit(drafter, again, proposed)
        drafter.close(again)


def test_a_request_may_be_opened_with_output() -> None:
    drafter = SuffixDrafter()
    drafter.open(DraftSequence(request_id="a", prompt_ids=PROMPT, output_ids=[1, 2, 3]))
    assert draft(drafter, start(drafter, "b", output=[1])) == [2, 3]


def test_other_prompts_help_where_they_know_a_longer_match() -> None:
    drafter = SuffixDrafter()
    first = start(drafter, "a", (1,), [5, 6, 7, 8, 9])
    assert draft(drafter, start(drafter, "b", (2,), [5, 6, 7])) == [], (
        "only responses that have ended are in the corpus"
    )
    drafter.close(first)
    assert draft(drafter, start(drafter, "c", (3,), [7])) == [], "a match of one token is too short for the corpus"
    assert draft(drafter, start(drafter, "d", (3,), [6, 7])) == [8, 9]
    assert draft(drafter, start(drafter, "e", (5, 6), [7])) == [8, 9], "the end of the prompt is part of the match"
    start(drafter, "f", (4,), [6, 7, 1])
    assert draft(drafter, start(drafter, "g", (4,), [6, 7]))[0] == 1, "of equal matches the group's goes first"
    assert draft(drafter, start(drafter, "h", (4,), [5, 6, 7]))[0] == 8, "the longer match goes first"


def test_a_draft_is_bounded_by_the_match_and_by_the_window() -> None:
    drafter = SuffixDrafter()
    start(drafter, "a", output=range(20))
    for length in (1, 2, 3, 4):
        sequence = start(drafter, f"b{length}", output=[50 + length, *range(length)])
        assert draft(drafter, sequence, 16) == list(range(length, length + TOKENS_PER_MATCH * length))
        assert draft(drafter, sequence, 1) == [length]
        assert draft(drafter, sequence, 0) == []


def test_the_group_used_longest_ago_is_forgotten_first() -> None:
    drafter = SuffixDrafter(max_tokens=40)  # 10 of them for the corpus
    for prompt in (1, 2, 3):
        drafter.close(start(drafter, "a", (prompt,), range(100 * prompt, 100 * prompt + 9)))
    drafter.close(start(drafter, "b", (1,)))
    drafter.close(start(drafter, "c", (4,), range(400, 409)))
    assert draft(drafter, start(drafter, "d", (1,)), 2) == [100, 101]
    assert draft(drafter, start(drafter, "e", (3,)), 2) == [300, 301]
    assert draft(drafter, start(drafter, "f", (2,)), 2) == []


def test_ended_responses_of_a_running_group_are_forgotten_oldest_first() -> None:
    drafter = SuffixDrafter(max_tokens=60)
    running = start(drafter, "run", output=[80, 81, 80])
    for i in range(8):
        drafter.close(start(drafter, str(i), output=[10 * i + j for j in range(8)]))
    assert drafter.num_tokens <= 60
    assert draft(drafter, start(drafter, "x", output=[73]), 2) == [74, 75]
    assert draft(drafter, start(drafter, "y", output=[3]), 2) == []
    assert draft(drafter, running) == [81, 80], "its text was moved to the new automaton"


def test_nothing_of_earlier_steps_is_kept_with_a_history_of_0() -> None:
    drafter = SuffixDrafter(max_tokens=0)
    first, second = start(drafter, "a", output=[1, 2, 3, 1]), start(drafter, "b", output=[5])
    assert draft(drafter, first, 2) == [2, 3]
    drafter.close(first)
    drafter.close(second)
    assert drafter.num_tokens == 0
    assert draft(drafter, start(drafter, "c")) == []


def test_ten_thousand_tokens_in_one_request() -> None:
    rng = random.Random(0)
    drafter = SuffixDrafter()
    sequence = start(drafter, "a")
    seconds = []
    for _ in range(2_500):
        started = time.thread_time()
        draft(drafter, sequence)
        commit(drafter, sequence, [rng.randrange(200) for _ in range(4)])
        seconds.append(time.thread_time() - started)
    assert drafter.num_tokens >= 10_000
    last = sorted(seconds[-100:])  # but the few in which memory was tidied up
    assert last[90] < 0.01, "no round may build everything again; one takes about 0.00001 s"


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "commit", "commit", "close", "propose"]),
        st.integers(0, 5),
        st.integers(0, 2),
        st.lists(st.integers(0, 3), max_size=6),
    ),
    max_size=60,
)
"""(what, request, its prompt, tokens). Requests are closed in any order, opened twice, committed to after their end."""
PROMPTS: tuple[tuple[int, ...], ...] = ((), (7,), (1, 2, 3, 1, 2))


def play(
    drafter: SuffixDrafter, max_tokens: int, operations: list[tuple[str, int, int, list[int]]]
) -> list[list[list[int]]]:
    """All drafts. Checks after every call that they are possible, and how many tokens are held."""
    running: dict[str, DraftSequence] = {}
    drafts = []
    seen: set[int] = set()
    for what, number, prompt, tokens in operations:
        name = str(number)
        sequence = running.get(name) or DraftSequence(request_id=name, prompt_ids=PROMPTS[prompt])
        if what == "open":
            running[name] = sequence = DraftSequence(request_id=name, prompt_ids=PROMPTS[prompt], output_ids=tokens[:2])
            drafter.open(sequence)
            seen |= {*sequence.prompt_ids, *sequence.output_ids}
        elif what == "commit":
            commit(drafter, sequence, tokens)
            seen |= set(tokens) if name in running else set()
        elif what == "close":
            drafter.close(sequence)
            running.pop(name, None)
        else:
            windows = [(number + i) % 5 for i in range(len(running))]
            drafts.append(drafter.propose(list(running.values()), windows))
            assert all(len(d) <= w and seen.issuperset(d) for d, w in zip(drafts[-1], windows, strict=True))
        assert drafter.num_tokens <= bound(max_tokens, running.values())
    for sequence in running.values():
        drafter.close(sequence)
    assert drafter.num_tokens <= max_tokens
    return drafts


def bound(max_tokens: int, running: Iterable[DraftSequence]) -> int:
    outputs = sum(len(sequence.output_ids) for sequence in running)
    prompts = sum(map(len, {sequence.prompt_ids for sequence in running}))
    corpus = max_tokens // 4
    return max(max_tokens, 2 * (outputs + prompts) + corpus)


@given(OPERATIONS, st.sampled_from([0, 12, 40, 1000]))
def test_any_calls_in_any_order(operations: list[tuple[str, int, int, list[int]]], max_tokens: int) -> None:
    drafts = play(SuffixDrafter(max_tokens=max_tokens), max_tokens, operations)
    assert play(SuffixDrafter(max_tokens=max_tokens), max_tokens, operations) == drafts, "equal calls, equal drafts"


class NeverForgets(SuffixDrafter):
    """Wrong."""

    def _forget(self) -> None:
        pass


class NeverCloses(SuffixDrafter):
    """Wrong."""

    def close(self, sequence: DraftSequence) -> None:
        pass


@pytest.mark.parametrize("wrong", [NeverForgets, NeverCloses])
def test_the_bound_catches_wrong_versions(wrong: type[SuffixDrafter]) -> None:
    operations = [("open" if i % 4 == 0 else "commit", i % 3, 1, [i % 4] * 6) for i in range(40)]
    operations += [("close", i % 3, 1, []) for i in range(3)]
    with pytest.raises(AssertionError):
        play(wrong(max_tokens=40), 40, operations)
    play(SuffixDrafter(max_tokens=40), 40, operations)


Found = tuple[list[int], int]


def searched(places: list[tuple[list[int], int]], context: list[int], window: int, longer_than: int) -> Found:
    """What `Corpus.find` should give, by a search through all places: (text, position that can be found)."""
    for n in range(CORPUS_MAX_N, max(CORPUS_MIN_N - 1, longer_than), -1):
        for text, position in reversed(places):
            if n <= min(position, len(context)) and text[position - n : position] == context[-n:]:
                room = window if n == CORPUS_MAX_N else min(window, TOKENS_PER_MATCH * n)
                return text[position : position + room], n
    return [], 0


def check_corpus(make: type[Corpus], texts: list[tuple[list[int], list[int]]], limit: int) -> None:
    """Args: (what came before, text)."""
    corpus = make()
    places: list[tuple[list[int], int]] = []
    for context, tokens in texts:
        corpus.add(context, tokens)
        places += [([*context, *tokens], len(context) + i) for i in range(len(tokens))]
        corpus.shrink(limit)
        places = places[len(places) - min(limit, len(places)) :]
        assert corpus.num_tokens == len(places)
        for before, asking in texts:
            for longer_than in range(3):
                text = [*before, *asking]
                assert corpus.find(text, 7, longer_than=longer_than) == searched(places, text, 7, longer_than)
    corpus.shrink(0)
    assert not corpus._places


TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=6), st.integers(0, 20))
def test_the_corpus_finds_what_a_search_through_its_newest_tokens_finds(
    texts: list[tuple[list[int], list[int]]], limit: int
) -> None:
    check_corpus(Corpus, texts, limit)


class OldestWins(Corpus):
    """Wrong: the first follower stays."""

    def add(self, context: Sequence[int], tokens: Sequence[int]) -> None:
        before = dict(self._places)
        super().add(context, tokens)
        self._places |= before


class ForgetsNothing(Corpus):
    """Wrong: what was forgotten is found."""

    def shrink(self, max_tokens: int) -> None:
        places = dict(self._places)
        super().shrink(max_tokens)
        self._places |= places


class FindsWhatCameBefore(Corpus):
    """Wrong: the end of the prompt is found, too."""

    def add(self, context: Sequence[int], tokens: Sequence[int]) -> None:
        super().add((), [*context, *tokens])


@pytest.mark.parametrize("wrong", [OldestWins, ForgetsNothing, FindsWhatCameBefore])
def test_the_search_catches_wrong_versions(wrong: type[Corpus]) -> None:
    rng = random.Random(0)
    texts = [([rng.randrange(3) for _ in range(4)], [rng.randrange(3) for _ in range(6)]) for _ in range(8)]
    check_corpus(Corpus, texts, 20)
    with pytest.raises(AssertionError):
        check_corpus(wrong, texts, 20)
