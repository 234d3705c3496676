"""Scores of responses, by the name of a verifier (docs/guide.md). A score is in [0, 1]; 1 is a solved problem.

**The answer of a response** (exact, number, reasoning-gym) is the text after its last '#', without blanks around it; of
a response without '#' it is the whole text without blanks around it. So `1246a623b...1h#7` answers 7, as does
`#### 7`. Where the problem's own answer contains '#', the whole response is the answer. For number, 0.50, 1/2 and 5e-1
are equal, 0.333 and 1/3 are not; math-verify looks for the answer by its own rules (boxed, $...$, last).

A response that cannot be read as what the verifier compares scores 0. A verifier that fails in any other way is a
DataError that names the problem: a wrong reward must not train a model silently.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import math
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from numbers import Real

from specactor.data import math_answers
from specactor.errors import DataError
from specactor.types import Problem

Verifier = Callable[[str, Problem], float]

TOGETHER = 64
"""Asynchronous verifiers that are awaited at a time."""

MAX_NUMBER_LENGTH = 200
"""Characters of the longest text that is read as a number."""
MAX_SCORE_S = 60.0
"""Longest wait for one score."""
NUMBER = re.compile(r"([+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?)(?:/([0-9]+))?")


def answer_of(response: str, problem: Problem) -> str:
    """The part of a response that is compared; see the head of this module."""
    return response.strip() if "#" in problem.answer else response.rpartition("#")[2].strip()


@lru_cache(maxsize=256)
def get_verifier(name: str) -> Verifier:
    """The scoring function of that name. Raises DataError when there is none; the function raises it as said above."""
    if name in BUILT_IN:
        return _checked(name, BUILT_IN[name])
    function = find(name)
    if not callable(function):
        raise DataError(f"got {name!r}, which is a {type(function).__name__}, expected a function. Name another.")
    try:
        inspect.signature(function).bind("response", "problem")
    except TypeError as error:
        raise DataError(f"got {name!r}, expected a function (response, problem). It failed with: {error}.") from error
    except ValueError:  # of a function in C nobody can say
        pass
    if inspect.iscoroutinefunction(function):
        return _checked(name, lambda response, problem: asyncio.run(function(response, problem)))
    return _checked(name, function)


def score_all(responses: Sequence[str], problems: Sequence[Problem]) -> list[float]:
    """The verifiers' scores: one after the other, but for asynchronous ones, which wait for something, together."""
    waits = [inspect.iscoroutinefunction(_function(problem.verifier)) for problem in problems]
    with ThreadPoolExecutor(max_workers=TOGETHER) as threads:
        scores: list[float | Future[float]] = []
        for response, problem, is_async in zip(responses, problems, waits, strict=True):
            verify = get_verifier(problem.verifier)
            scores.append(threads.submit(verify, response, problem) if is_async else verify(response, problem))
        return [score.result() if isinstance(score, Future) else score for score in scores]


@lru_cache(maxsize=256)
def _function(name: str) -> object:
    return BUILT_IN[name] if name in BUILT_IN else find(name)


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
            score = _bounded(function, response, problem)
        except TimeoutError:
            raise DataError(
                f"{who}: no score within {MAX_SCORE_S:g} s, on the response {response[:200]!r}. "
                "Correct the verifier, or remove the problem."
            ) from None
        except Exception as error:  # code of others, which may raise anything; the run must say on which problem
            raise DataError(
                f"{who}: it raised {type(error).__name__}: {error}, on the response {response[:200]!r}. "
                "Correct the verifier, or remove the problem."
            ) from error
        value = _as_score(score)
        if not 0.0 <= value <= 1.0:
            got = f"{score!r:.200}, which is of type {type(score).__name__}" if math.isnan(value) else repr(score)
            raise DataError(f"{who}: it returned {got}, expected a number in [0, 1]. Correct the verifier.")
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


def _bounded(function: Verifier, response: str, problem: Problem) -> float:
    """The function's result. Raises what it raises, and TimeoutError when it does not come back: others wait for us."""
    if function in (_exact, _same_number):
        return function(response, problem)
    results: list[float] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            results.append(function(response, problem))
        except Exception as error:  # handed to the caller's thread, which raises it
            errors.append(error)

    thread = threading.Thread(target=call, name="verifier", daemon=True)
    thread.start()
    thread.join(MAX_SCORE_S)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


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
