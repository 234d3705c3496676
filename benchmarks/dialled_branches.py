"""The dialled drafter of a drafter process with second choices, which are right as often as is told, too.

Invariant: its drafts are those of `dialled.Elsewhere`; a second choice is never the draft token.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from benchmarks.dialled import Elsewhere, Script
from specactor.rollout.decoupled.continuer import Lane
from specactor.rollout.decoupled.spec import DrafterSpec

HIT_RATE = 0.5
"""P(a second choice is right | the draft token is wrong, those before it are right)."""


class Guessing(Elsewhere):
    """With `branches.RunnerUps`."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__(spec)
        self.guessing = True
        self._second: list[list[int]] = []

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        drafts = super().extend(lanes)
        if not self.guessing:
            return drafts
        self._second = [
            [second(self._script, lane.seed, len(lane.tokens), draft)]
            for lane, [draft] in zip(lanes, drafts, strict=True)
        ]
        return drafts

    def runner_ups(self) -> list[list[int]]:
        return self._second


def second(script: Script, seed: int, position: int, draft: int) -> int:
    """In place of a draft token at this output position."""
    right = script.outputs[str(seed)]
    if position >= len(right):
        return draft + 1
    coin = xxhash.xxh32_intdigest(f"second {seed}:{position}".encode()) / 2**32
    return right[position] if draft != right[position] and coin < HIT_RATE else (right[position] + 2) % 16
