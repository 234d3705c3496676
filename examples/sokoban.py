"""Sokoban of reasoning-gym, one move a turn: the policy says U, D, L or R, and sees the board that comes of it.

    torchrun --nproc-per-node 2 launch/train_moe.py custom_reward --model.path FOLDER --rollout.max-new-tokens 2048 \\
        --data.train examples.sokoban:train --data.eval examples.sokoban:held_out

The board is reasoning-gym's, so the moves of a solved game are a solution by the task's own scorer. What is no move, or
is blocked, is told and changes nothing. A game that is not solved within `rollout.max_new_tokens` has reward 0. With
--algorithm.advantage gae --algorithm.critic.level turn a critic expects the reward before each move, and a move's
tokens share what it was better.
FOLDER has a mixture of experts with a chat template; for a dense model add --parallel.expert 1.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import reasoning_gym
from reasoning_gym.games.contrib.sokoban.src.game import Game

from specactor.config.data import EVAL_SEED
from specactor.data.chat import Message
from specactor.data.verifiers import answer_of
from specactor.types import Problem

RULES = """Push every box onto a goal. * is you, @ a box, X a goal, $ a box on a goal, % you on a goal, + a wall.
Each turn, say one move, U, D, L or R; if you think first, write it after a #."""
SMALL = {"min_w": 5, "max_w": 7, "min_h": 5, "max_h": 7, "min_boxes": 1, "max_boxes": 2}


class Sokoban:
    async def start(self, problem: Problem) -> Sequence[Message]:
        self.problem = problem
        rows = problem.prompt.split("\n")
        self.game = Game(width=len(rows[0]), height=len(rows))
        self.game.load_puzzle_matrix(rows)
        return [{"role": "system", "content": RULES}, {"role": "user", "content": problem.prompt}]

    async def step(self, response: str) -> Sequence[Message] | float:
        moved = self.game.player.update(key=answer_of(response, self.problem))
        board = "\n".join("".join(row) for row in self.game.get_matrix())
        if "@" not in board:
            return 1.0
        return [{"role": "user", "content": board if moved else f"That is no move here.\n{board}"}]


def problems(seed: int, count: int) -> Iterator[dict[str, str]]:
    """Rows with the columns of a data file; boards that are solved as they are drawn are left out."""
    task = reasoning_gym.create_dataset("sokoban", seed=seed, size=2 * count, **SMALL)
    boards = (
        (entry["metadata"]["gamestr"].replace(" ", "").strip(), entry["answer"])
        for entry in (task[i] for i in range(2 * count))
    )
    rows = ({"prompt": b, "answer": a, "verifier": "examples.sokoban:Sokoban"} for b, a in boards if "@" in b)
    return islice(rows, count)


def train() -> Iterator[dict[str, str]]:
    return problems(0, 2_000)


def held_out() -> Iterator[dict[str, str]]:
    return problems(EVAL_SEED, 256)
