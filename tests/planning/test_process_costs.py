"""Means of a drafter process: stalls and what was seldom seen are left out, and nothing else is."""

from __future__ import annotations

import pytest

from specactor.errors import PlanError
from specactor.planning.process_costs import beside, by_requests, without_waits
from specactor.rollout.speculation.costs import CostTable, Grid, Point

POINTS = [(n, n * w, 1e-3 * (5 + 0.1 * n * w)) for n in (1, 2, 4, 8) for w in (1, 2, 4, 9)]
TABLE = CostTable.fit(POINTS)


def test_means_leave_out_stalls_and_what_was_seldom_seen() -> None:
    turns = [(2, 4, 0.004)] * 9 + [(2, 2, 0.1)] + [(1, 1, 9.0)]
    assert by_requests(turns) == Grid(requests=(2.0,), per_request=(1.0,), seconds=((0.002,),))


def test_waits_are_no_costs() -> None:
    assert without_waits([(1, 4, 0.003), (2, 4, 0.001)], 0.001) == [
        (1, 4, pytest.approx(0.00225)),
        (2, 4, pytest.approx(0.00075)),
    ]
    assert without_waits([(1, 4, 0.003)], 0.004) == [(1, 4, 0.003)], "others waited, too"
    assert without_waits([], 0.1) == []


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
