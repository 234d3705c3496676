"""What mode auto has won and lost against plain decoding, in seconds; it may lose little. PURE: seconds are passed in.

A round that is not plain takes longer than a plain one, and its tokens would have taken plain rounds: the difference is
what it won or lost, whatever the reason (drafts that were wrong, looks, drafters that caught up, costs that were
predicted too low).

Invariants: what was lost is at most what was won before, START plain rounds, TRIAL_SHARE of the seconds of plain
decoding, and the round in which that ran out, of which AT_ONCE plain rounds count at most. What was won long ago does
not pay: at most MOST plain rounds are kept. When nothing is left, decoding is plain until STAKE is there.
"""

from __future__ import annotations

from math import ceil

START = 4.0
"""Plain rounds that may be lost at the start."""
STAKE = 1.0
"""Plain rounds that may be lost when drafting is tried again."""
MOST = 8.0
"""Plain rounds that are kept of what was won."""
AT_ONCE = 4.0
"""Plain rounds that one round loses at most: more is a stall, which says nothing of drafts."""
TRIAL_SHARE = 0.01
"""Of the seconds of plain decoding, what may be lost."""
LOOKS_SHARE = 0.5
"""Of what rounds with drafts have won, what looks in every round may cost."""


class Balance:
    """Of one engine."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        """None: nothing but START."""
        self._spent = False
        self._for_looks_s = 0.0

    def drafted(self, won_s: float, *, plain_s: float) -> None:
        """A round with drafts won so much, or lost if less than 0. `plain_s`: of a plain round."""
        self._add(won_s, plain_s)
        self._for_looks_s = min(max(self._for_looks_s + LOOKS_SHARE * won_s, -MOST * plain_s), MOST * plain_s)

    def looked(self, cost_s: float, *, plain_s: float) -> None:
        """A round without drafts, in which there was a look, took so much longer than a plain one."""
        self._add(-cost_s, plain_s)
        self._for_looks_s = max(self._for_looks_s - cost_s, -MOST * plain_s)

    def promised(self, won_s: float, *, plain_s: float) -> None:
        """Drafts of some tokens ago would have won so much: so may those of the next rounds, if one looks."""
        self._for_looks_s = min(self._for_looks_s + LOOKS_SHARE * won_s, MOST * plain_s)

    def rested(self, round_s: float, *, plain_s: float, after_another: bool) -> None:
        """A plain round took `round_s`. `after_another`: that was not plain, and some of whose work it did."""
        if after_another:
            self._add(plain_s - round_s, plain_s)
        if self._seconds is not None and self._seconds < STAKE * plain_s:
            self._seconds += TRIAL_SHARE * plain_s
            self._spent &= self._seconds < STAKE * plain_s

    def left(self, plain_s: float) -> int:
        """Plain rounds until something may be tried; 0 if it may be now."""
        if not self._spent or self._seconds is None:
            return 0
        return max(1, ceil((STAKE * plain_s - self._seconds) / (TRIAL_SHARE * plain_s)))

    def pays_for(self, look_s: float) -> bool:
        """Whether drafts have won enough for such a look in the next round."""
        return self._for_looks_s > look_s > 0

    def _add(self, seconds: float, plain_s: float) -> None:
        now = START * plain_s if self._seconds is None else self._seconds
        self._seconds = min(now + max(seconds, -AT_ONCE * plain_s), MOST * plain_s)
        self._spent |= self._seconds < 0
