"""One short example of everything that may be put in the place of ours, by its import path.

    specactor recipes                 # none of these is a recipe: name them in yours, or on the command line
    --data.train examples.hooks:rows --algorithm.advantage examples.hooks:best_of_group
    --algorithm.dynamic-sampling examples.hooks:not_hopeless
    --algorithm.loss examples.hooks:weighted_logprobs

The forms stand in `specactor.hooks`. Copy the file: any module on the Python path will do.
"""

import asyncio
from collections.abc import Iterator, Sequence

from torch import Tensor

from specactor.types import Problem, ScoredGroup


def rows() -> Iterator[dict[str, object]]:
    """A data source, with the columns of a file; the same whenever it is called."""
    for n in range(10, 100):
        yield {"prompt": f"{n}=", "answer": str(n)[::-1], "verifier": "examples.hooks:close_enough"}


def close_enough(response: str, problem: Problem) -> float:
    """A reward."""
    right = sum(a == b for a, b in zip(problem.answer, response, strict=False))
    return right / max(len(problem.answer), len(response))


async def asked_elsewhere(response: str, problem: Problem) -> float:
    """A reward that waits for something, such as a server; those of a step wait together."""
    await asyncio.sleep(0.01)
    return close_enough(response, problem)


class TwoTries:
    """An environment: a second try after a hint, for half of the reward."""

    async def start(self, problem: Problem) -> str:
        self.problem, self.tries = problem, 0
        return problem.prompt

    async def step(self, response: str) -> str | float:
        self.tries += 1
        if self.tries == 2 or response == self.problem.answer:
            return float(response == self.problem.answer) / self.tries
        return f"\nNot {response}. {self.problem.prompt}"


def best_of_group(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Advantages: what a response lacks of the best of its group, less the group's mean of that."""
    lacks = [[r - max(group) for r in group] for group in rewards]
    return [[lack - sum(group) / len(group) for lack in group] for group in lacks]


def not_hopeless(group: ScoredGroup) -> bool:
    """A filter of groups, with algorithm.dynamic_sampling."""
    return max(group.scores) > 0


def weighted_logprobs(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """A loss, token by token: the policy gradient without any clipping."""
    return -(logprobs_T - old_logprobs_T).exp() * advantages_T
