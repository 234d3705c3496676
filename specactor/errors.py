"""Errors a user can act on: each message names the rule, the value and the way out."""

from __future__ import annotations


class SpecActorError(Exception):
    """Base of every error that SpecActor raises on purpose."""


class ConfigError(SpecActorError, ValueError):
    """A setting, or a combination of settings, that cannot work."""

    @classmethod
    def at(cls, field: str, got: object, expected: str, remedy: str) -> ConfigError:
        """The house form: ``rollout.group_size: got 1, expected >= 2. <way out>``."""
        return cls(f"{field}: got {got!r}, expected {expected}. {remedy}")


class DataError(SpecActorError, ValueError):
    """A data file, row or task that cannot be used."""


class CheckpointError(SpecActorError):
    """A checkpoint that is missing, unfinished, foreign, or of a layout that cannot be loaded."""


class PlanError(SpecActorError):
    """A measurement, prediction or table that speculation cannot be planned with."""


class EngineError(SpecActorError):
    """A rollout engine failed: did not start, died, timed out, or refused a request."""


class WeightSyncError(SpecActorError):
    """Weights did not arrive whole on every engine rank."""


class CopiesDifferError(WeightSyncError):
    """Hosts would take the weights from copies that are not equal: new engines would meet the same."""


class AgreementError(SpecActorError):
    """The engine's and the trainer's log-probabilities of the same tokens differ too much."""


class PeerFailedError(SpecActorError):
    """Another rank failed; that rank has reported the cause."""
