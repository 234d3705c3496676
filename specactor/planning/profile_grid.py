"""Which rounds to measure for a cost table, and the table of what was measured. PURE: seconds in, tables out.

A cell stands for rounds with one number of requests and one window. The table is made of the cells of a grid, medians
of their rounds. Further cells lie between those of the grid; the table does not see them, and how far its predictions
of them are off is its error.

Invariants: a grid begins at one request and ends at the largest number and window; no held-out cell is on a grid; the
table gives back the median of every cell of its grids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median

from specactor.errors import PlanError
from specactor.rollout.speculation.costs import CostTable, Grid


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Rounds in which `requests` requests have `window` draft tokens each."""

    requests: int
    window: int
    """0: a plain step."""
    drafter: str = ""
    """Whose drafts are timed; empty: none's, but the verification."""
    held_out: bool = False
    """Not for the table but for its error."""

    def predicted_s(self, table: CostTable) -> float:
        if self.drafter:
            return table.draft_s(self.drafter, self.requests, self.window)
        if self.window:
            return table.verify_s(self.requests, self.requests * (1 + self.window))
        return table.plain_s(self.requests)


Measured = Mapping[Cell, Sequence[float]]
"""Seconds of every round of a cell."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A held-out cell."""

    cell: Cell
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return abs(self.predicted_s / self.measured_s - 1)


def cells(*, max_requests: int, max_window: int, drafters: Sequence[str]) -> list[Cell]:
    """Of the grids of verification and of every drafter, and those held out."""
    if max_requests < 1 or max_window < 1:
        raise PlanError(f"cells: got {max_requests} requests and window {max_window}, expected at least 1 of each.")
    requests, windows = _doubled(max_requests), _doubled(max_window)
    between, windows_between = _middles(requests)[::-2], _middles(windows) or [max_window]
    found = [Cell(requests=n, window=w) for w, n in product([0, *windows], requests)]
    found += [Cell(requests=n, window=w, held_out=True) for w, n in product([0, *windows_between], between)]
    for name in drafters:
        found += [Cell(requests=n, window=w, drafter=name) for w, n in product(windows, requests)]
        found += [Cell(requests=n, window=w, drafter=name, held_out=True) for w, n in product(windows_between, between)]
    return found


def cost_table(measured: Measured, *, model: str, device: str, date: str) -> CostTable:
    """Raises PlanError for a cell that was not measured."""
    medians = {cell: _median(cell, seconds) for cell, seconds in measured.items() if not cell.held_out}
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


def checks(measured: Measured, table: CostTable) -> list[Check]:
    """Of every held-out cell."""
    return [
        Check(cell=cell, predicted_s=cell.predicted_s(table), measured_s=_median(cell, seconds))
        for cell, seconds in measured.items()
        if cell.held_out
    ]


def _grid(medians: Mapping[Cell, float], *, first: int) -> Grid:
    """`first`: tokens per request beside the window."""
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
    """1, 2, 4, .. and the largest."""
    return sorted({1 << k for k in range(largest.bit_length())} | {largest})


def _middles(axis: Sequence[int]) -> list[int]:
    """Half-way in every interval that has a middle."""
    return [(a + b) // 2 for a, b in pairwise(axis) if b - a > 1]
