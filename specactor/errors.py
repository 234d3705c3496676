"""Errors that a user can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class SpecActorError(Exception):
    """All errors that are raised on purpose derive from this one."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, prefix: str = "") -> str:
    """Return the remedy for an unknown name: the nearest of those that are known, or else `otherwise`."""
    nearest = difflib.get_close_matches(name, [*known], n=1)
    return f"Did you mean {prefix}{nearest[0]}?" if nearest else otherwise


class ConfigError(SpecActorError, ValueError):
    """A setting, or a combination, cannot work."""

    @classmethod
    def at(cls, field: str, got: object, expected: str, remedy: str) -> ConfigError:
        """Compose ``rollout.group_size: got 1, expected >= 2. <way out>``."""
        return cls(f"{field}: got {got!r}, expected {expected}. {remedy}")


class DataError(SpecActorError, ValueError):
    """A data file, row, task or hook cannot be used."""


class CheckpointError(SpecActorError):
    """A checkpoint is missing, unfinished, or of another layout."""


class PlanError(SpecActorError):
    """Measurements or predictions cannot be planned with."""


class EngineError(SpecActorError):
    """An engine died, timed out, or refused a request."""


class WeightSyncError(SpecActorError):
    """Weights did not arrive whole. `ended`: engines of this rank that lived, and were ended for it."""

    def __init__(self, message: str, *, ended: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ended = tuple(ended)


class CopiesDifferError(WeightSyncError):
    """Trainer ranks hold unequal copies: new engines would fail likewise."""


class PeerFailedError(SpecActorError):
    """Another rank failed, and has reported the cause."""
