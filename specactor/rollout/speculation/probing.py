"""Looks at drafts that are not verified: they are compared with what is emitted, so that a drafter that has become good
is noticed while another leads or decoding is plain. PURE: seconds are passed in.

After plain rounds, drafters over text draft from some tokens ago (`DrafterSet.hindsight`), which tells at once how good
they are; other drafts are kept (`Looks`) until enough was emitted. A drafter that drafts ahead has drafts some rounds
after a look, so one that waits for it is taken up again after 1, 2, 4, .. rounds, MOST_TRIES times at most.

Invariants: what looks cost is bounded. The first comes after LOOK_EVERY plain rounds; then the time between two
doubles, up to LOOK_AT_LEAST_EVERY rounds, and a look that took long is followed by as many rounds as make
it LOOK_SHARE of them, up to MAX_REST. New requests bring the next look forward to SOON rounds after them, within that
share. With FEW requests there are also looks in the next MOST_AGAIN rounds after drafts were accepted, while each takes
at most AGAIN_SHARE of a round: there, a round in which nobody has a draft is no sign that drafting does not pay. Only
the past is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.verification import common

LOOK_EVERY = 16
"""Rounds of plain decoding before the first look."""
SOON = 4
"""Rounds of plain decoding, at most, before a look at requests that are new."""
LOOK_AT_LEAST_EVERY = 64
"""Rounds between looks, at most, if they are cheap."""
LOOK_SHARE = 0.005
"""Of the seconds of plain decoding, what looks may take."""
FEW = 8
"""Requests: of more, somebody has a draft in any round, if drafts are good."""
MOST_TRIES = 6
"""Times that a look is taken up again, since drafts are still on their way."""
MAX_REST = 4096
"""Rounds between two looks, however long they take."""
MOST_AGAIN = 32
"""Looks in every round, with few requests, since draft tokens were accepted last."""
AGAIN_SHARE = 0.5
"""Of a plain round, what each of these may take; longer ones are looks like others."""
PROMISED_ROUNDS = 8


class Seen(NamedTuple):
    """What became of one draft that was not verified."""

    request_id: str
    drafted: int
    agreed: int
    """Draft tokens, from the first on, that equal what was emitted."""
    asked: int
    confidence: int | None


class Look(NamedTuple):
    """A draft that is not verified."""

    sequence: DraftSequence
    start: int
    """Tokens of its output then."""
    asked: int
    draft: Sequence[int]
    """At most `asked` tokens."""
    confidence: int | None = None

    def seen(self) -> Seen:
        """Return how much of the draft equals what was emitted, of at most all `asked` positions."""
        emitted = self.sequence.output_ids[self.start : self.start + self.asked]
        there = self.draft[: len(emitted)]
        agreed = common(there, emitted)
        return Seen(self.sequence.request_id, len(there), agreed, len(emitted), self.confidence)


class Looks:
    """Drafts that are compared once enough was emitted. Those of a request are all of one round."""

    def __init__(self) -> None:
        self.pending: dict[str, dict[str, Look]] = {}
        """By request and drafter."""

    def keep(self, drafter: str, look: Look) -> None:
        """Compare this draft later; the request must have none that is pending since another round."""
        self.pending.setdefault(look.sequence.request_id, {})[drafter] = look

    def over(self) -> dict[str, list[Seen]]:
        """Take those for which enough was emitted, by drafter."""
        over: dict[str, list[Seen]] = {}
        for request_id, looks in list(self.pending.items()):
            _, (sequence, start, asked, *_) = next(iter(looks.items()))
            if len(sequence.output_ids) >= start + asked:
                del self.pending[request_id]
                for drafter, look in looks.items():
                    over.setdefault(drafter, []).append(look.seen())
        return over

    def ended(self, request_id: str) -> dict[str, list[Seen]]:
        """The request has ended: drafts count as far as it went."""
        looks = self.pending.pop(request_id, {}).items()
        return {name: [look.seen()] for name, look in looks if len(look.sequence.output_ids) > look.start}


class BackOff:
    """When to look again: ever more seldom, and for at most a share of the time."""

    def __init__(self) -> None:
        self._again = 0
        self.restart()

    def paid(self) -> None:
        """Draft tokens were accepted."""
        self._again = MOST_AGAIN

    def restart(self) -> None:
        """Drafting pays, or may pay now: plain decoding, if it comes again, is looked at soon."""
        self._rounds, self._interval, self._pause, self._least = 0, LOOK_EVERY, LOOK_EVERY, 0
        self._end_look()

    def requests_came(self) -> None:
        """There are new requests, whose drafts may be better: look soon, if looks are cheap."""
        if not self._tries:
            self._pause = min(self._pause, max(self._least, self._rounds + SOON))

    @property
    def rounds_left(self) -> int:
        """Plain rounds that come without a look."""
        return max(0, self._pause - self._rounds - 1)

    @property
    def is_long(self) -> bool:
        """Whether this is no look in every round."""
        return self._pause >= LOOK_EVERY if self._tries == 0 else self._was_long

    @property
    def goes_on(self) -> bool:
        """Whether the look that is to come was begun before."""
        return self._tries > 0

    def waits(self, expects: bool, *, look_s: float) -> bool:
        """Whether the look that is made now is to be taken up again, in the next round if drafters can keep up by now.

        Args: drafts are on their way; seconds of the look since the last call.
        """
        keeps_up = not expects and self._pause == 1
        if self._tries >= MOST_TRIES or not (expects or self._tries) or keeps_up:
            return False
        self._was_long = self.is_long
        self._rounds, self._pause = 0, 1 << self._tries if expects else 1
        self._tries += 1
        self._look_s += look_s
        return True

    def _end_look(self) -> None:
        self._tries, self._look_s, self._was_long = 0, 0.0, False

    def count_round(self) -> bool:
        """A plain round is to come; whether to look in it."""
        self._rounds += 1
        return self._rounds >= self._pause

    def looked(self, *, look_s: float, plain_s: float, requests: int = FEW + 1) -> None:
        """Drafting would not pay in this round.

        Args:
            look_s: seconds of the look since `waits`.
            plain_s: seconds of a plain round.
            requests: with few, it may be another one's turn in the next round.
        """
        self._rounds = 0
        look_s += self._look_s
        self._end_look()
        if requests <= FEW and self._again and look_s <= AGAIN_SHARE * plain_s:
            self._again -= 1
            self._pause = 1
            return
        self._least = min(ceil(look_s / (LOOK_SHARE * plain_s)), MAX_REST)
        self._interval = self._pause = max(min(2 * self._interval, LOOK_AT_LEAST_EVERY), self._least)


class Promises:
    """What drafters elsewhere usually promise.

    A commit that differs from what was drafted leaves a request without drafts for a round or two. To leave its drafter
    then for another, or for plain decoding, looks best for that round alone: it would have had drafts again in the next
    one. So where it promises less than usual, what it usually promises counts. One that has stopped drafting promises
    less in every round, and within 6 * `PROMISED_ROUNDS` what plain steps bring.
    """

    def __init__(self) -> None:
        self._usual: dict[str, tuple[float, float]] = {}
        """By drafter: tokens per request, and plain rounds that they take, on average."""

    def promised(self, drafter: str, *, tokens: float, rounds: float) -> float:
        """In this round so many tokens per request, in as many plain rounds' time; returns how many times as fast as
        plain decoding that usually is. A ratio of averages: quick rounds without drafts weigh less than long ones."""
        mean_tokens, mean_rounds = self._usual.get(drafter, (tokens, rounds))
        mean_tokens += (tokens - mean_tokens) / PROMISED_ROUNDS
        mean_rounds += (rounds - mean_rounds) / PROMISED_ROUNDS
        self._usual[drafter] = mean_tokens, mean_rounds
        return mean_tokens / mean_rounds
