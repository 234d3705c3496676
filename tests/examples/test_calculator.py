"""The calculator, and worked solutions with it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from examples import calculator
from examples.calculator import Calculator
from specactor.config import SourceConfig
from specactor.data.dataset import Dataset, build_dataset
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.trainer.warmup import solved_batch
from specactor.types import Problem


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Path]:
    folder = tmp_path_factory.mktemp("characters")
    make_char_tokenizer(folder)
    source = SourceConfig(path="examples.calculator:held_out")
    return build_dataset(source, load_tokenizer(folder), max_prompt_tokens=20), folder


async def talk(problem: Problem, *responses: str) -> list[object]:
    """What the environment says, one after the other."""
    environment = Calculator()
    return [await environment.start(problem), *[await environment.step(response) for response in responses]]


def test_a_worked_solution_is_what_a_conversation_is(problems: tuple[Dataset, Path]) -> None:
    rng = random.Random(0)
    for problem in problems[0]:
        question, answer, result = calculator.solve(problem, rng, 0)
        assert asyncio.run(talk(problem, str(question[0]), str(result[0]))) == [problem.prompt, answer[0], 1.0]
        assert [part[1] for part in (question, answer, result)] == [True, False, True]


@pytest.mark.parametrize(
    ("said", "answer"), [("12*12=", "144;"), ("12+12=", "?;"), ("=", "?;"), ("#143", 0.0), ("", 0.0)]
)
def test_everything_is_answered(said: str, answer: str | float, problems: tuple[Dataset, Path]) -> None:
    assert asyncio.run(talk(problems[0][0], said))[1] == answer


def test_the_warm_up_does_not_learn_what_the_calculator_says(problems: tuple[Dataset, Path]) -> None:
    data, folder = problems
    tokenizer = load_tokenizer(folder)
    batch = solved_batch(calculator.recipe(), data, calculator.solve, tokenizer, stage=1, step=3)
    guesses = [s for s in batch if not s.loss_mask]
    asked = [s for s in batch if s.loss_mask]
    assert guesses
    assert asked
    for s in asked:
        response = s.token_ids[s.prompt_len :]
        said = tokenizer.decode([t for t, learned in zip(response, s.loss_mask, strict=True) if not learned])
        assert said.endswith(";")
        assert s.num_learned == s.response_len - len(said)
        assert s.loss_mask[-1], "the end is learned"
