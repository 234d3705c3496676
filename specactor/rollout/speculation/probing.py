"""Looks: drafts are compared with what is emitted, unverified, to notice a drafter that has become good. PURE.

Invariants: intervals double from LOOK_EVERY plain rounds to LOOK_AT_LEAST_EVERY, or are so long that looks take
LOOK_SHARE of the time, up to MAX_REST; new requests shorten them to SOON, within that share. Only the past is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.verification import common

LOOK_EVERY = 16  # plain rounds before the first look
SOON = 4  # most plain rounds before a look at new requests, or at half as many
LOOK_AT_LEAST_EVERY = 64  # most rounds between cheap looks
LOOK_SHARE = 0.01  # share of plain decoding's seconds that looks may take; half of it made tiny rollouts 7 % slower
FEW = 8  # requests: of more, somebody has a draft in any round, if drafts are good
MAX_REST = 4096  # most rounds between two looks
MOST_AGAIN = 32  # looks in every round, for half of its time at most, with FEW requests, after drafts were accepted


Seen = tuple[str, int, int, int, int]
"""(request, drafted, draft tokens that equal what was emitted from the first on, asked, confidence)."""


class Look(NamedTuple):
    sequence: DraftSequence
    start: int  # tokens of its output then
    asked: int
    draft: Sequence[int]
    confidence: int

    def seen(self) -> Seen:
        emitted = self.sequence.output_ids[self.start : self.start + self.asked]
        there = self.draft[: len(emitted)]
        agreed = common(there, emitted)
        return self.sequence.request_id, len(there), agreed, len(emitted), self.confidence


class Looks:
    """Drafts to compare once enough is emitted; a request's are of one round."""

    def __init__(self) -> None:
        self.pending: dict[str, dict[str, Look]] = {}  # by request and drafter

    def keep(self, drafter: str, look: Look) -> None:
        self.pending.setdefault(look.sequence.request_id, {})[drafter] = look

    def over(self) -> dict[str, list[Seen]]:
        over: dict[str, list[Seen]] = {}
        for request_id, looks in list(self.pending.items()):
            _, (sequence, start, asked, *_) = next(iter(looks.items()))
            if len(sequence.output_ids) >= start + asked:
                del self.pending[request_id]
                for drafter, look in looks.items():
                    over.setdefault(drafter, []).append(look.seen())
        return over

    def ended(self, request_id: str) -> dict[str, list[Seen]]:
        """Take those of an ended request, as far as it went."""
        looks = self.pending.pop(request_id, {}).items()
        return {name: [look.seen()] for name, look in looks if len(look.sequence.output_ids) > look.start}


class BackOff:
    """When to look again: ever more seldom."""

    def __init__(self) -> None:
        self._again = 0
        self.restart()

    def paid(self) -> None:
        self._again = MOST_AGAIN

    def restart(self) -> None:
        """Drafting pays, or may: look soon in plain decoding."""
        self._rounds, self._interval, self._pause, self._least = 0, LOOK_EVERY, LOOK_EVERY, 0
        self._requests = 0
        self._end_look()

    def requests_came(self) -> None:
        if not self._tries:
            self._pause = min(self._pause, max(self._least, self._rounds + SOON))

    @property
    def rounds_left(self) -> int:
        return max(0, self._pause - self._rounds - 1)

    @property
    def is_long(self) -> bool:
        return self._pause >= LOOK_EVERY if self._tries == 0 else self._was_long  # not one in every round

    @property
    def goes_on(self) -> bool:
        return self._tries > 0

    def waits(self, expects: bool, *, look_s: float) -> bool:
        """Whether to go on with this look in 1, 2, 4, .. rounds, before the next one. `look_s`: since the last call."""
        keeps_up = not expects and self._pause == 1
        if 1 << self._tries >= LOOK_AT_LEAST_EVERY or not (expects or self._tries) or keeps_up:
            return False
        self._was_long = self.is_long
        self._rounds, self._pause = 0, 1 << self._tries if expects else 1
        self._tries += 1
        self._look_s += look_s
        return True

    def _end_look(self) -> None:
        self._tries, self._look_s, self._was_long = 0, 0.0, False

    def count_round(self, requests: int) -> bool:
        """Count a plain round. Returns whether to look in it."""
        self._rounds += 1
        self._requests = max(self._requests, requests)
        if 2 * requests <= self._requests:  # what does not pay for many may pay for few
            self._requests = requests
            self.requests_came()
        return self._rounds >= self._pause

    def looked(self, *, look_s: float, plain_s: float, requests: int = FEW + 1) -> None:
        """Note a look that found nothing; `look_s`: since `waits`."""
        # With few requests, a round in which nobody has a draft is no sign that drafting does not pay.
        self._rounds = self._requests = 0
        look_s += self._look_s
        self._end_look()
        if requests <= FEW and self._again and look_s <= plain_s / 2:
            self._again -= 1
            self._pause = 1
            return
        self._least = min(ceil(look_s / (LOOK_SHARE * plain_s)), MAX_REST)
        self._interval = self._pause = max(min(2 * self._interval, LOOK_AT_LEAST_EVERY), self._least)
