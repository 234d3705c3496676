"""Prompt lookup: longest n-gram, newest place, own group; nothing of what was forgotten is found."""

from __future__ import annotations

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


def test_finds_the_longest_ngram_and_its_newest_place() -> None:
    drafter = NgramDrafter()
    sequence = opened(drafter, "a", (), [1, 2, 3, 4, 9, 3, 5, 8, 2, 3])
    assert drafter.propose([sequence], [2]) == [[4, 9]], "2 3 was followed by 4; 3 alone, later, by 5"
    sequence.output_ids.append(6)
    drafter.commit(sequence, [6])
    other = opened(drafter, "b", (), [0, 2, 3])
    assert drafter.propose([other], [2]) == [[6]], "the place in a group-mate's text is newer, and ends there"


def test_the_prompt_is_looked_up_too() -> None:
    drafter = NgramDrafter()
    sequence = opened(drafter, "a", (1, 2, 3, 4, 5, 6, 2), [3])
    assert drafter.propose([sequence], [3]) == [[4, 5, 6]]
    late = opened(drafter, "b", sequence.prompt_ids, [])
    assert drafter.propose([late], [4])[0][:1] == [3], "2 at the end of the prompt was followed by a's first token"


def test_groups_do_not_mix() -> None:
    drafter = NgramDrafter()
    opened(drafter, "a", (1,), [5, 6, 7])
    assert drafter.propose([opened(drafter, "b", (2,), [5, 6])], [4]) == [[]]
    assert drafter.propose([opened(drafter, "c", (1,), [5, 6])], [4]) == [[7]]


def test_short_matches_give_short_drafts() -> None:
    drafter = NgramDrafter(max_n=3)
    text = [1, 2, 3, *range(10, 20)]
    opened(drafter, "a", (), text)
    drafts = drafter.propose(
        [opened(drafter, "b", (), [9, 3]), opened(drafter, "c", (), [9, 2, 3]), opened(drafter, "d", (), [1, 2, 3])],
        [8, 8, 8],
    )
    assert drafts == [text[3:5], text[3:7], text[3:11]]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8), st.integers(0, 20))
def test_an_index_finds_what_a_search_through_its_newest_tokens_finds(parts: list[list[int]], limit: int) -> None:
    """Two texts that take turns, n-grams of exactly 2 tokens."""
    index = NgramIndex(min_n=2, max_n=2)
    texts = [Text(0, [7, 8]), Text(0, [9])]
    places: list[tuple[int, int]] = []  # (text, position), oldest first
    for turn, part in enumerate(parts):
        start = len(texts[turn % 2].ids)
        index.add(texts[turn % 2], part)
        index.shrink(limit)
        places += [(turn % 2, start + i) for i in range(len(part))]
    places = places[len(places) - min(limit, len(places)) :]
    assert index.num_tokens == len(places)
    for text in texts:
        found = [
            texts[i].ids[end : end + 3]
            for i, end in places
            if len(text.ids) >= 2 and end >= 2 and texts[i].ids[end - 2 : end] == text.ids[-2:]
        ]
        assert index.find(text, 3) == (found[-1] if found else [])
    index.shrink(0)
    assert not index._places


def test_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="min_n"):
        NgramDrafter(min_n=3, max_n=2)
    with pytest.raises(ConfigError, match="max_tokens"):
        NgramDrafter(max_tokens=-1)
