"""The drafters that a configuration names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from specactor.config import SpeculationConfig
from specactor.config.speculation import DRAFTERS, MTP, kind_of
from specactor.errors import ConfigError, did_you_mean
from specactor.rollout.speculation.costs import CostTable
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.previous import PreviousDrafter
from specactor.rollout.speculation.suffix import SuffixDrafter

OVER_TEXT: dict[str, type[Drafter]] = {drafter.name: drafter for drafter in (SuffixDrafter, PreviousDrafter)}


def make_drafters(config: SpeculationConfig, *, connect: Callable[[str], Drafter] | None = None) -> list[Drafter]:
    """Make the configured drafters. Raises ConfigError for one that is unknown or cannot be loaded. `connect` makes
    those in processes, if any."""
    return [_make(name, connect) for name in config.draft_methods]


def check_drafters(config: SpeculationConfig) -> None:
    """Raise ConfigError for a name that no engine can make a drafter of, and what `CostTable.read` raises. None is
    made."""
    if config.mode == "off":
        return
    for name in config.draft_methods:
        try:
            if not kind_of(name) and name != MTP:
                _find(name)
        except ConfigError:
            raise
        except Exception:  # code of others, which may want an engine's process
            continue
    if config.cost_table:
        CostTable.read(config.cost_table)


def _make(name: str, connect: Callable[[str], Drafter] | None) -> Drafter:
    if kind_of(name) == "decoupled":
        assert connect is not None, name
        return connect(name)
    if kind_of(name) == "model" or name == MTP:
        from specactor.rollout.sglang.model_drafter import ModelDrafter, MtpDrafter  # these alone need SGLang

        return MtpDrafter() if name == MTP else ModelDrafter(name)
    made = _find(name)()
    if not isinstance(made, Drafter):
        raise _no_drafter(name)
    return made


def _find(name: str) -> Callable[[], Drafter]:
    """Return what makes a drafter over text, or one of a user's. Raises ConfigError."""
    if name in OVER_TEXT:
        return OVER_TEXT[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        hint = did_you_mean(name, (*OVER_TEXT, MTP, "model", "decoupled"), "Choose one of these.")
        hint = "Separate names by blanks." if "," in name else hint
        raise ConfigError.at("rollout.speculation.drafters", name, DRAFTERS, hint)
    try:
        found: Callable[[], Drafter] = getattr(importlib.import_module(module), attribute)
        inspect.signature(found).bind()
    except (ModuleNotFoundError, AttributeError, NameError, TypeError, SyntaxError, ValueError) as error:
        path = "the import path of a Drafter, package.module:Class"
        remedy = f"Put its folder on PYTHONPATH. It failed with: {error}."
        raise ConfigError.at("rollout.speculation.drafters", name, path, remedy) from error
    if inspect.isclass(found) and not issubclass(found, Drafter):
        raise _no_drafter(name)
    return found


def _no_drafter(name: str) -> ConfigError:
    return ConfigError.at(
        "rollout.speculation.drafters", name, f"a subclass of {Drafter.__module__}.Drafter", "Fix it."
    )


class Filler(Drafter):
    """Drafts tokens of the prompt, to measure what verification costs."""

    name = "filler"

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [
            list(islice(cycle(sequence.prompt_ids), window))
            for sequence, window in zip(sequences, windows, strict=True)
        ]
