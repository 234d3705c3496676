"""How long a round may wait for drafts that have not arrived. PURE: seconds are passed in.

A commit that differs from what was drafted leaves a request without draft tokens until its drafter has answered. To
wait for that costs all requests; it pays where the rounds are long, the answers fast and the drafts good. With R
seconds of a round, E tokens that it emits as things are, M requests without a draft, P(x) the share of answers that
take at most x, and a first draft token that is right with probability p, the emitted tokens per second are

    (E + P(x) M p) / (R + x)

and the best x is looked for among the answers' own times. It is 0 unless the gain is `MIN_GAIN` or more.

Invariants: only the past is used; 0 while fewer than `MIN_SAMPLES` rounds, answers or drafts were seen; never more than
`MAX_WAIT_S`; promises that were not kept make it shorter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

MIN_GAIN = 1.05
MIN_SAMPLES = 16
MAX_SAMPLES = 64
MAX_WAIT_S = 0.05
LINK_S = 2e-4
"""From a commit to the drafter and from its answer to here."""
_MEMORY = 0.98
"""Weight of what was, per round."""
_FORGIVENESS = 1.002
"""Per round without a wait: trust grows again."""


class Patience:
    """Of one engine."""

    def __init__(self) -> None:
        self._rounds_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._answers_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._served = 0.0
        self._first_right = 0.0
        self._accepted = 0.0
        self._trust = 1.0

    def rounds(self, round_s: float) -> None:
        """Seconds of a round that was drafted for, waits left out."""
        self._rounds_s.append(round_s)

    def answers(self, answers_s: Iterable[float]) -> None:
        """Seconds that drafters took from a commit to their first draft token after it."""
        self._answers_s.extend(answers_s)

    def judged(self, right: Sequence[int]) -> None:
        """Per draft: how many of its tokens, from the first on, were right."""
        served = len(right)
        if served:
            self._served = _MEMORY * self._served + served
            self._first_right = _MEMORY * self._first_right + served - right.count(0)
            self._accepted = _MEMORY * self._accepted + sum(right)

    def kept(self, expected: float, arrived: int) -> None:
        """After a wait: drafts that were to arrive in it, and those that did."""
        self._trust += 0.1 * (min(1.0, arrived / max(expected, 1e-9)) - self._trust)

    def bound(self, requests: int, missing: int) -> tuple[float, float]:
        """Seconds to wait at most, and drafts that should arrive in them. Args: of this round."""
        self._trust = min(1.0, _FORGIVENESS * self._trust)
        enough = min(len(self._rounds_s), len(self._answers_s), self._served) >= MIN_SAMPLES
        if not missing or not enough:
            return 0.0, 0.0
        gain = self._first_right / self._served
        emitted = requests + (requests - missing) * self._accepted / self._served
        if emitted + self._trust * missing * gain <= MIN_GAIN * emitted:
            return 0.0, 0.0  # not even if all answers took no time
        round_s, answers_s = median(self._rounds_s), sorted(self._answers_s)
        best, best_speed = (0.0, 0.0), MIN_GAIN * emitted / round_s
        for count, answer_s in enumerate(answers_s, 1):
            wait_s = answer_s + LINK_S
            if wait_s > MAX_WAIT_S:
                break
            arriving = self._trust * missing * count / len(answers_s)
            speed = (emitted + arriving * gain) / (round_s + wait_s)
            if speed > best_speed:
                best, best_speed = (wait_s, arriving), speed
        return best
