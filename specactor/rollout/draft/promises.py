"""What a drafter elsewhere promises on average. PURE.

A commit that differs from what was drafted leaves a request without drafts for a round or two. To leave its drafter
then for one that drafts in the engine, or for plain decoding, looks best for that round alone: that drafter would have
had drafts again in the next one. So where it promises less than usual, what it usually promises counts.

Invariants: only the past is used, this round included; a drafter that promises the same in every round has that as
usual; one that has stopped drafting promises less in every round, and within 6 * `ROUNDS` what plain steps bring.
"""

from __future__ import annotations

ROUNDS = 8
"""Over which promises are averaged."""


class Promises:
    """Of the drafters of one engine."""

    def __init__(self) -> None:
        self._usual: dict[str, tuple[float, float]] = {}
        """By drafter: tokens per request, and plain rounds that they take, on average."""

    def promised(self, drafter: str, *, tokens: float, rounds: float) -> float:
        """In this round so many tokens per request, in as many plain rounds' time; returns how many times as fast as
        plain decoding that usually is. A ratio of averages: quick rounds without drafts weigh less than long ones."""
        mean_tokens, mean_rounds = self._usual.get(drafter, (tokens, rounds))
        mean_tokens += (tokens - mean_tokens) / ROUNDS
        mean_rounds += (rounds - mean_rounds) / ROUNDS
        self._usual[drafter] = mean_tokens, mean_rounds
        return mean_tokens / mean_rounds
