"""What the drafter `previous` drafts: the last response of the same prompt and seed, position by position."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.config import SpeculationConfig
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.previous import RESPONSE_BYTES, SEEN, TOKEN_BYTES, PreviousDrafter
from specactor.rollout.speculation.registry import make_drafters

PROMPT = (91, 92, 93)


def start(
    drafter: PreviousDrafter, output: Sequence[int], *, seed: int = 1, prompt: tuple[int, ...] = PROMPT
) -> DraftSequence:
    """A request that has emitted this."""
    sequence = DraftSequence(request_id=f"{prompt}.{seed}.{output}", prompt_ids=prompt, seed=seed)
    drafter.open(sequence)
    sequence.output_ids.extend(output)
    drafter.commit(sequence, output)
    return sequence


def draft(drafter: PreviousDrafter, sequence: DraftSequence, window: int = 3) -> list[int]:
    [found] = drafter.propose([sequence], [window])
    return found


def test_it_is_named_in_a_configuration() -> None:
    [drafter] = make_drafters(SpeculationConfig(drafters=("previous",)))
    assert isinstance(drafter, PreviousDrafter)


def test_a_draft_is_the_last_response_at_the_same_position_also_after_the_texts_differ() -> None:
    drafter = PreviousDrafter()
    assert draft(drafter, start(drafter, [])) == []
    drafter.close(start(drafter, [1, 2, 3, 4, 5, 6]))
    drafter.policy_changed()
    assert draft(drafter, start(drafter, [])) == [1, 2, 3]
    assert draft(drafter, start(drafter, [1, 2, 3, 4, 5])) == [6]
    assert draft(drafter, start(drafter, [1, 9, 3])) == [4, 5, 6], "not what followed a text that looks like it"
    assert draft(drafter, start(drafter, [2, 3])) == [3, 4, 5]
    assert draft(drafter, start(drafter, [1] * 7)) == []
    assert draft(drafter, start(drafter, []), window=0) == []
    drafter.close(start(drafter, [7, 7, 7]))
    assert draft(drafter, start(drafter, [])) == [7, 7, 7], "the last one counts"


def test_nothing_is_drafted_from_other_samples_or_prompts() -> None:
    """Those of a group have seeds of their own, and so has a sample whose noise was renewed."""
    drafter = PreviousDrafter()
    drafter.close(start(drafter, [1, 2, 3]))
    assert draft(drafter, start(drafter, [], seed=2)) == []
    assert draft(drafter, start(drafter, [], prompt=(91, 92))) == []


def test_it_is_as_sure_as_the_last_tokens_were_right() -> None:
    drafter = PreviousDrafter()
    drafter.close(start(drafter, [1, 2, 3, 4, 5, 6]))
    for output, sure in (([], SEEN), ([1], SEEN), ([9], SEEN - 1), ([1, 2, 9, 4], SEEN - 1), ([9] * 6, 0)):
        draft(drafter, start(drafter, output))
        assert drafter.confidence == [sure], output


def test_what_followed_a_request_that_ended_early_stays_known() -> None:
    """A turn of a conversation is a request of its own, whose output is all that came before; others are retracted."""
    drafter = PreviousDrafter()
    drafter.close(start(drafter, [1, 2, 3, 4, 5, 6]))
    drafter.close(start(drafter, [1, 8]))
    assert draft(drafter, start(drafter, [1, 8])) == [3, 4, 5]


@given(
    calls=st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=12)), max_size=30),
    most=st.integers(1, 3000),
)
def test_memory_is_bounded_and_the_oldest_go_first(calls: list[tuple[int, list[int]]], most: int) -> None:
    drafter, expected = PreviousDrafter(max_bytes=most), dict[int, list[int]]()

    def held() -> int:
        return sum(RESPONSE_BYTES + TOKEN_BYTES * len(text) for text in expected.values() if text)

    for seed, output in calls:
        drafter.close(start(drafter, output, seed=seed))
        expected[seed] = output + expected.pop(seed, [])[len(output) :]
        while held() > most:
            del expected[next(iter(expected))]
        assert drafter.num_bytes == held() <= most
    for seed in range(6):
        assert draft(drafter, start(drafter, [], seed=seed), window=16) == expected.get(seed, [])[:16]


@pytest.mark.parametrize("tokens", [1, 40, 2000])
def test_memory_is_what_is_counted(tokens: int) -> None:
    """Of many short responses, too, which take more than their tokens."""
    drafter = PreviousDrafter()
    tracemalloc.start()
    try:
        for seed in range(2**9, 2**9 + 1000):
            drafter.close(start(drafter, [5] * tokens, seed=seed << 40, prompt=(seed, 92)))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.6 * drafter.num_bytes < taken <= drafter.num_bytes
