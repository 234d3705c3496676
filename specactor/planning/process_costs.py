"""What a drafter process costs, from turns and rounds that were timed. PURE: seconds in, grids over (requests, 1) out.

Means and not medians: what happens now and then is paid for, too. Only stalls are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

from specactor.rollout.speculation.costs import CostTable, Grid, Point

STALL = 3.0
"""Times the median, or what a table says, from which on seconds are left out."""
SEEN = 8
"""Times, for a mean."""


def by_requests(points: Iterable[Point]) -> Grid:
    """Mean seconds, of one token each if there are several, by the number of requests; without stalls, and without
    numbers that were seen too seldom. Raises PlanError without any point."""
    each: dict[int, list[float]] = {}
    for requests, total, seconds in points:
        each.setdefault(requests, []).append(seconds / max(1.0, total / requests))
    most = max(map(len, each.values()), default=0)
    return column(
        {
            n: fmean([s for s in found if s <= STALL * median(found)])
            for n, found in each.items()
            if len(found) >= min(SEEN, most)
        }
    )


def beside(table: CostTable, drafts: Sequence[Point], verifies: Iterable[Point]) -> Grid:
    """What rounds take on average beside the table's verify, which is a median and knows nothing of other processes on
    the cores: what came before the verify (`drafts`), and what the verify took longer. By the requests of `drafts`.
    """
    longer: dict[int, list[float]] = {}
    for n, rows, seconds in verifies:
        if seconds <= STALL * (expected := table.verify_s(n, rows)):
            longer.setdefault(n, []).append(seconds - expected)
    found: dict[float, float] = {}
    for n in {n for n, _, _ in drafts}:
        before_s = fmean(s for size, _, s in drafts if size == n)
        found[n] = before_s + max(0.0, fmean(longer.get(n) or [0.0]))
    return column(found)


def without_waits(drafts: Sequence[Point], waited_s: float) -> list[Point]:
    """Of `drafts`, which include that much. An engine waits for drafts where that pays; a planner in whose rounds
    nobody waits would count it as a loss."""
    total_s = sum(seconds for *_, seconds in drafts)
    share = 1.0 - waited_s / total_s if total_s > waited_s else 1.0
    return [(n, total, share * seconds) for n, total, seconds in drafts]


def column(seconds: Mapping[float, float]) -> Grid:
    """By the number of requests."""
    axis = sorted(seconds)
    return Grid(requests=tuple(map(float, axis)), per_request=(1.0,), seconds=tuple((seconds[n],) for n in axis))
