"""The drafters that a configuration names, and a small one, `previous`."""

from __future__ import annotations

import importlib
import inspect
from array import array
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from operator import eq

from specactor.config import SpeculationConfig
from specactor.config.speculation import DRAFTERS, MTP, kind_of
from specactor.errors import ConfigError, did_you_mean
from specactor.rollout.speculation.acceptance import CONFIDENCES
from specactor.rollout.speculation.costs import CostTable
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.suffix import SuffixDrafter

SEEN = CONFIDENCES - 1  # tokens before a draft that say how sure it is: so many were right
RESPONSE_BYTES, TOKEN_BYTES = 320, 4  # memory of a response, and of each of its tokens, in CPython
MAX_BYTES = 2**26  # 200,000 short responses, or 16 million tokens of long ones


class PreviousDrafter(Drafter):
    """Drafts what a prompt and seed gave when last sampled, at the same positions: the noise favours the same token
    again (common random numbers; PEGASUS, Ng and Jordan 2000), also after the texts have differed.

    Invariants: a draft is of the same prompt and seed; at most `max_bytes` are held, what ended first goes first; a
    new policy changes nothing.
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
    """Return what to find a text by. Two prompts of one hash would cost wrong drafts, and no more."""
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
