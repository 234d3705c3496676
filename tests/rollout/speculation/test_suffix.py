"""What a suffix drafter drafts and from where, also under random calls and beside a search through all text."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.speculation import suffix
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.suffix import KINDS, TOKENS_PER_MATCH, SuffixDrafter

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
        draft(drafter, start(drafter, name, output=output))  # texts of one round have one vote
    assert draft(drafter, start(drafter, "d"))[:2] == [1, 5]


def check_votes(drafter: SuffixDrafter) -> None:
    """Texts of one round have one vote, so each is entered by a draft of its own; 5 alone matches."""

    def drafted(*output: int) -> list[int]:
        return draft(drafter, start(drafter, str(output), output=output))[:1]

    drafted(5, 1)
    drafted(5, 2)
    assert drafted(8, 5) == [2], "of equal counts the newest"
    drafted(7, 5, 1)
    assert drafted(9, 5) == [1], "the majority"
    drafted(10, 5, 1)
    drafted(11, 5, 2)
    assert drafted(12, 5) == [1], "still"


def test_of_equal_counts_the_newest_wins_and_then_the_majority() -> None:
    check_votes(SuffixDrafter())


class OldestWins(SuffixDrafter):
    """Wrong: a continuation stays until another has more votes."""

    def _vote(self, key: Any, place: Any, token: Any) -> None:
        self._votes += 1
        super()._vote(key, place, token)


class NewestWins(SuffixDrafter):
    """Wrong: votes are not counted."""

    def _vote(self, key: Any, place: Any, token: Any) -> None:
        self._votes[:] = 0
        super()._vote(key, place, token)


@pytest.mark.parametrize("wrong", [OldestWins, NewestWins])
def test_wrong_counts_are_caught(wrong: type[SuffixDrafter]) -> None:
    with pytest.raises(AssertionError):
        check_votes(wrong())


def test_drafts_from_earlier_steps_after_the_policy_has_changed() -> None:
    drafter = SuffixDrafter()
    drafter.close(start(drafter, "0", output=range(1, 7)))
    drafter.policy_changed()
    assert draft(drafter, start(drafter, "1")) == [1, 2, 3, 4, 5, 6]


def test_a_request_that_is_begun_again_is_foretold_by_its_first_attempt() -> None:
    """After a retract, with and without a close, or with the engine's next process."""
    output = random.Random(1).choices(range(50), k=60)
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
    drafter.close(first)
    assert draft(drafter, start(drafter, "c", (3,), [7])) == [], "one token of another prompt says nothing"
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


def test_the_oldest_text_is_forgotten_first() -> None:
    drafter = SuffixDrafter(max_tokens=40)
    running = start(drafter, "run", (9,), [80, 81, 80])
    for prompt in (1, 2, 3):
        drafter.close(start(drafter, "a", (prompt,), range(100 * prompt, 100 * prompt + 9)))
    assert draft(drafter, running) == [81, 80]
    drafter.close(start(drafter, "c", (4,), range(400, 409)))
    assert draft(drafter, start(drafter, "d", (1,)), 2) == []
    assert draft(drafter, start(drafter, "e", (3,)), 2) == [300, 301]
    assert draft(drafter, running) == [], "also of requests that run"
    commit(drafter, running, [81, 80, 81, 80])
    assert draft(drafter, running)[:2] == [81, 80], "which go on from there"


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
        assert drafter.num_tokens <= max_tokens
    return drafts


@given(OPERATIONS, st.sampled_from([2, 12, 40, 1000]))
def test_any_calls_in_any_order(operations: list[tuple[str, int, int, list[int]]], max_tokens: int) -> None:
    drafts = play(SuffixDrafter(max_tokens=max_tokens), max_tokens, operations)
    assert play(SuffixDrafter(max_tokens=max_tokens), max_tokens, operations) == drafts, "equal calls, equal drafts"


class NeverForgets(SuffixDrafter):
    """Wrong."""

    def _forget(self) -> None:
        self._token, self._after = np.pad(self._token, (0, 99)), np.pad(self._after, (0, 99))


def test_the_bound_catches_a_wrong_version() -> None:
    operations = [("open" if i % 4 == 0 else "commit", i % 3, 1, [i % 4] * 6) for i in range(40)]
    operations += [("close", i % 3, 1, []) for i in range(3)]
    with pytest.raises(AssertionError):
        play(NeverForgets(max_tokens=40), 40, operations)
    play(SuffixDrafter(max_tokens=40), 40, operations)


