"""What a drafter that runs ahead of its target learns about its sharpness, once the target has decided. PURE.

Inside an engine a draft is judged in its own round (`sharpening.Record`). A drafter in a process of its own hears of
the target's tokens later, and of several at once, while further draft tokens stand behind them.

Invariants: a position teaches once, and only when the target's token there is known and all tokens before it are those
that the drafter had seen; memory is bounded by `MAX_KEPT` positions per text.

Shape legend: N positions, K likeliest tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from specactor.rollout.planning.noise import Floats, Ints, gumbel
from specactor.rollout.planning.sharpening import MAX_POSITIONS, Sharpening

MAX_KEPT = 64
"""Latest positions of a text that wait for the target."""


class _Place(NamedTuple):
    """A position that was drafted."""

    at: int
    """Index of the token in the output."""
    seed: int
    position: int
    """Of the token before."""
    logq: Floats
    """[K]"""
    tokens: Ints
    """[K]"""


class Hindsight:
    """Of one drafter."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[_Place]] = {}
        self._known: list[tuple[_Place, int]] = []

    def expect(self, key: Hashable, index: int, *, seed: int, position: int, logq_K: Floats, tokens_K: Ints) -> None:
        """What was likely at output token `index` of a text. Indices of a text ascend."""
        self._waiting.setdefault(key, deque(maxlen=MAX_KEPT)).append(_Place(index, seed, position, logq_K, tokens_K))

    def judge(self, key: Hashable, tokens: Sequence[int], *, agreed: int, committed: int) -> None:
        """A text's output is now `tokens`.

        Args: its leading tokens that are what they were when the drafter saw them; those that the target emitted.
        """
        waiting = self._waiting.get(key)
        while waiting and waiting[-1].at > agreed:
            waiting.pop()
        while waiting and waiting[0].at < committed:
            place = waiting.popleft()
            self._known.append((place, tokens[place.at]))

    def forget(self, key: Hashable) -> None:
        self._waiting.pop(key, None)

    def teach(self, sharpening: Sharpening) -> None:
        """All that was judged since the last time, at most `MAX_POSITIONS`."""
        known, self._known = self._known[:MAX_POSITIONS], []
        if not known:
            return
        tokens_NK = np.stack([place.tokens for place, _ in known])
        noise_NK = gumbel(
            np.array([place.seed for place, _ in known]),
            np.array([place.position for place, _ in known]),
            tokens_NK,
        )
        logq_NK = np.stack([place.logq for place, _ in known])
        sharpening.observe(logq_NK, noise_NK, tokens_NK, np.array([token for _, token in known]))
