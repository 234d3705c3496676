"""Verifiers that tests name by their import path: some score, the others do what verifiers should not."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from pathlib import Path

from specactor.data.verifiers import get_verifier
from specactor.types import Problem


def even(response: str, problem: Problem) -> float:
    """Half of all groups of two agree."""
    return float(sum(map(ord, response)) % 2 == 0)


def number_of(response: str, problem: Problem) -> float:
    return float(response)


def who(response: str, problem: Problem) -> int:
    return os.getpid()


def oom_score(response: str, problem: Problem) -> float:
    return float(Path("/proc/self/oom_score_adj").read_text())


def is_whole(response: str, problem: Problem) -> float:
    """Whether the problem came as it was."""
    return float(problem.metadata == {"pair": (1, (2, "x")), "map": {"1": [2, (3,)]}, "text": "\u00e9"})


def prints(response: str, problem: Problem) -> float:
    print(response, flush=True)
    return 1.0


def raises(response: str, problem: Problem) -> float:
    raise KeyError("a bug of the verifier")


def exits(response: str, problem: Problem) -> float:
    sys.exit(3)


def ends_its_process(response: str, problem: Problem) -> float:
    os._exit(3)


def hangs(response: str, problem: Problem) -> float:
    """Holds the interpreter, too."""
    while True:
        pass


def leaves_a_child(response: str, problem: Problem) -> float:
    """Writes the pid of a process that outlives it by far, and hangs."""
    if (pid := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    Path(response).write_text(str(pid))
    return hangs(response, problem)


async def waits(response: str, problem: Problem) -> float:
    await asyncio.sleep(float(response))
    return 1.0


async def blocks(response: str, problem: Problem) -> float:
    """Does not wait but hold its process, if it is asked to."""
    return hangs(response, problem) if response == "hang" else 2.0


_OPEN = asyncio.Semaphore(2)
"""Stands for the connections of a client that a module keeps: it works in one event loop."""


async def shares(response: str, problem: Problem) -> float:
    async with _OPEN:
        await asyncio.sleep(0.01)
    return 1.0


async def ends_its_loop(response: str, problem: Problem) -> float:
    asyncio.create_task(_exits())  # noqa: RUF006  (a task that nobody keeps)
    await asyncio.sleep(0.01)
    sys.exit(3)


async def _exits() -> None:
    sys.exit(3)


async def asks_another(response: str, problem: Problem) -> float:
    return get_verifier(f"{__name__}:waits")(response, problem)


@functools.cache
def _imported() -> None:
    """Stand for what a verifier loads before its first answer."""
    time.sleep(4.0)


def exact_later(response: str, problem: Problem) -> float:
    _imported()
    return float(response == problem.answer)