def searched(texts: dict[str, tuple[tuple[int, ...], list[int]]], name: str, window: int) -> list[list[int]]:
    """All drafts that may follow: after the first kind of n-gram that any text has before its last token."""
    prompt, output = texts[name]
    context = [*prompt, *output]
    for n, own in KINDS:
        n = min(n, len(context))
        whole = [[*p, *o] for p, o in texts.values() if p == prompt or not own]
        places = [(t, i) for t in whole for i in range(n, len(t)) if t[i - n : i] == context[len(context) - n :]]
        if places and n:
            return [t[i : i + min(window, TOKENS_PER_MATCH * n)] for t, i in places]
    return [[]]


def check_found(make: Callable[[], SuffixDrafter], seed: int) -> None:
    """Requests of two prompts grow token by token. A draft may leave the text that it begins in, where a later text of
    that group went on; so its first token is compared."""
    rng, drafter = random.Random(seed), make()
    texts: dict[str, tuple[tuple[int, ...], list[int]]] = {}
    sequences = [start(drafter, str(i), ((1, 2, 1), (2, 2))[i % 2]) for i in range(4)]
    for _ in range(30):
        for sequence in sequences:
            commit(drafter, sequence, [rng.randrange(3) for _ in range(rng.randrange(3))])
            texts[sequence.request_id] = sequence.prompt_ids, sequence.output_ids
        drafts = drafter.propose(sequences, [4] * len(sequences))
        for sequence, proposed in zip(sequences, drafts, strict=True):
            possible = searched(texts, sequence.request_id, 4)
            assert proposed[:1] in [p[:1] for p in possible], (proposed, possible)
            assert len(proposed) <= max(map(len, possible))


@pytest.mark.parametrize("seed", range(5))
def test_a_draft_follows_the_longest_match_that_a_search_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "FIRST_BITS", 20)  # a small table forgets some
    check_found(SuffixDrafter, seed)


class OneTokenLate(SuffixDrafter):
    """Wrong: n-grams are those that end with the token itself."""

    def _vote(self, key: Any, place: Any, token: Any) -> None:
        super()._vote(key, np.minimum(place + 1, self._end - 1), token)


class OneGroup(SuffixDrafter):
    """Wrong: all prompts are one group."""

    def open(self, sequence: DraftSequence) -> None:
        super().open(sequence)
        self._group[:] = 0


@pytest.mark.parametrize("wrong", [OneTokenLate, OneGroup])
def test_the_search_catches_wrong_versions(wrong: type[SuffixDrafter]) -> None:
    with pytest.raises(AssertionError):
        check_found(wrong, seed=0)


class Entered(SuffixDrafter):
    """Counts the tokens that it enters."""

    entered = 0

    def _enter(self) -> None:
        self.entered += self._num_pending
        super()._enter()


@pytest.mark.parametrize("rest", [10, 1_000, 20_000])
def test_what_a_look_enters_does_not_grow_with_the_rest_before_it(rest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rests are counted in tokens of each request; of each the newest are known."""
    monkeypatch.setattr(suffix, "AT_ONCE", 1_024, raising=False)
    drafter, rng = Entered(), random.Random(0)
    drafter.is_verified = False
    running = [start(drafter, str(i), (i,)) for i in range(8)]
    draft(drafter, running[0])
    drafter.entered = 0
    for number in range(4):
        drafter.close(start(drafter, f"ended {number}", (number,), range(rest)))
    for sequence in running:
        commit(drafter, sequence, [rng.randrange(10**6) for _ in range(rest)] + [1, 2, 3, 4, 1, 2])
    assert drafter.entered == 0, "nothing is entered before somebody asks"
    assert drafter.propose(running, [2] * 8) == [[3, 4]] * 8
    assert 0 < drafter.entered <= 1_024


def test_who_is_verified_knows_all_text_and_enters_it_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "AT_ONCE", 100)
    drafter = Entered()
    start(drafter, "a", output=range(1_000))
    assert draft(drafter, start(drafter, "b", output=range(5))) == [*range(5, 13)]
    assert drafter.entered == 1_000 + len(PROMPT) + 5


def test_bytes_per_token() -> None:
    drafter, tokens = SuffixDrafter(max_tokens=100_000), 50_000
    sequence = start(drafter, "a", output=random.Random(0).choices(range(1_000), k=tokens))
    draft(drafter, sequence)
    by_place = drafter._token.nbytes + drafter._after.nbytes
    assert by_place == 16 * 100_001
    assert 208 <= (drafter._key.nbytes + drafter._place.nbytes + drafter._votes.nbytes) / tokens <= 420
