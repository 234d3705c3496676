"""The example of a user's own drafter does what it says, is short, and is found by its import path."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import custom_drafter
from specactor.config import SpeculationConfig
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.registry import make_drafters

PATH = "examples.custom_drafter:LastFollower"


@pytest.fixture
def drafter() -> custom_drafter.LastFollower:
    (made,) = make_drafters(SpeculationConfig(mode="coupled", drafters=(PATH,)))
    assert isinstance(made, custom_drafter.LastFollower)
    return made


def start(drafter: custom_drafter.LastFollower, prompt: tuple[int, ...], *parts: list[int]) -> DraftSequence:
    sequence = DraftSequence(request_id=str(parts), prompt_ids=prompt)
    drafter.open(sequence)
    for part in parts:
        sequence.output_ids.extend(part)
        drafter.commit(sequence, part)
    return sequence


def test_repeats_what_followed_in_the_group(drafter: custom_drafter.LastFollower) -> None:
    first = start(drafter, (1,), [2, 3], [4, 5])
    second, other = start(drafter, (1,), [7], [3]), start(drafter, (9,), [3])
    fresh = start(drafter, (1,))
    drafts = drafter.propose([first, second, other, fresh], [8, 8, 8, 2])
    assert drafts == [[], [4, 5], [], [7, 3]], "the token after 1 was 2, and later 7"
    assert drafter.propose([second], [1]) == [[4]]
    assert drafter.propose([second], [0]) == [[]]
    drafter.close(first)
    drafter.policy_changed()
    assert drafter.propose([second], [8]) == [[]]


def test_an_empty_prompt_and_a_loop(drafter: custom_drafter.LastFollower) -> None:
    sequence = start(drafter, ())
    assert drafter.propose([sequence], [3]) == [[]]
    looping = start(drafter, (), [5, 6, 5])
    assert drafter.propose([sequence, looping], [3, 3]) == [[], [6, 5, 6]]


def test_is_short() -> None:
    assert len(Path(custom_drafter.__file__).read_text().splitlines()) <= 40
