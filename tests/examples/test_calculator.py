"""The calculator, and worked solutions with it."""

from __future__ import annotations

import asyncio
import random

import pytest

from examples import calculator
from examples.calculator import Calculator
from specactor.config import SourceConfig
from specactor.data.dataset import Dataset, build_dataset
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.types import Problem


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("characters")
    make_char_tokenizer(folder)
    source = SourceConfig(path="examples.calculator:held_out")
    return build_dataset(source, load_tokenizer(folder), max_prompt_tokens=20)


async def talk(problem: Problem, *responses: str) -> list[object]:
    """What the environment says, one after the other."""
    environment = Calculator()
    return [await environment.start(problem), *[await environment.step(response) for response in responses]]


def test_a_worked_solution_is_what_a_conversation_is(problems: Dataset) -> None:
    rng = random.Random(0)
    for problem in problems:
        question, answer, result = calculator.solve(problem, rng, 0)
        assert asyncio.run(talk(problem, str(question[0]), str(result[0]))) == [problem.prompt, answer[0], 1.0]
        assert [part[1] for part in (question, answer, result)] == [True, False, True]


@pytest.mark.parametrize(
    ("said", "answer"), [("12*12=", "144;"), ("12+12=", "?;"), ("=", "?;"), ("#143", 0.0), ("", 0.0)]
)
def test_everything_is_answered(said: str, answer: str | float, problems: Dataset) -> None:
    assert asyncio.run(talk(problems[0], said))[1] == answer
