"""The drafters that a configuration names."""

from __future__ import annotations

import difflib
import importlib
import inspect
from array import array
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from operator import eq

from specactor.config import DRAFTERS, SpeculationConfig
from specactor.config.speculation import MTP, kind_of
from specactor.errors import ConfigError
from specactor.rollout.speculation.acceptance import CONFIDENCES
from specactor.rollout.speculation.costs import CostTable
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.suffix import SuffixDrafter

SEEN = CONFIDENCES - 1
"""Tokens before a draft that say how sure it is: so many were right."""
RESPONSE_BYTES, TOKEN_BYTES = 320, 4
"""Memory of a response, and of each of its tokens, in CPython."""
MAX_BYTES = 2**26
"""200,000 short responses, or 16 million tokens of long ones."""


class PreviousDrafter(Drafter):
    """Drafts what a prompt and seed gave when last sampled, at the same positions: the noise favours the same token
    again (common random numbers; PEGASUS, Ng and Jordan 2000), also after the texts have differed.

    Invariants: a draft is of the same prompt and seed; at most `max_bytes` are held, what ended first goes first; a new
    policy changes nothing.
    """

    name = "previous"

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: dict[tuple[int, int], array[int]] = {}  # by prompt and seed, in the order in which they ended
        self.num_bytes = 0
        self._last: dict[str, array[int]] = {}  # by running request

    def open(self, sequence: DraftSequence) -> None:
        self._last[sequence.request_id] = self._held.get(_key(sequence), array("i"))

    def close(self, sequence: DraftSequence) -> None:
        last = self._last.pop(sequence.request_id, array("i"))
        # Of a request that ends early (a turn of a conversation, a retracted one) what came next stays known. Where it
        # is not needed, a response that ended sooner than the last one, it costs the rows of one draft at the end.
        text = array("i", sequence.output_ids) + last[len(sequence.output_ids) :]
        self.num_bytes -= _bytes(self._held.pop(_key(sequence), array("i")))
        if text:
            self._held[_key(sequence)] = text
        self.num_bytes += _bytes(text)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _bytes(self._held.pop(next(iter(self._held))))

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        drafts, confidence = [], []
        for sequence, window in zip(sequences, windows, strict=True):
            last, recent = self._last[sequence.request_id], sequence.output_ids[-SEEN:]
            at = len(sequence.output_ids)
            drafts.append(last[at : at + window].tolist())
            confidence.append(SEEN - len(recent) + sum(map(eq, recent, last[at - len(recent) : at])))
        self.confidence = confidence
        return drafts


def _bytes(text: array[int]) -> int:
    return RESPONSE_BYTES + TOKEN_BYTES * len(text) if text else 0


def _key(sequence: DraftSequence) -> tuple[int, int]:
    """Two prompts of one hash would cost wrong drafts, and no more."""
    return hash(sequence.prompt_ids), sequence.seed


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
