"""The drafters that a configuration names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from specactor.config import DRAFTERS, SpeculationConfig
from specactor.config.speculation import MTP, kind_of
from specactor.errors import ConfigError
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.previous import PreviousDrafter
from specactor.rollout.speculation.suffix import SuffixDrafter

OVER_TEXT: dict[str, type[Drafter]] = {drafter.name: drafter for drafter in (SuffixDrafter, PreviousDrafter)}


def make_drafters(config: SpeculationConfig, *, connect: Callable[[str], Drafter] | None = None) -> list[Drafter]:
    """Make the configured drafters. Raises ConfigError for one that is unknown or cannot be loaded. `connect` makes
    those in processes, if any."""
    return [_make(name, connect) for name in config.draft_methods]


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
    raise ConfigError.at(
        "rollout.speculation.drafters",
        name,
        DRAFTERS,
        "Choose one of these.",
    )


def _imported(name: str, module: str, attribute: str) -> Drafter:
    try:
        found = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError.at(
            "rollout.speculation.drafters", name, "the import path of a Drafter, package.module:Class", f"{error}."
        ) from error
    if not isinstance(found, Drafter):
        raise ConfigError.at(
            "rollout.speculation.drafters", name, f"a subclass of {Drafter.__module__}.Drafter", "Fix it."
        )
    return found


class Filler(Drafter):
    """Drafts tokens of the prompt, to measure what verification costs."""

    name = "filler"

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [
            list(islice(cycle(sequence.prompt_ids), window))
            for sequence, window in zip(sequences, windows, strict=True)
        ]
