"""Users' own functions by import path. Verifiers, environments and agents stand in a problem's column ``verifier``; the
others are settings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from specactor.config import Config
from specactor.data.environment import Agent, Environment
from specactor.data.verifiers import find
from specactor.errors import ConfigError, DataError
from specactor.types import Problem, ScoredGroup

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Advantage", "Agent", "AsyncReward", "DataSource", "Environment", "GroupFilter", "Loss", "Reward"]


Reward = Callable[[str, Problem], float]
"""A ``verifier`` (response, problem) scores with any finite number; 1 is solved."""
AsyncReward = Callable[[str, Problem], Awaitable[float]]
"""The same; those of a process are awaited together, in one event loop: one that blocks it delays the others."""
DataSource = Callable[[], Iterable[Mapping[str, object]]]
"""``data.train`` or ``data.eval`` gives the same rows at every call."""
Advantage = Callable[[Sequence[Sequence[float]]], Sequence[Sequence[float]]]
"""``algorithm.advantage`` keeps the shape of the rewards, group by group."""
GroupFilter = Callable[[ScoredGroup], bool]
"""``algorithm.dynamic_sampling`` says whether to learn from a group."""
Loss = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""``algorithm.loss`` returns the loss of every token, [T], from its log-probabilities now and when it was sampled, and
its advantage."""
ARGUMENTS = {
    "algorithm.advantage": "rewards",
    "algorithm.loss": "logprobs_T, old_logprobs_T, advantages_T",
    "algorithm.dynamic_sampling": "group",
    "warmup.solver": "problem, rng, stage",
}


def hook(setting: str, name: str) -> Callable[..., Any]:
    """Import the function. Raises ConfigError where none takes the setting's `ARGUMENTS`."""
    try:
        found = find(name)
    except DataError as error:
        raise ConfigError(f"{setting}: {error}") from error
    arguments = ARGUMENTS[setting]
    try:
        inspect.signature(found).bind(*arguments.split(", "))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError.at(setting, name, f"a function ({arguments})", f"It failed with: {error}.") from error
    return found  # type: ignore[return-value]


def check(config: Config) -> None:
    """Raise ConfigError for a hook of the settings that is missing or malformed."""
    for setting in ARGUMENTS:
        if ":" in (name := attrgetter(setting)(config)):
            hook(setting, name)


def called(setting: str, name: str, *arguments: object) -> Any:
    """Return what the hook returns. Raises DataError when it raises."""
    function = hook(setting, name)
    try:
        return function(*arguments)
    except Exception as error:  # code of others, which may raise anything
        raise DataError(f"{setting}: {name} raised {type(error).__name__}: {error}. Correct it.") from error


def advantages_by(name: str, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return a hook's advantages. Raises DataError for another shape, or non-finite ones."""
    setting = "algorithm.advantage"
    found = called(setting, name, rewards)
    try:
        advantages = [[float(a) for a in group] for group in found]
    except (TypeError, ValueError) as error:
        raise DataError(f"{setting}: {name} returned {found!r:.200}, expected lists of numbers. Correct it.") from error
    shape, wanted = [len(group) for group in advantages], [len(group) for group in rewards]
    if shape != wanted:
        raise DataError(
            f"{setting}: {name} returned groups of {shape[:8]}, expected {wanted[:8]}, as the rewards. Correct it."
        )
    wrong = next((a for group in advantages for a in group if not math.isfinite(a)), None)
    if wrong is not None:
        raise DataError(f"{setting}: {name} returned {wrong}, expected finite numbers. Correct it.")
    return advantages


def loss_by(name: str, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Return a hook's loss, with gradient. Raises DataError for another shape, or non-finite ones."""
    setting = "algorithm.loss"
    loss_T: Tensor = called(setting, name, logprobs_T, old_logprobs_T, advantages_T)
    shape = getattr(loss_T, "shape", None)
    if shape != logprobs_T.shape:
        got = f"a tensor of shape {tuple(shape)}" if shape is not None else f"{loss_T!r:.80}"
        raise DataError(
            f"{setting}: {name} returned {got}, expected {tuple(logprobs_T.shape)}, as the tokens. Correct it."
        )
    if not bool(loss_T.isfinite().all()):
        raise DataError(f"{setting}: {name} returned values that are not finite, expected finite ones. Correct it.")
    return loss_T


def keeps(name: str, group: ScoredGroup) -> bool:
    """Return whether the hook keeps the group. Raises DataError for no bool."""
    setting = "algorithm.dynamic_sampling"
    kept = called(setting, name, group)
    if not isinstance(kept, bool):
        raise DataError(f"{setting}: {name} returned {kept!r:.200}, expected True or False. Correct it.")
    return kept
