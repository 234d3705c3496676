"""Environments and agents, which answer responses until there is a reward. Column ``verifier`` names the class. One
object serves one conversation, in its own thread and event loop, so asynchronous clients are made in it and not in its
module; a call may take ``rollout.environment_timeout_s``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, cast

from specactor.data.chat import Message, are_messages
from specactor.data.verifiers import as_score, find, is_remote
from specactor.errors import DataError
from specactor.types import Problem

Said = str | Sequence[Message]  # a text is taken as it is; messages go through the model's chat template


class Environment(Protocol):
    """What the policy talks to. ``async def close(self)``, if any, is called when the conversation is over, however it
    ends, to release what it holds; its failure is told, and changes no reward."""

    async def start(self, problem: Problem) -> Said:
        """Return what the policy sees first."""

    async def step(self, response: str) -> Said | float:
        """Return what it sees next, or a reward, any finite number, which ends the conversation."""


class Agent(Protocol):
    """Speaks OpenAI's chat completions, for one session; it may have ``close``, too."""

    async def run(self, problem: Problem, base_url: str, api_key: str) -> float:
        """Ask the policy at `base_url`; return the reward, any finite number."""


FORMS = {
    "start": ("self", "problem"),
    "step": ("self", "response"),
    "run": ("self", "problem", "base_url", "api_key"),
}


@lru_cache(maxsize=256)
def environment_of(name: str) -> type[Environment] | type[Agent] | None:
    """Return the class of that name; None where it names a verifier. Raises DataError for a class of neither kind."""
    if ":" not in name or is_remote(name) or not inspect.isclass(found := find(name)):
        return None
    for method in ("run",) if hasattr(found, "run") else ("start", "step"):
        function = getattr(found, method, None)
        if not inspect.iscoroutinefunction(function) or not _takes(function, FORMS[method]):
            raise DataError(
                f"got {name!r}, a class without `async def {method}({', '.join(FORMS[method])})`. A class is an "
                "environment: see specactor.data.environment. Correct it, or name a function, which scores one "
                "response."
            )
    return cast("type[Environment] | type[Agent]", found)


def _takes(function: Any, arguments: Sequence[str]) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


_SAID, _REWARD = "a text, or messages with a role and a content each", "a finite number as reward"
_EXPECTED = {"start": _SAID, "step": f"{_SAID}, or {_REWARD}", "run": _REWARD}


def checked(method: str, value: object) -> Said | float:
    """Return what was said, or a reward. Raises DataError for neither: that is a bug of the environment."""
    if method != "run" and (isinstance(value, str) or are_messages(value)):
        return value
    if method != "start" and math.isfinite(reward := as_score(value)):
        return reward
    raise DataError(f"it returned {value!r:.100} of type {type(value).__name__}, expected {_EXPECTED[method]}")
