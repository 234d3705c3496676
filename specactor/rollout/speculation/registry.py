from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from specactor.config import DRAFTERS, SpeculationConfig
from specactor.config.speculation import MTP, of_draft_model
from specactor.errors import ConfigError
from specactor.rollout.speculation.drafter import Drafter, DraftSequence


def make_drafters(config: SpeculationConfig, *, connect: Callable[[str], Drafter] | None = None) -> list[Drafter]:
    """Make the configured drafters. Raises ConfigError for a name that is not known or cannot be loaded.

    `connect` makes those in processes; None: there are none.
    """
    return [_make(name, connect) for name in config.draft_methods]


def _make(name: str, connect: Callable[[str], Drafter] | None) -> Drafter:
    # Imports are where they are needed: `model` alone needs SGLang.
    kind, _ = of_draft_model(name) or ("", 0)
    module, _, attribute = name.partition(":")
    if kind == "model":
        from specactor.rollout.sglang.model_drafter import ModelDrafter

        return ModelDrafter(name)
    if name == MTP:
        from specactor.rollout.sglang.model_drafter import MtpDrafter

        return MtpDrafter()
    if kind == "decoupled":
        if connect is None:
            raise ConfigError.at(
                "rollout.speculation.drafters", name, "drafters in the engine", "Here are no drafter processes."
            )
        return connect(name)
    if attribute:
        return _imported(name, module, attribute)
    if name == "suffix":
        from specactor.rollout.speculation.suffix import SuffixDrafter

        return SuffixDrafter()
    if name == "previous":
        from specactor.rollout.speculation.previous import PreviousDrafter

        return PreviousDrafter()
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
