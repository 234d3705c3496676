"""The drafters that a configuration names, and the smallest of them.

Larger ones are imported when they are asked for: only `model` needs SGLang.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from operator import eq

from specactor.config import DRAFTERS, SpeculationConfig
from specactor.config.speculation import MTP, of_draft_model
from specactor.errors import ConfigError
from specactor.rollout.speculation.acceptance import CONFIDENCES
from specactor.rollout.speculation.drafter import HISTORY_TOKENS, Drafter, DraftSequence


def make_drafters(config: SpeculationConfig, *, connect: Callable[[str], Drafter] | None = None) -> list[Drafter]:
    """The drafters that a configuration names. Raises ConfigError for a name that is not known or cannot be loaded.

    `connect` gives the drafter `decoupled`, or one of its further names; without it there are no drafter processes.
    """
    return [_make(name, connect) for name in config.draft_methods]


def _make(name: str, connect: Callable[[str], Drafter] | None) -> Drafter:
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
    """Fills windows with tokens of the prompt, over and over, to measure what verification costs; rarely right."""

    name = "filler"

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [
            list(islice(cycle(sequence.prompt_ids), window))
            for sequence, window in zip(sequences, windows, strict=True)
        ]


SEEN = CONFIDENCES - 1
"""Tokens before a draft that say how sure it is: so many were right."""


class PreviousDrafter(Drafter):
    """Drafts what a request's seed gave for its prompt when it was last sampled, at the same positions.

    Noise is keyed by (seed, position): where a seed comes again, a token is again the one that its noise favours, as
    far as policy and text so far are as they were (common random numbers; PEGASUS, Ng and Jordan 2000). So a draft goes
    on at its position after the two texts have differed. Seeds come again in evaluations, in requests that are begun
    again, and in training with `rollout.noise_visits` > 1; where the noise was renewed, nothing is drafted.

    Invariants, each with a test: a draft is of the same prompt and seed; at most `max_tokens` are held, and the
    responses that ended longest ago go first; a new policy changes nothing. A token held takes 4 bytes of memory, and a
    response 200 to 300.
    """

    name = "previous"

    def __init__(self, *, max_tokens: int = HISTORY_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._held: dict[tuple[int, int], array[int]] = {}  # by prompt and seed, in the order in which they ended
        self.num_tokens = 0
        self._last: dict[str, array[int]] = {}  # by running request

    def open(self, sequence: DraftSequence) -> None:
        self._last[sequence.request_id] = self._held.get(_key(sequence), array("i"))

    def close(self, sequence: DraftSequence) -> None:
        last = self._last.pop(sequence.request_id, array("i"))
        # Of a request that ends early (a turn of a conversation, a retracted one) what came next stays known.
        text = array("i", sequence.output_ids) + last[len(sequence.output_ids) :]
        self.num_tokens += len(text) - len(self._held.pop(_key(sequence), ()))
        if text:
            self._held[_key(sequence)] = text
        while self.num_tokens > self._max_tokens:
            self.num_tokens -= len(self._held.pop(next(iter(self._held))))

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        drafts, confidence = [], []
        for sequence, window in zip(sequences, windows, strict=True):
            last, recent = self._last[sequence.request_id], sequence.output_ids[-SEEN:]
            at = len(sequence.output_ids)
            drafts.append(last[at : at + window].tolist())
            confidence.append(SEEN - len(recent) + sum(map(eq, recent, last[at - len(recent) : at])))
        self.confidence = confidence
        return drafts


def _key(sequence: DraftSequence) -> tuple[int, int]:
    """Two prompts of one hash would cost wrong drafts, and no more."""
    return hash(sequence.prompt_ids), sequence.seed
