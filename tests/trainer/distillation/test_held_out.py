"""Responses on which a refresh is judged: whole prompts, some of them, nothing lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.trainer.distillation import held_out
from specactor.trainer.distillation.buffer import Lesson


def lessons(prompts: Sequence[int]) -> list[Lesson]:
    return [Lesson(token_ids=np.array([p, i, 1], np.int32), prompt_len=1, version=0) for i, p in enumerate(prompts)]


def prompts_of(some: Sequence[Lesson]) -> set[int]:
    return {int(lesson.token_ids[0]) for lesson in some}


@given(st.lists(st.integers(0, 40), max_size=80))
def test_every_response_is_on_one_side_with_all_others_of_its_prompt(prompts: list[int]) -> None:
    made = lessons(prompts)
    taught, unseen = held_out.split(made)
    assert sorted(map(id, taught + unseen)) == sorted(map(id, made))
    assert not prompts_of(taught) & prompts_of(unseen)
    number = len(set(prompts))
    assert len(prompts_of(unseen)) == (max(1, number // held_out.EVERY) if number > 1 else 0)


def test_a_sample_is_spread_evenly_and_small() -> None:
    made = lessons(range(40))
    assert held_out.sample(made, 1000) == made
    assert held_out.sample(made, 60) == made[::2]
    assert held_out.sample([], 60) == []


@pytest.mark.parametrize("tokens", [1, 7, 60])
def test_a_sample_has_about_so_many_tokens(tokens: int) -> None:
    assert sum(len(lesson.token_ids) for lesson in held_out.sample(lessons(range(40)), tokens)) <= tokens + 3
