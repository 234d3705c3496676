"""Prompt lookup: longest n-gram, newest follower, ranks; nothing of what was forgotten is found."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor.errors import ConfigError
from specactor.rollout.draft.drafter import DraftSequence
from specactor.rollout.draft.ngram import NgramDrafter, NgramIndex, Text


def opened(drafter: NgramDrafter, name: str, prompt: tuple[int, ...], output: list[int]) -> DraftSequence:
    sequence = DraftSequence(request_id=name, prompt_ids=prompt)
    drafter.open(sequence)
    sequence.output_ids.extend(output)
    drafter.commit(sequence, output)
    return sequence


def test_finds_the_longest_ngram_and_its_newest_follower() -> None:
    drafter = NgramDrafter()
    sequence = opened(drafter, "a", (), [1, 2, 3, 4, 9, 3, 5, 8, 2, 3])
    assert drafter.propose([sequence], [2]) == [[4, 9]], "2 3 was followed by 4; 3 alone, later, by 5"
    sequence.output_ids.append(6)
    drafter.commit(sequence, [6])
    other = opened(drafter, "b", (), [0, 2, 3])
    assert drafter.propose([other], [2]) == [[6]], "in another request's text is a newer place, and that ends there"


def test_the_prompt_is_looked_up_too() -> None:
    drafter = NgramDrafter()
    sequence = opened(drafter, "a", (1, 2, 3, 4, 5, 6, 2), [3])
    assert drafter.propose([sequence], [3]) == [[4, 5, 6]]
    late = opened(drafter, "b", sequence.prompt_ids, [])
    assert drafter.propose([late], [4])[0][:1] == [3], "2 at the end of the prompt was followed by a's first token"


def test_the_group_goes_before_other_prompts_and_a_longer_match_before_both() -> None:
    drafter = NgramDrafter()
    opened(drafter, "a", (1,), [5, 6, 7])
    assert drafter.propose([opened(drafter, "b", (2,), [5, 6])], [4]) == [[7]]
    opened(drafter, "c", (2,), [6, 8])
    assert drafter.propose([opened(drafter, "d", (2,), [9, 6])], [4]) == [[8]]
    opened(drafter, "e", (1,), [6, 3])
    assert drafter.propose([opened(drafter, "f", (2,), [9, 6])], [4]) == [[8]], "newer, but of another group"
    assert drafter.propose([opened(drafter, "g", (2,), [5, 6])], [4]) == [[7]], "a longer match"


def test_short_matches_give_short_drafts() -> None:
    drafter = NgramDrafter(max_n=3)
    text = [1, 2, 3, *range(10, 20)]
    opened(drafter, "a", (), text)
    drafts = drafter.propose(
        [opened(drafter, "b", (), [9, 3]), opened(drafter, "c", (), [9, 2, 3]), opened(drafter, "d", (), [1, 2, 3])],
        [8, 8, 8],
    )
    assert drafts == [text[3:5], text[3:7], text[3:11]]


def test_higher_ranks_begin_with_other_tokens_and_leave_room_for_the_first() -> None:
    drafters = [NgramDrafter(rank=rank) for rank in range(4)]
    drafts = []
    for drafter in drafters:
        for name, output in (("a", [8, 1, 2, 30, 31]), ("b", [9, 1, 2, 40, 41]), ("c", [7, 2, 50, 51, 52, 53, 54, 55])):
            opened(drafter, name, (), output)
        drafts += drafter.propose([opened(drafter, "d", (), [1, 2])], [6])
    assert drafts == [[40, 41], [30, 31], [50, 51, 52, 53], []], "newest after 1 2, the one before, after 2 alone"
    assert [drafter.name for drafter in drafters[:3]] == ["ngram", "ngram_2", "ngram_3"], "for one tree"


Places = list[tuple[Text, int]]
"""(text, position of a token that can be found), oldest first."""


def searched(places: Places, text: Text, window: int, sizes: range, rank: int) -> list[int]:
    """What `find` should give, by a search through all places."""
    starts: Places = []
    longest = 0
    for n in reversed(sizes):
        if n > len(text.ids):
            continue
        found = [(t, end) for t, end in reversed(places) if end >= n and t.ids[end - n : end] == text.ids[-n:]]
        longest = longest or (n if found else 0)
        for scope in ([place for place in found if place[0].group == text.group], found):
            differing = [place for place in scope if place[0].ids[place[1]] != scope[0][0].ids[scope[0][1]]]
            starts += scope[:1] + differing[:1]
    distinct = {}
    for t, end in starts:
        distinct.setdefault(t.ids[end], t.ids[end:])
    room = window - longest if rank else window if longest == sizes[-1] else min(window, 2 * longest)
    return list(distinct.values())[rank][: max(0, room)] if rank < len(distinct) else []


def check_index(make: type[NgramIndex], parts: list[list[int]], limit: int, sizes: range) -> None:
    """Three texts of two groups that take turns."""
    index = make(min_n=sizes[0], max_n=sizes[-1])
    texts = [Text([7, 8], -1), Text([9], -2), Text([], -1)]
    places: Places = []
    for turn, part in enumerate(parts):
        text = texts[turn % 3]
        places += [(text, len(text.ids) + i) for i in range(len(part))]
        index.add(text, part)
        index.shrink(limit)
        places = places[len(places) - min(limit, len(places)) :]
        assert index.num_tokens == len(places)
        for asking in texts:
            for rank in range(3):
                found, _ = index.find(asking.ids, 5, group=asking.group, rank=rank)
                assert found == searched(places, asking, 5, sizes, rank)
    index.shrink(0)
    assert not index._places


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8),
    st.integers(0, 20),
    st.sampled_from([range(1, 4), range(2, 3), range(2, 4)]),
)
def test_an_index_finds_what_a_search_through_its_newest_tokens_finds(
    parts: list[list[int]], limit: int, sizes: range
) -> None:
    check_index(NgramIndex, parts, limit, sizes)


class OldestWins(NgramIndex):
    """Wrong: the first follower stays."""

    def add(self, text: Text, tokens: Sequence[int]) -> None:
        before = dict(self._places)
        super().add(text, tokens)
        self._places |= before


class ForgetsTheFirstAlone(NgramIndex):
    """Wrong: what comes second stays after it was forgotten."""

    def shrink(self, max_tokens: int) -> None:
        seconds = {key: places[1] for key, places in self._places.items()}
        super().shrink(max_tokens)
        self._places = {key: (places[0], seconds[key]) for key, places in self._places.items()}


@pytest.mark.parametrize("wrong", [OldestWins, ForgetsTheFirstAlone])
def test_the_search_catches_wrong_versions(wrong: type[NgramIndex]) -> None:
    rng = random.Random(0)
    parts = [[rng.randrange(3) for _ in range(6)] for _ in range(8)]
    check_index(NgramIndex, parts, 20, range(1, 4))
    with pytest.raises(AssertionError):
        check_index(wrong, parts, 20, range(1, 4))


def test_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="min_n"):
        NgramDrafter(min_n=3, max_n=2)
    with pytest.raises(ConfigError, match="max_tokens"):
        NgramDrafter(max_tokens=-1)
    with pytest.raises(ConfigError, match="rank"):
        NgramDrafter(rank=-1)
