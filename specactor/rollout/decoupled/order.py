"""How frames are numbered, what becomes of those that do not count, and counts that a peer tells. PURE.

Invariant: frames of a session have rising numbers, so that the peer can drop what was repeated or
overtaken: every loss is repaired anyway.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from specactor.rollout.decoupled.protocol import (
    NO_SESSION,
    FrameError,
    Header,
    ToDrafter,
    ToEngine,
    encode,
)

_LOG = logging.getLogger(__name__)


class Numbering:
    """Frames that go out from one session."""

    def __init__(self, session: int) -> None:
        self.session = session
        self._number = 0

    def frames(
        self, records: Sequence[ToDrafter] | Sequence[ToEngine], drops: Drops, *, receiver: int = NO_SESSION
    ) -> list[bytes]:
        """All of them in order, in as few frames as their size allows; a record too large for any is dropped."""
        if not records:
            return []
        self._number += 1
        try:
            return [encode(Header(sender=self.session, receiver=receiver, number=self._number), records)]
        except FrameError as error:
            self._number -= 1
            if len(records) == 1:
                drops.add("too_large", str(error))
                return []
            half = len(records) // 2
            first = self.frames(records[:half], drops, receiver=receiver)
            return first + self.frames(records[half:], drops, receiver=receiver)


class Total:
    """Of a count that a peer tells now and then, and begins anew from 0."""

    def __init__(self) -> None:
        self.value = 0
        self._told = 0

    def tell(self, count: int) -> None:
        self.value += count - (self._told if count >= self._told else 0)
        self._told = count

    def begin(self) -> None:
        """The peer is known to have begun anew."""
        self._told = 0


class Drops:
    """What was dropped, by reason."""

    def __init__(self, who: str) -> None:
        self._who = who
        self.counts: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()

    def expect(self, reason: str, count: int = 1) -> None:
        """Count what happens in ordinary operation."""
        if count:
            self.counts[reason] += count

    def add(self, reason: str, detail: str) -> None:
        """Count what should not happen. Logged when the count reaches a power of two, so the log stays short.

        Args: a word; what an operator would want to know.
        """
        self.counts[reason] += 1
        self._untold[reason] += 1
        count = self.counts[reason]
        if count & (count - 1) == 0:
            _LOG.warning("%s: dropped %s, %d so far; %s", self._who, reason, count, detail)

    def take(self) -> dict[str, int]:
        """What should not have happened, since the last call."""
        taken, self._untold = self._untold, Counter()
        return dict(taken)
