"""Which rounds to measure for a cost table, and the table. PURE.

Invariant: the table gives back every median.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median

from specactor.errors import PlanError
from specactor.rollout.speculation.costs import CostTable, Grid, Point

STALL = 3.0  # times the median, or what a table says, from which on seconds are left out
SEEN = 8  # times, for a mean: of fewer, one stall that is not left out moves it


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Rounds of `requests` requests with `window` draft tokens each."""

    requests: int
    window: int  # 0: a plain step
    drafter: str = ""  # whose drafts are timed; empty: none's, but the verification

    def predicted_s(self, table: CostTable) -> float:
        if self.drafter:
            return table.draft_s(self.drafter, self.requests, self.window)
        if self.window:
            return table.verify_s(self.requests, self.requests * (1 + self.window))
        return table.plain_s(self.requests)


Measured = Mapping[Cell, Sequence[float]]  # seconds of every round of a cell


def cells(*, max_requests: int, max_window: int, drafters: Sequence[str]) -> list[Cell]:
    """Return the grids' cells of verification and every drafter."""
    assert min(max_requests, max_window) >= 1
    requests, windows = _doubled(max_requests), _doubled(max_window)
    found = [Cell(requests=n, window=w) for w, n in product([0, *windows], requests)]
    return found + [Cell(requests=n, window=w, drafter=d) for d, w, n in product(drafters, windows, requests)]


def cost_table(measured: Measured, *, model: str, device: str, date: str) -> CostTable:
    """Make the table. Raises PlanError for an unmeasured cell."""
    medians = {cell: _median(cell, seconds) for cell, seconds in measured.items()}
    verifies = {cell: s for cell, s in medians.items() if not cell.drafter}
    plain = {cell: s for cell, s in verifies.items() if not cell.window}
    drafters = sorted({cell.drafter for cell in medians if cell.drafter})
    return CostTable(
        model=model,
        device=device,
        date=date,
        verify=_grid(verifies, first=1),
        plain=_grid(plain, first=1),
        drafters={
            name: _grid({cell: s for cell, s in medians.items() if cell.drafter == name}, first=0) for name in drafters
        },
    )


def _grid(medians: Mapping[Cell, float], *, first: int) -> Grid:
    """Return the medians as a grid; `first` counts tokens per request beside the window."""
    requests = sorted({cell.requests for cell in medians})
    windows = sorted({cell.window for cell in medians})
    seconds = {(cell.requests, cell.window): s for cell, s in medians.items()}
    return Grid(
        requests=tuple(map(float, requests)),
        per_request=tuple(float(window + first) for window in windows),
        seconds=tuple(tuple(seconds[n, w] for w in windows) for n in requests),
    )


def _median(cell: Cell, seconds: Sequence[float]) -> float:
    if not seconds:
        who = f"drafter {cell.drafter} with " if cell.drafter else ""
        raise PlanError(
            f"profile: {who}{cell.requests} requests and window {cell.window}: got no full round, expected several. "
            "Lower rollout.engine.max_running_requests, or leave the drafter out."
        )
    return median(seconds)


def _doubled(largest: int) -> list[int]:
    return sorted({1 << k for k in range(largest.bit_length())} | {largest})


def by_requests(points: Iterable[Point]) -> Grid:
    """Return mean, not median, seconds of a token, since all is paid for, without stalls and rare numbers. Raises
    PlanError without points."""
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
    """Return what rounds take beside the table's verify: before it, and longer than it."""
    longer: dict[int, list[float]] = {}
    for n, rows, seconds in verifies:
        if seconds <= STALL * (expected := table.verify_s(n, rows)):
            longer.setdefault(n, []).append(seconds - expected)
    found: dict[float, float] = {}
    for n in {n for n, _, _ in drafts}:
        before_s = fmean(s for size, _, s in drafts if size == n)
        found[n] = before_s + max(0.0, fmean(longer.get(n) or [0.0]))
    return column(found)


def column(seconds: Mapping[float, float]) -> Grid:
    axis = sorted(seconds)
    return Grid(requests=tuple(map(float, axis)), per_request=(1.0,), seconds=tuple((seconds[n],) for n in axis))
