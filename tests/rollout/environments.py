"""Environments that tests name by their import path: some talk, the others do what environments should not."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from typing import ClassVar

import torch

from specactor.errors import DataError
from specactor.types import Problem

released = threading.Event()
"""Holds up those that block their thread, and those that are slow."""


class Talks:
    """Says the length of each response, in digits, for as many turns as the problem wants; the reward is the turns."""

    closed: ClassVar[list[int]] = []

    async def start(self, problem: Problem) -> str:
        self.problem, self.turns = problem, 0
        return problem.prompt

    async def step(self, response: str) -> str | float:
        self.turns += 1
        await asyncio.sleep(0)
        return said(response) if self.turns < int(problem_turns(self.problem)) else float(self.turns)

    async def close(self) -> None:
        self.closed.append(self.problem.index)


def said(response: str) -> str:
    return f"({len(response)})"


def problem_turns(problem: Problem) -> int:
    return int(str(problem.metadata.get("turns", 1)))


class Slow(Talks):
    """Its first answer comes when `released` is set, and holds its thread until then."""

    async def step(self, response: str) -> str | float:
        released.wait()
        return await super().step(response)


class Blocks(Slow):
    """The same, for a test that gives it up; then it answers, late."""

    answered: ClassVar[list[int]] = []

    async def step(self, response: str) -> str | float:
        said = await super().step(response)
        self.answered.append(self.problem.index)
        return said


class Lasts(Talks):
    """Goes on until one that was given up has answered."""

    async def start(self, problem: Problem) -> str:
        await asyncio.sleep(8)
        return await super().start(problem)

    async def step(self, response: str) -> str | float:
        while not Blocks.answered:
            await asyncio.sleep(0.05)
        return await super().step(response)


class BlocksAtTheStart(Talks):
    async def start(self, problem: Problem) -> str:
        released.wait()
        return await super().start(problem)


class Hangs(Talks):
    async def step(self, response: str) -> str | float:
        await asyncio.sleep(1e6)
        return 1.0


class Raises(Talks):
    async def step(self, response: str) -> str | float:
        raise ValueError("a bug of the environment")


class Exits(Talks):
    async def step(self, response: str) -> str | float:
        sys.exit(3)


class Floods(Talks):
    async def step(self, response: str) -> str | float:
        return "9" * 10**7


class LeavesTasks(Talks):
    """And a generator that nobody has read to its end."""

    left: ClassVar[list[asyncio.Task[None]]] = []
    ended: ClassVar[list[int]] = []

    async def step(self, response: str) -> str | float:
        self.left.append(asyncio.ensure_future(asyncio.sleep(1e6)))
        return await super().step(response)


class LeavesGenerators(LeavesTasks):
    async def step(self, response: str) -> str | float:
        self.generator = self.numbers()
        await anext(self.generator)
        return await Talks.step(self, response)

    async def numbers(self) -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            self.ended.append(self.problem.index)


class Nan(Talks):
    async def step(self, response: str) -> str | float:
        return float("nan")


class Nothing(Talks):
    async def step(self, response: str) -> str | float:
        return None  # type: ignore[return-value]


class Mute(Talks):
    async def start(self, problem: Problem) -> str:
        return ""


class Silent(Talks):
    """Says what a tool did that printed nothing."""

    async def step(self, response: str) -> str | float:
        return ""


class TellsHalf(Talks):
    """Says half of a character, as tools do that decode with `surrogateescape`."""

    async def step(self, response: str) -> str | float:
        return "a\ud800"


class StartsWithHalf(Talks):
    async def start(self, problem: Problem) -> str:
        return "\ud800"


class Long(Talks):
    async def start(self, problem: Problem) -> str:
        return "9" * 51


class LimitsATool(Talks):
    """Gives it less time than the run gives the environment."""

    async def step(self, response: str) -> str | float:
        return await asyncio.wait_for(asyncio.sleep(1e6, ""), 0.01)


class RewardsInTorch(Talks):
    async def step(self, response: str) -> str | float:
        said = await super().step(response)
        return said if isinstance(said, str) else torch.tensor(said)  # type: ignore[return-value]


class RaisesWhenMade(Talks):
    def __init__(self) -> None:
        raise ValueError("half of it: \ud800")


class BlocksWhenMade(Talks):
    def __init__(self) -> None:
        released.wait()


class RaisesWhatRaises(Talks):
    """An error that cannot be told."""

    class UntoldError(Exception):
        def __repr__(self) -> str:
            raise DataError("told after all: \ud800")

    async def step(self, response: str) -> str | float:
        raise self.UntoldError


class RaisesAtTheEnd(Talks):
    async def close(self) -> None:
        raise OSError("its container is still there")


class ExitsAtTheEnd(Talks):
    async def close(self) -> None:
        sys.exit(3)


class RaisesWhatRaisesAtTheEnd(Talks):
    async def close(self) -> None:
        raise RaisesWhatRaises.UntoldError


class HangsAtTheEnd(Talks):
    async def close(self) -> None:
        await asyncio.sleep(1e6)


class BlocksAtTheEnd(Talks):
    async def close(self) -> None:
        released.wait()
        raise OSError("too late to be told again")


class EndsWithoutAsync(Talks):
    def close(self) -> None:  # type: ignore[override]
        self.closed.append(self.problem.index)


class NotAsync:
    def start(self, problem: Problem) -> str:
        return ""

    async def step(self, response: str) -> float:
        return 0.0


class WithoutArgument:
    async def start(self, problem: Problem) -> str:
        return ""

    async def step(self) -> float:
        return 0.0
