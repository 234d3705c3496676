"""Sokoban, move by move: its boards are those that reasoning-gym's search passes through."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
import reasoning_gym
from reasoning_gym.games.contrib.sokoban.src.utils import can_move

from examples import sokoban
from examples.sokoban import SMALL, Sokoban
from specactor.config import SourceConfig
from specactor.data.chat import Message
from specactor.data.dataset import Dataset, build_dataset
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.types import Problem

MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("characters")
    make_char_tokenizer(folder)
    source = SourceConfig(path="examples.sokoban:held_out")
    return build_dataset(source, load_tokenizer(folder), max_prompt_tokens=80)


def play(problem: Problem, responses: Sequence[str], kind: type[Sokoban] = Sokoban) -> list[str | float]:
    """What the environment says, one after the other, until there is a reward."""

    async def talk() -> list[str | float]:
        environment = kind()
        said: list[str | float] = [str((await environment.start(problem))[-1]["content"])]
        for response in responses:
            answer = await environment.step(response)
            said.append(answer if isinstance(answer, float) else str(answer[-1]["content"]))
            if isinstance(answer, float):
                break
        return said

    return asyncio.run(talk())


def expected(problem: Problem, moves: Sequence[str]) -> list[str | float]:
    """The same, by the function that reasoning-gym's search for solutions goes by."""
    rows = problem.prompt.split("\n")
    state, shape = "".join(rows), (len(rows), len(rows[0]))
    said: list[str | float] = [problem.prompt]
    for move in moves:
        place = next(i for i, char in enumerate(state) if char in "*%")
        after, _ = can_move(state, shape, divmod(place, shape[1]), MOVES[move])
        state = after or state
        board = "\n".join(state[i : i + shape[1]] for i in range(0, len(state), shape[1]))
        said.append(board if after else f"That is no move here.\n{board}")
        if "@" not in state:
            return [*said[:-1], 1.0]
    return said


def differing(problems: Sequence[Problem], kind: type[Sokoban] = Sokoban) -> int:
    """Games of random moves, blocked ones among them, that do not go as they should."""
    games = [(p, random.Random(p.index).choices("UDLR", k=40)) for p in problems]
    return sum(play(p, moves, kind) != expected(p, moves) for p, moves in games)


def test_a_solution_is_rewarded_with_its_last_move_and_not_before(problems: Dataset) -> None:
    assert len(problems) == 256
    scorer = reasoning_gym.create_dataset("sokoban", size=1, seed=0, **SMALL)
    for problem in problems:
        said = play(problem, problem.answer)
        assert (said[-1], {type(board) for board in said[:-1]}) == (1.0, {str})
        played = problem.answer[: len(said) - 1]
        assert scorer.score_answer(played, {"metadata": {"gamestr": problem.prompt}}) == 1.0


def test_boards_are_those_of_reasoning_gym(problems: Dataset) -> None:
    assert differing(problems) == 0


class Mirrored(Sokoban):
    """Left and right are exchanged."""

    async def step(self, response: str) -> Sequence[Message] | float:
        return await super().step(response.translate(str.maketrans("LR", "RL")))


def test_a_wrong_version_is_caught(problems: Dataset) -> None:
    assert differing(problems, Mirrored) > 200


@pytest.mark.parametrize("illegal", ["", "X", "UU", "u", "up", "# # U?", "U" * 1000, "the move is L"])
def test_what_is_no_move_changes_nothing(illegal: str, problems: Dataset) -> None:
    problem = problems[0]
    answers = [said for move in problem.answer for said in (illegal, f"I push it.\n# {move} ")]
    said = play(problem, answers)
    assert said[-1] == 1.0
    assert said[1:-1:2] == [f"That is no move here.\n{board}" for board in said[0:-1:2]]


def test_a_wall_and_a_box_before_a_wall_do_not_move() -> None:
    board = "+++++++\n+-*@+X+\n+++++++"
    problem = Problem(index=0, prompt=board, prompt_ids=(1,), answer="", verifier="", metadata={})
    assert play(problem, "UR") == [board, *[f"That is no move here.\n{board}"] * 2]
    assert play(problem, "L")[1] == "+++++++\n+*-@+X+\n+++++++"


def test_held_out_games_are_others(problems: Dataset) -> None:
    first = {row["prompt"] for row in sokoban.problems(0, 256)}
    assert len(first & {problem.prompt for problem in problems}) < 26, "what is left, a run takes out of training"
