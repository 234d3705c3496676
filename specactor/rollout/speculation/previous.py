"""Drafts what a prompt and seed gave when last sampled, at the same positions: the noise favours the same token again
(common random numbers; PEGASUS, Ng and Jordan 2000), also after the texts have differed.

Invariants: a draft is of the same prompt and seed; at most `max_bytes` are held, what ended first goes first; a new
policy changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import eq

from specactor.rollout.speculation.acceptance import CONFIDENCES
from specactor.rollout.speculation.drafter import Drafter, DraftSequence

SEEN = CONFIDENCES - 1  # tokens before a draft that say how sure it is: so many were right
RESPONSE_BYTES, TOKEN_BYTES = 320, 4  # memory of a response, and of each of its tokens, in CPython
MAX_BYTES = 2**26  # 200,000 short responses, or 16 million tokens of long ones


class PreviousDrafter(Drafter):
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
