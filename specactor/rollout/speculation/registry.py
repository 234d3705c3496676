"""The drafters that a configuration names."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from specactor.config import DRAFTERS, SpeculationConfig
from specactor.config.speculation import MTP, kind_of
from specactor.errors import ConfigError
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
        module, _, attribute = name.partition(":")
        if kind_of(name) or name == MTP or name in OVER_TEXT:
            continue
        if not attribute:
            raise _unknown(name)
        try:
            found = getattr(importlib.import_module(module), attribute)
            inspect.signature(found).bind()
        except (ModuleNotFoundError, AttributeError, TypeError, SyntaxError, ValueError) as error:
            raise _not_imported(name, error) from error
        except Exception:  # code of others, which may want an engine's process
            continue
        if inspect.isclass(found) and not issubclass(found, Drafter):
            raise _no_drafter(name)
    if config.cost_table:
        CostTable.read(config.cost_table)


def _make(name: str, connect: Callable[[str], Drafter] | None) -> Drafter:
    module, _, attribute = name.partition(":")
    if kind_of(name) == "model":
        from specactor.rollout.sglang.model_drafter import ModelDrafter  # these alone need SGLang

        return ModelDrafter(name)
    if name == MTP:
        from specactor.rollout.sglang.model_drafter import MtpDrafter

        return MtpDrafter()
    if kind_of(name) == "decoupled":
        if connect is None:
            raise ConfigError.at(
                "rollout.speculation.drafters", name, "drafters in the engine", "Here are no drafter processes."
            )
        return connect(name)
    if attribute:
        return _imported(name, module, attribute)
    if name in OVER_TEXT:
        return OVER_TEXT[name]()
    raise _unknown(name)


def _unknown(name: str) -> ConfigError:
    nearest = difflib.get_close_matches(name, (*OVER_TEXT, MTP, "model", "decoupled"), n=1)
    listed = "Separate names by blanks." if "," in name else ""
    hint = listed or (f"Did you mean {nearest[0]}?" if nearest else "Choose one of these.")
    return ConfigError.at("rollout.speculation.drafters", name, DRAFTERS, hint)


def _not_imported(name: str, error: Exception) -> ConfigError:
    path = "the import path of a Drafter, package.module:Class"
    remedy = f"Put its folder on PYTHONPATH. It failed with: {error}."
    return ConfigError.at("rollout.speculation.drafters", name, path, remedy)


def _no_drafter(name: str) -> ConfigError:
    return ConfigError.at(
        "rollout.speculation.drafters", name, f"a subclass of {Drafter.__module__}.Drafter", "Fix it."
    )


def _imported(name: str, module: str, attribute: str) -> Drafter:
    try:
        found = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise _not_imported(name, error) from error
    if not isinstance(found, Drafter):
        raise _no_drafter(name)
    return found


class Filler(Drafter):
    """Drafts tokens of the prompt, to measure what verification costs."""

    name = "filler"

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [
            list(islice(cycle(sequence.prompt_ids), window))
            for sequence, window in zip(sequences, windows, strict=True)
        ]
