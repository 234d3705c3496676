"""Drafters for tests: right ones, half right ones, and liars. Engines load them by import path."""

from __future__ import annotations

from collections.abc import Sequence

from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.suffix import SuffixDrafter

EOS = 1


class Memory(Drafter):
    """Remembers what a request (prompt, seed) emitted before, and drafts it again: always right."""

    name = "memory"
    every = 0
    """Every so manieth token is drafted wrong; 0: none."""

    def __init__(self) -> None:
        self._texts: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def close(self, sequence: DraftSequence) -> None:
        key = sequence.prompt_ids, sequence.seed
        self._texts[key] = max(self._texts.get(key, []), sequence.output_ids[:], key=len)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [self._draft(s, w) for s, w in zip(sequences, windows, strict=True)]

    def _draft(self, sequence: DraftSequence, window: int) -> list[int]:
        done = len(sequence.output_ids)
        text = self._texts.get((sequence.prompt_ids, sequence.seed), [])[done : done + window]
        return [t + 1 if self.every and (done + j + sequence.seed) % self.every == 0 else t for j, t in enumerate(text)]


class Heard(SuffixDrafter):
    """Counts what it is told; as a suffix drafter it keeps it."""

    name = "heard"
    opened = 0

    def open(self, sequence: DraftSequence) -> None:
        self.opened += 1
        super().open(sequence)

    def figures(self) -> dict[str, float]:
        return {"opened": self.opened, "tokens": self.num_tokens}


class HalfRight(Memory):
    """Wrong now and then, at different places for different requests; windows differ from request to request."""

    name = "half-right"
    every = 5

    def _draft(self, sequence: DraftSequence, window: int) -> list[int]:
        return super()._draft(sequence, window)[: (sequence.seed + len(sequence.output_ids)) % (window + 1)]


class _Liar(Drafter):
    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [self.lie(s, w) for s, w in zip(sequences, windows, strict=True)]

    def lie(self, sequence: DraftSequence, window: int) -> list[int]:
        raise NotImplementedError


class Garbage(_Liar):
    name = "garbage"

    def lie(self, sequence: DraftSequence, window: int) -> list[int]:
        return [(7919 * (sequence.seed + j) + 31 * len(sequence.output_ids)) % 96 for j in range(window)]


class Constant(_Liar):
    name = "constant"

    def lie(self, sequence: DraftSequence, window: int) -> list[int]:
        return [5] * window


class OnlyEos(_Liar):
    name = "only-eos"

    def lie(self, sequence: DraftSequence, window: int) -> list[int]:
        return [EOS] * window


class OutOfBounds(_Liar):
    """Tokens that do not exist, and more of them than were asked for."""

    name = "out-of-bounds"

    def lie(self, sequence: DraftSequence, window: int) -> list[int]:
        return [3, 10**6, -1] * 40


class Negative(_Liar):
    name = "negative"

    def lie(self, sequence: DraftSequence, window: int) -> list[int]:
        return [3, -1][:window]


class Fractional(_Liar):
    name = "fractional"

    def lie(self, sequence: DraftSequence, window: int) -> list[int]:
        return [3, 2.5][:window]  # type: ignore[list-item]


class TooFew(_Liar):
    name = "too-few"

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return []


class Raises(_Liar):
    name = "raises"

    def lie(self, sequence: DraftSequence, window: int) -> list[int]:
        raise RuntimeError("a drafter's bug")


class OfShortPrompts(Memory):
    """Drafts for prompts of a few tokens alone: those that begin a conversation, if its turns are its text."""

    name = "of-short-prompts"
    every = 11
    longest = 4

    def _draft(self, sequence: DraftSequence, window: int) -> list[int]:
        return super()._draft(sequence, window) if len(sequence.prompt_ids) <= self.longest else []
