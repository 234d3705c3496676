"""Counts and seconds of what speculation did. PURE.

Invariants: emitted = accepted + verifies; accepted <= drafted, at every position; adding is exact, in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from specactor.config import MAX_WINDOW


class Counts(msgspec.Struct, kw_only=True):
    rounds: int = 0
    speculative_rounds: int = 0  # rounds with any draft token
    verifies: int = 0  # requests, summed over speculative rounds
    emitted: int = 0  # tokens of speculative rounds
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_WINDOW)
    """Tokens drafted, by position in the draft."""
    accepted_at: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_WINDOW)
    draft_s: float = 0.0  # with the choice of what to verify, and with drafts that were not verified
    verify_s: float = 0.0  # the rest of the rounds
    predicted_s: float = 0.0
    measured_s: float = 0.0  # both are of the rounds for which a time was predicted
    failures: int = 0  # calls in which a drafter raised, or returned the wrong number of drafts
    cut_drafts: int = 0  # drafts that were too long, or had what is no token; they are verified up to there
    problems: list[str] = msgspec.field(default_factory=list)  # what was wrong with a drafter; each once
    rested: int = 0  # rounds on the engine's plain path
    switches: int = 0  # requests that came to this drafter from another, which had a draft, too
    figures: dict[str, float] = msgspec.field(default_factory=dict)
    """What the drafter counts itself, by the names of `metrics.SPECULATION`."""

    @property
    def wasted(self) -> int:
        return self.drafted - self.accepted

    def round(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        *,
        verify_s: float,
        draft_s: float,
        predicted_s: float = 0.0,
    ) -> None:
        """Count a round that this drafter leads; `predicted_s` 0: not predicted."""
        self.rounds += 1
        self.draft_s += draft_s
        self.verify_s += verify_s
        if predicted_s > 0:
            self.predicted_s += predicted_s
            self.measured_s += verify_s + draft_s
        if not any(drafted):
            return
        self.speculative_rounds += 1
        self.verifies += len(drafted)
        self.emitted += len(accepted) + sum(accepted)
        self.drafted += sum(drafted)
        self.accepted += sum(accepted)
        _add_at(self.drafted_at, drafted)
        _add_at(self.accepted_at, accepted)

    def beside(self, first: int, drafted: int, accepted: int, *, is_first: bool = False) -> None:
        """Count a request's draft tokens from position `first` on, in another drafter's round. `is_first`: nobody
        drafted for it before."""
        self.verifies += is_first
        self.emitted += accepted + is_first
        self.drafted += drafted
        self.accepted += accepted
        for position in range(first, first + drafted):
            self.drafted_at[position] += 1
        for position in range(first, first + accepted):
            self.accepted_at[position] += 1

    def __add__(self, other: Counts) -> Counts:
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        summed = {
            name: [a + b for a, b in zip(value, theirs[name], strict=True)]
            if isinstance(value, list)
            else value + theirs[name]
            for name, value in mine.items()
            if name not in ("problems", "figures")
        }
        names = sorted({*self.figures, *other.figures})
        summed["figures"] = {name: self.figures.get(name, 0.0) + other.figures.get(name, 0.0) for name in names}
        summed["problems"] = sorted({*self.problems, *other.problems})
        return msgspec.convert(summed, Counts)


def _add_at(positions: list[int], lengths: Sequence[int]) -> None:
    for length, requests in Counter(lengths).items():
        for position in range(length):
            positions[position] += requests


def added(parts: Iterable[Mapping[str, Counts]]) -> dict[str, Counts]:
    sums: dict[str, Counts] = {}
    for part in parts:
        for name, counts in part.items():
            sums[name] = sums.get(name, Counts()) + counts
    return sums
