"""What a drafter's batches take, by their number of lanes. PURE: seconds are passed in.

Lanes that someone waits for can be drafted for alone, or with those that are far enough ahead. Together costs those
that wait the time of the others; alone makes more batches, each with its own fixed cost, and leaves less ahead. So they
go alone only where that takes less than half of the time: with less to win, equal requests of one engine lose.

Invariants: of batches of about equal sizes (within a power of two) the median counts, so that one in which a prompt was
read says nothing; what was not measured is taken to be equal.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MAX_SAMPLES = 15
"""Of batches of about equal sizes, the latest."""
MIN_SAMPLES = 3
MUCH = 2.0
"""A batch that takes more than so many times as long takes much longer."""


class Pace:
    """Of one drafter process."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def batch(self, lanes: int, seconds: float) -> None:
        """One was drafted."""
        self._seconds.setdefault(lanes.bit_length(), deque(maxlen=MAX_SAMPLES)).append(seconds)

    def is_slower(self, few: int, many: int) -> bool:
        """Whether a batch of many lanes takes much longer than one of few."""
        first, last = few.bit_length(), many.bit_length()
        if first == last or len(self._seconds.get(last, ())) < MIN_SAMPLES:
            return False
        known = [of for size, of in self._seconds.items() if first <= size < last and len(of) >= MIN_SAMPLES]
        return any(median(self._seconds[last]) > MUCH * median(of) for of in known)
