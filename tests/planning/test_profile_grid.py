"""Cells: grids that reach both ends, and the table that gives back what was measured, and predicts what lies between.
Means of a drafter process: stalls and what was seldom seen are left out, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import PlanError
from specactor.planning.profile_grid import Cell, beside, by_requests, cells, cost_table
from specactor.rollout.speculation.costs import CostTable, Grid, Point


def true_s(cell: Cell) -> float:
    if cell.drafter:
        return 1e-5 + 2e-5 * cell.requests * cell.window
    return 1e-3 + 1e-4 * cell.requests + 5e-5 * cell.requests * (1 + cell.window)


@given(st.integers(1, 300), st.integers(1, 16))
def test_grids_reach_both_ends(max_requests: int, max_window: int) -> None:
    found = cells(max_requests=max_requests, max_window=max_window, drafters=["suffix"])
    assert len(set(found)) == len(found)
    for drafter, first in (("", 0), ("suffix", 1)):
        grid = [c for c in found if c.drafter == drafter]
        requests, windows = {c.requests for c in grid}, {c.window for c in grid}
        assert len(grid) == len(requests) * len(windows)
        assert {1, max_requests} <= requests <= set(range(1, max_requests + 1))
        assert {first, max_window} <= windows <= set(range(first, max_window + 1))


@pytest.mark.parametrize(("requests", "window"), [(0, 1), (1, 0)])
def test_nothing_to_measure_is_refused(requests: int, window: int) -> None:
    with pytest.raises(AssertionError):
        cells(max_requests=requests, max_window=window, drafters=[])


def test_the_table_gives_back_medians_and_predicts_what_it_does_not_have() -> None:
    found = cells(max_requests=100, max_window=8, drafters=["suffix", "model"])
    measured = {cell: [9.0, true_s(cell), 1e-9, true_s(cell), 9.0] for cell in found}
    table = cost_table(measured, model="m", device="d", date="today")
    assert set(table.drafters) == {"suffix", "model"}
    for cell in found:
        assert cell.predicted_s(table) == pytest.approx(true_s(cell))
    between = [Cell(requests=n, window=w, drafter=d) for n in (3, 24, 80) for w in (3, 6) for d in ("", "suffix")]
    for cell in between:
        assert cell.predicted_s(table) == pytest.approx(true_s(cell), rel=0.05)


def test_a_cell_without_a_round_is_named() -> None:
    found = cells(max_requests=8, max_window=4, drafters=["suffix"])
    measured = {cell: [1e-3] for cell in found} | {Cell(requests=4, window=2, drafter="suffix"): []}
    with pytest.raises(PlanError, match="drafter suffix with 4 requests and window 2: got no full round"):
        cost_table(measured, model="", device="", date="")


POINTS = [(n, n * w, 1e-3 * (5 + 0.1 * n * w)) for n in (1, 2, 4, 8) for w in (1, 2, 4, 9)]
TABLE = CostTable.fit(POINTS)


def test_means_leave_out_stalls_and_what_was_seldom_seen() -> None:
    turns = [(2, 4, 0.004)] * 9 + [(2, 2, 0.1)] + [(1, 1, 9.0)]
    assert by_requests(turns) == Grid(requests=(2.0,), per_request=(1.0,), seconds=((0.002,),))


def test_nothing_seen_is_an_error() -> None:
    with pytest.raises(PlanError, match="grid"):
        by_requests([])
    with pytest.raises(PlanError, match="grid"):
        beside(TABLE, [], [(1, 2, 0.1)])


def test_what_rounds_take_beside_the_tables_verify_is_a_mean() -> None:
    verify_s = TABLE.verify_s(4, 8)
    drafts: list[Point] = [(4, 4, 0.0005), (4, 8, 0.0015)]
    verifies: list[Point] = [(4, 8, verify_s + 0.001), (4, 8, verify_s + 0.003), (4, 8, 9.0), (4, 4, 9.0)]
    assert beside(TABLE, drafts, verifies[:-1]).at(4, 1.0) == pytest.approx(0.002 + 0.001)
    assert beside(TABLE, drafts, [*verifies, (4, 4, TABLE.verify_s(4, 4) + 0.008)]).at(4, 1.0) == pytest.approx(0.005)
    quick: list[Point] = [(4, 8, verify_s - 0.003)]
    assert beside(TABLE, drafts, quick).at(4, 1.0) == pytest.approx(0.001), "the table was timed on busy cores"
