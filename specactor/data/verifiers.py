"""Scores of responses, by the name of a verifier (docs/guide.md). A score is any finite number; 1 is a solved problem.

**The answer of a response** (exact, number, reasoning-gym) is the text after its last '#', without blanks around it; of
a response without '#' it is the whole text without blanks around it. So `1246a623b...1h#7` answers 7, as does
`#### 7`. Where the problem's own answer contains '#', the whole response is the answer. For number, 0.50, 1/2 and 5e-1
are equal, 0.333 and 1/3 are not; math-verify looks for the answer by its own rules (boxed, $...$, last).

A response that cannot be read as what the verifier compares scores 0. A verifier that fails in any other way is a
DataError that names the problem: its response is left out, told and counted.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Coroutine
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from urllib.parse import urlsplit

import msgspec

from specactor.data import math_answers
from specactor.errors import DataError
from specactor.types import Problem

Verifier = Callable[[str, Problem], float]

MAX_NUMBER_LENGTH = 200
"""Characters of the longest text that is read as a number."""
NUMBER = re.compile(r"([+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?)(?:/([0-9]+))?")


def answer_of(response: str, problem: Problem) -> str:
    """The part of a response that is compared; see the head of this module."""
    return response.strip() if "#" in problem.answer else response.rpartition("#")[2].strip()


@lru_cache(maxsize=256)
def get_verifier(name: str, timeout_s: float | None = None) -> Verifier:
    """The scoring function of that name. Raises DataError when there is none; the function raises it as said above.

    Args:
        timeout_s: of one that is asynchronous; nothing here bounds the others (`specactor.rollout.grading` does).
    """
    function = _function(name)
    if not callable(function):
        raise DataError(f"got {name!r}, which is a {type(function).__name__}, expected a function. Name another.")
    try:
        inspect.signature(function).bind("response", "problem")
    except TypeError as error:
        raise DataError(f"got {name!r}, expected a function (response, problem). It failed with: {error}.") from error
    except ValueError:  # of a function in C nobody can say
        pass
    if not is_async(name):
        return _checked(name, function)
    return _checked(name, lambda response, problem: asyncio.run(_in_time(function(response, problem), timeout_s)))


def is_async(name: str) -> bool:
    """Whether the verifier of that name waits for something: many can be asked at once."""
    return inspect.iscoroutinefunction(_function(name))


async def _in_time(score: Coroutine[object, object, float], timeout_s: float | None) -> float:
    return await asyncio.wait_for(score, timeout_s)


@lru_cache(maxsize=256)
def _function(name: str) -> object:
    if is_remote(name):
        return remote_verifier(name)
    return BUILT_IN[name] if name in BUILT_IN else find(name)


def is_remote(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def find(name: str) -> object:
    """Return what is at ``module:name``. Raises DataError when nothing is."""
    module, colon, attribute = name.partition(":")
    if not colon:
        nearest = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"Did you mean {nearest[0]}?" if nearest else "Name one of them, or write module:function."
        raise DataError(f"got {name!r}, expected one of {', '.join(BUILT_IN)}, or module:function. {hint}")
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise DataError(
            f"got {name!r}, expected the import path of a function. Put its folder on PYTHONPATH. "
            f"It failed with: {error}."
        ) from error
    return found


def unscorable(problem: Problem) -> str | None:
    """Why the problem's verifier could never score a response 1; None when nothing is known against it."""
    if problem.verifier == "number" and _number(problem.answer) is None:
        return f"answer: got {problem.answer!r}, expected a number. Use the verifier exact for other answers"
    if problem.verifier == "math-verify" and not math_answers.shared.readable(problem.answer):
        return f"answer: got {problem.answer!r}, expected an expression that math-verify can read"
    if problem.verifier == "reasoning-gym":
        from specactor.data import reasoning  # takes two seconds

        return reasoning.unscorable(problem)
    return None


def _checked(name: str, function: Verifier) -> Verifier:
    def verify(response: str, problem: Problem) -> float:
        who = f"verifier {name}: problem {problem.index} (answer {problem.answer[:80]!r})"
        try:
            score = function(response, problem)
        except BaseException as error:  # code of others, which may raise anything, and exit
            raise DataError(
                f"{who}: it raised {type(error).__name__}: {error!s:.300}, on the response {response[:200]!r}. "
                "Correct the verifier, or remove the problem."
            ) from error
        value = _as_score(score)
        if not math.isfinite(value):
            raise DataError(
                f"{who}: it returned {score!r:.200}, which is of type {type(score).__name__}, expected a finite "
                "number. Correct the verifier."
            )
        return value

    return verify


def _as_score(result: object) -> float:
    """Return what a verifier returned, as a number: Python's, NumPy's or torch's, bool included. NaN where it is
    none."""
    try:
        value = result.item() if hasattr(result, "item") else result
        # float() alone would read the text "1", and drop the imaginary part of NumPy's complex numbers
        return float(value) if isinstance(value, Real | Decimal) else math.nan
    except (ValueError, RuntimeError, OverflowError):  # several values, or more than a float can hold
        return math.nan


def _exact(response: str, problem: Problem) -> float:
    return float(answer_of(response, problem) == problem.answer.strip())


def _same_number(response: str, problem: Problem) -> float:
    right = _number(problem.answer)
    if right is None:
        raise DataError(f"the problem's answer {problem.answer!r} is not a number")
    return float(_number(answer_of(response, problem)) == right)


def _number(text: str) -> Fraction | None:
    """The exact value of a decimal number or a fraction of one; None when the text is not a number."""
    match = NUMBER.fullmatch(text.strip()) if len(text) <= MAX_NUMBER_LENGTH else None
    if match is None:
        return None
    try:
        return Fraction(match[1].replace(",", "")) / int(match[2] or "1")
    except (ValueError, ZeroDivisionError):
        return None


def _math(response: str, problem: Problem) -> float:
    return float(math_answers.shared.equal(problem.answer, response))


def _reasoning(response: str, problem: Problem) -> float:
    from specactor.data import reasoning  # takes two seconds

    return reasoning.score(answer_of(response, problem), problem)


BUILT_IN: dict[str, Verifier] = {
    "exact": _exact,
    "number": _same_number,
    "math-verify": _math,
    "reasoning-gym": _reasoning,
}
IN_PROCESS = ("exact", "number")
"""Bounded by themselves, however long a response is; all others are asked in processes that can be ended."""


ATTEMPTS = 4
MAX_BYTES = 1 << 20
"""Of an answer that are read."""
PAUSE_S = 0.5
"""Before the second attempt; it doubles every further time."""


class _Answer(msgspec.Struct):
    score: float


def remote_verifier(url: str) -> Callable[[str, Problem], Awaitable[float]]:
    """Return the verifier at that address. Raises DataError for what is none."""
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise DataError(f"got {url!r}, expected the address of a verifier, as http://host:port/path. Correct it.")

    async def verify(response: str, problem: Problem) -> float:
        import aiohttp  # takes a quarter of a second, and few need it

        body = msgspec.json.encode(
            {
                "response": response,
                "prompt": problem.prompt,
                "answer": problem.answer,
                "index": problem.index,
                "metadata": problem.metadata,
            }
        )
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as client:  # the caller bounds it all
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    async with client.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                        if attempt == ATTEMPTS or (answer.status != 429 and answer.status < 500):
                            answer.raise_for_status()
                            return msgspec.json.decode(await answer.content.read(MAX_BYTES), type=_Answer).score
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                    if attempt == ATTEMPTS:
                        raise
                await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    return verify
