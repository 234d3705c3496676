"""What speculation did, in counts and seconds. PURE.

Invariants: emitted = accepted + verifies; accepted <= drafted, at every position; adding is exact, so counts of
engines, ranks, steps and drafters can be summed in any order.

Where several drafters' tokens are verified in one round, the round is that of the drafter that leads it. A request's
verify and bonus token are those of the first that drafted for it, or of who leads, if nobody did. Every draft token is
its drafter's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from specactor.config import MAX_WINDOW

PRIOR_DRAFTS = 64
"""Drafts that a belief about their acceptance is worth, when a step's own are counted."""


class Counts(msgspec.Struct, kw_only=True):
    """What happened since the last report. Sums of several engines' counts are again counts."""

    rounds: int = 0
    """Verification rounds."""
    speculative_rounds: int = 0
    """Those of them that had any draft token."""
    verifies: int = 0
    """Requests that took part in a speculative round, summed over rounds."""
    emitted: int = 0
    """Tokens that those emitted, in those rounds."""
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_WINDOW)
    """Per position in the draft, how often a token was drafted there."""
    accepted_at: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_WINDOW)
    draft_s: float = 0.0
    """With the choice of what to verify; also of drafts that were then not verified."""
    verify_s: float = 0.0
    """The rest of the rounds: forward pass, sampling, the engine's own scheduling."""
    predicted_s: float = 0.0
    measured_s: float = 0.0
    """Of the rounds for which a time was predicted: that prediction, and what they took."""
    failures: int = 0
    """Times that a drafter raised, or returned other than one draft per request."""
    cut_drafts: int = 0
    """Drafts of more tokens than were asked for, or with what is no token: as much of them as can be is verified."""
    problems: list[str] = msgspec.field(default_factory=list)
    """What was wrong with a drafter, with its class; each is told once."""
    rested: int = 0
    """Of the rounds, those that were known to be plain before they began, and took the engine's plain path."""
    switches: int = 0
    """Requests that came to this drafter from another, which had a draft, too."""

    @property
    def wasted(self) -> int:
        return self.drafted - self.accepted

    def acceptance(self, believed: float) -> float:
        """P(the first token of a draft is accepted), by these and `PRIOR_DRAFTS` of what was believed before."""
        accepted = self.accepted_at[0] + PRIOR_DRAFTS * believed
        return accepted / (self.drafted_at[0] + PRIOR_DRAFTS)

    def round(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        *,
        verify_s: float,
        draft_s: float,
        predicted_s: float = 0.0,
    ) -> None:
        """One round; counts per request that this drafter drafts for first. `predicted_s` is 0 where nothing was
        predicted."""
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
        """Draft tokens, of one request, from position `first` on, in a round that another drafter leads. `is_first`:
        nobody drafted for this request before."""
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
            if name != "problems"
        } | {"problems": sorted({*self.problems, *other.problems})}
        return msgspec.convert(summed, Counts)


Figures = dict[str, dict[str, float]]
"""What drafters count themselves: per drafter, by the names of `metrics.SPECULATION`."""


def _add_at(positions: list[int], lengths: Sequence[int]) -> None:
    """Adds the tokens of all requests, `lengths` of each, at their positions."""
    for length, requests in Counter(lengths).items():
        for position in range(length):
            positions[position] += requests


def added(parts: Iterable[Mapping[str, Counts]]) -> dict[str, Counts]:
    sums: dict[str, Counts] = {}
    for part in parts:
        for name, counts in part.items():
            sums[name] = sums.get(name, Counts()) + counts
    return sums


def added_figures(parts: Iterable[Figures]) -> Figures:
    sums: Figures = {}
    for part in parts:
        for drafter, figures in part.items():
            own = sums.setdefault(drafter, {})
            for name, value in figures.items():
                own[name] = own.get(name, 0.0) + value
    return sums
