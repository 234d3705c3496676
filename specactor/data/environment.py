"""What a policy acts in: a problem begins a conversation, and every response is answered, until there is a reward.

An environment is a class on the import path, named where a verifier is named: in a problem's column ``verifier``. One
object serves one conversation. Its methods run in a thread of their own and in an event loop of their own, so one that
waits, computes or hangs holds up no other conversation; each call may take ``rollout.environment_timeout_s``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, Protocol, cast

from specactor.data.chat import Message, are_messages
from specactor.data.verifiers import find
from specactor.errors import DataError
from specactor.types import Problem

Said = str | Sequence[Message]
"""A text is taken as it is; messages go through the model's chat template."""


class Environment(Protocol):
    """One conversation. A method ``async def close(self)``, if there is one, is called when it is over."""

    async def start(self, problem: Problem) -> Said:
        """What the policy sees first."""

    async def step(self, response: str) -> Said | float:
        """What the policy sees next, or its reward, any finite number, which ends the conversation."""


@lru_cache(maxsize=256)
def environment_of(name: str) -> type[Environment] | None:
    """The class of that name; None where it names a verifier, which scores one response.

    Raises DataError for a class that is no environment.
    """
    if ":" not in name or not inspect.isclass(found := find(name)):
        return None
    for method, arguments in (("start", "self, problem"), ("step", "self, response")):
        function = getattr(found, method, None)
        if not inspect.iscoroutinefunction(function) or not _takes_one(function):
            raise DataError(
                f"got {name!r}, a class without `async def {method}({arguments})`. A class is an environment: see "
                "specactor.data.environment. Correct it, or name a function, which scores one response."
            )
    return cast("type[Environment]", found)


def _takes_one(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True


def checked(name: str, method: str, value: object) -> Said | float:
    """What an environment returned. Raises DataError for what is neither said nor a reward: that is a bug of it."""
    if isinstance(value, str) or are_messages(value):
        return value
    if method == "step" and isinstance(value, Real) and math.isfinite(value):
        return float(value)
    ending = ", or a finite number as reward" if method == "step" else ""
    raise DataError(
        f"environment {name}: {method} returned {value!r:.200} of type {type(value).__name__}, expected a text, "
        f"or messages with a role and a content each{ending}. Correct the environment."
    )
