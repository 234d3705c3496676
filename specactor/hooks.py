"""What users may put in the place of ours, by import path: the form of each, and checks of what it returns.

Verifiers, environments and agents stand in a problem's column ``verifier``; the others are settings. A hook of the
wrong form is found before anything starts; one that raises, or returns what it may not, ends the run with one line.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from specactor.config import Config
from specactor.data.environment import Agent, Environment
from specactor.data.verifiers import find
from specactor.errors import ConfigError, DataError
from specactor.types import Problem, ScoredGroup

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Advantage", "Agent", "AsyncReward", "DataSource", "Environment", "GroupFilter", "Loss", "Reward"]


class Reward(Protocol):
    """It is in [0, 1]; a problem's ``verifier``."""

    def __call__(self, response: str, problem: Problem, /) -> float: ...


class AsyncReward(Protocol):
    """It is a reward as ``async def``: those of a step are awaited together."""

    def __call__(self, response: str, problem: Problem, /) -> Awaitable[float]: ...


class DataSource(Protocol):
    """Rows with the columns of a data file, the same whenever it is called; ``data.train`` or ``data.eval``."""

    def __call__(self) -> Iterable[Mapping[str, object]]: ...


class Advantage(Protocol):
    """Advantages in the shape of the rewards, group by group; ``algorithm.advantage``."""

    def __call__(self, rewards: Sequence[Sequence[float]], /) -> Sequence[Sequence[float]]: ...


class GroupFilter(Protocol):
    """It says whether a group is learned from; ``algorithm.dynamic_sampling``."""

    def __call__(self, group: ScoredGroup, /) -> bool: ...


class Loss(Protocol):
    """The loss of every token, [T], from its log-probability now and when it was sampled; ``algorithm.loss``."""

    def __call__(self, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, /) -> Tensor: ...


def hook(setting: str, name: str, arguments: str) -> Callable[..., Any]:
    """The function of that name. Raises ConfigError where there is none that takes these arguments.

    Args:
        arguments: their names, for the message; a function may have others with defaults.
    """
    try:
        found = find(name)
    except DataError as error:
        raise ConfigError(f"{setting}: {error}") from error
    try:
        inspect.signature(found).bind(*arguments.split(", "))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError.at(setting, name, f"a function ({arguments})", f"It failed with: {error}.") from error
    return found  # type: ignore[return-value]


def check(config: Config) -> None:
    """Raises ConfigError for a hook among the settings that is not there, or has another form."""
    if ":" in config.algorithm.advantage:
        hook("algorithm.advantage", config.algorithm.advantage, "rewards")
    if ":" in config.algorithm.loss:
        hook("algorithm.loss", config.algorithm.loss, "logprobs_T, old_logprobs_T, advantages_T")
    if ":" in config.algorithm.dynamic_sampling:
        hook("algorithm.dynamic_sampling", config.algorithm.dynamic_sampling, "group")


def called(setting: str, name: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Return what the hook returns. Raises DataError when it raises: code of others may raise anything."""
    try:
        return function(*arguments)
    except Exception as error:
        raise DataError(f"{setting}: {name} raised {type(error).__name__}: {error}. Correct it.") from error


def advantages_by(name: str, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """The advantages of a hook. Raises DataError for another shape, or a number that is not finite."""
    setting = "algorithm.advantage"
    found = called(setting, name, hook(setting, name, "rewards"), rewards)
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
    """The loss of a hook, with its gradient. Raises DataError for another shape, or a value that is not finite."""
    setting, names = "algorithm.loss", "logprobs_T, old_logprobs_T, advantages_T"
    loss_T: Tensor = called(setting, name, hook(setting, name, names), logprobs_T, old_logprobs_T, advantages_T)
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
    """Return whether the hook keeps the group. Raises DataError for an answer that is not a bool."""
    setting = "algorithm.dynamic_sampling"
    kept = called(setting, name, hook(setting, name, "group"), group)
    if not isinstance(kept, bool):
        raise DataError(f"{setting}: {name} returned {kept!r:.200}, expected True or False. Correct it.")
    return kept
