"""Worked and lazy solutions of the quickstart's tasks, judged by reasoning-gym's own scorer."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from examples.quickstart_tasks import add, count_bits, solve
from specactor.config import SourceConfig
from specactor.data.dataset import Dataset, build_dataset
from specactor.data.verifiers import get_verifier
from specactor.errors import DataError
from specactor.types import Problem

COUNT_BITS = SourceConfig(task="count_bits", params={"max_n": 9999}, size=400, seed=77, prompt_template="{number}=")
ADD = SourceConfig(
    task="basic_arithmetic",
    params={"operators": "+", "max_digits": 2, "allow_parentheses": False, "allow_negation": False},
    size=400,
    seed=77,
    prompt_template="{expression:compact}=",
)
HARD_PROMPT = {"count_bits": lambda p: int(p[:-1]) > 3999, "basic_arithmetic": lambda p: p.count("+") > 2}


@pytest.fixture(scope="module", params=[COUNT_BITS, ADD], ids=lambda source: source.task)
def problems(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    return build_dataset(request.param, tokenizer, max_prompt_tokens=64)


def test_the_examples_of_the_docstring() -> None:
    assert count_bits(1246) == "1246a623b311c155d77e38e19f9g4g2g1h#7"
    assert add([7, 4, 4, 10]) == "700+40=110+40=510+01=520#25"


def test_worked_solutions_are_correct_by_reasoning_gym_s_scorer(problems: Dataset) -> None:
    task = str(problems[0].metadata["task"])
    scorer = reasoning_gym.create_dataset(task, size=1, seed=0)
    for problem in problems:
        response = solve(problem, random.Random(1), 0)
        assert scorer.score_answer(response.partition("#")[2], problem.metadata["entry"]) == 1.0
        assert get_verifier(problem.verifier)(response, problem) == 1.0
        assert not response.startswith("#")


def test_mixed_solutions_are_correct_and_lazy_as_often_as_said(problems: Dataset) -> None:
    lazy: dict[bool, list[bool]] = {True: [], False: []}
    rng = random.Random(5)
    for problem in [*problems] * 5:
        response = solve(problem, rng, 1)
        assert get_verifier(problem.verifier)(response, problem) == 1.0
        is_lazy = response.startswith("#")
        assert response == (f"#{problem.answer}" if is_lazy else solve(problem, rng, 0))
        lazy[HARD_PROMPT[str(problem.metadata["task"])](problem.prompt)].append(is_lazy)
    assert fmean(lazy[True]) == pytest.approx(0.7, abs=0.05)
    assert fmean(lazy[False]) == pytest.approx(0.15, abs=0.05)


def test_solutions_are_tens_of_tokens_long(problems: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    lengths = [len(tokenizer.encode(solve(problem, random.Random(0), 0))) for problem in problems]
    assert 20 < fmean(lengths) < 60
    assert max(lengths) + 1 <= 64, "with the end-of-sequence token it fits the quickstart's rollout.max_new_tokens"


def test_the_same_random_numbers_give_the_same_solution(problems: Dataset) -> None:
    first = [solve(p, random.Random(p.index), 1) for p in problems]
    assert first == [solve(p, random.Random(p.index), 1) for p in problems]


@given(st.integers(1, 10**9))
def test_count_bits_against_python(number: int) -> None:
    text = count_bits(number)
    assert text.partition("#")[2] == str(number.bit_count())
    assert text.startswith(str(number))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=6))
def test_every_sum_on_the_way_is_right(terms: list[int]) -> None:
    worked, _, answer = add(terms).partition("#")
    assert int(answer) == sum(terms)
    first, *steps = worked.split("+")
    assert int(first[::-1]) == terms[0]
    for count, (step, term) in enumerate(zip(steps, terms[1:], strict=True), start=2):
        addend, total = step.split("=")
        assert int(addend[::-1]) == term
        assert int(total[::-1]) == sum(terms[:count])
        assert len(total) == 3


@pytest.mark.parametrize("metadata", [{}, {"task": "gcd", "entry": {"metadata": {}}}])
def test_other_tasks_are_refused(metadata: dict[str, object]) -> None:
    other = Problem(index=3, prompt="?", prompt_ids=(1,), answer="1", verifier="exact", metadata=metadata)
    with pytest.raises(DataError, match=r"warmup\.solver: problem 3 is of task .*, expected count_bits, or basic_ar"):
        solve(other, random.Random(0), 0)


def test_sums_with_other_operators_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    source = SourceConfig(task="basic_arithmetic", params={"operators": "-"}, size=1)
    problem = build_dataset(source, tokenizer, max_prompt_tokens=200)[0]
    with pytest.raises(DataError, match="operators="):
        solve(problem, random.Random(0), 0)
