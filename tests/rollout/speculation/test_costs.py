"""Tables give back what was measured, never fall beyond it, and find a known cost from few points."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import PlanError
from specactor.rollout.speculation.costs import MAX_NODES, METHOD, MIN_ROUNDS, Correction, CostTable, Grid, ProcessCosts

AXES = st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True).map(lambda xs: tuple(map(float, sorted(xs))))
SECONDS = st.floats(1e-4, 1.0)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    requests, per_request = draw(AXES), draw(AXES)
    row = st.lists(SECONDS, min_size=len(per_request), max_size=len(per_request)).map(tuple)
    rows = draw(st.lists(row, min_size=len(requests), max_size=len(requests)))
    return Grid(requests=requests, per_request=per_request, seconds=tuple(rows))


def grid_of(requests: tuple[float, ...], per_request: tuple[float, ...], *rows: tuple[float, ...]) -> Grid:
    return Grid(requests=requests, per_request=per_request, seconds=rows)


TABLE = CostTable(
    model="tiny",
    device="cpu",
    date="2026-01-01",
    verify=grid_of((1, 4), (1, 2, 8), (0.010, 0.030, 0.036), (0.013, 0.034, 0.058)),
    plain=grid_of((1, 4), (1,), (0.009,), (0.012,)),
    drafters={"suffix": grid_of((1, 4), (1, 8), (0.001, 0.002), (0.001, 0.004))},
)
PROCESS = ProcessCosts(
    token_s=grid_of((1, 3), (1,), (0.002,), (0.003,)), ahead_s=grid_of((1, 4), (1,), (1e-4,), (3e-4,))
)


@given(grids(), st.floats(0.5, 100), st.lists(st.floats(0.1, 100), min_size=1, max_size=8))
def test_many_at_once_are_as_one_by_one(grid: Grid, requests: float, per_request: list[float]) -> None:
    points = [*per_request, *grid.per_request]
    for n in (requests, *grid.requests):
        assert grid.along(n, np.array(points)).tolist() == [grid.at(n, k) for k in points]


def test_a_curve_of_a_table_needs_a_token_for_each_request() -> None:
    assert TABLE.verify_curve(2, 12).tolist() == [TABLE.verify_s(2, rows) for rows in range(2, 13)]
    for wrong in ((0, 0), (3, 2)):
        with pytest.raises(AssertionError):
            TABLE.verify_curve(*wrong)


@given(grids())
def test_a_grid_gives_back_its_points_exactly(grid: Grid) -> None:
    for n, row in zip(grid.requests, grid.seconds, strict=True):
        assert tuple(grid.at(n, k) for k in grid.per_request) == row


@given(grids(), st.floats(0.1, 100), st.floats(0.1, 100))
def test_inside_it_stays_within_its_neighbours(grid: Grid, n: float, k: float) -> None:
    cells = [x for row in grid.seconds for x in row]
    if n <= grid.requests[-1] and k <= grid.per_request[-1]:
        assert min(cells) - 1e-12 <= grid.at(n, k) <= max(cells) + 1e-12
    assert grid.at(n, k) > 0


@given(grids(), *[st.floats(0, 50)] * 4)
def test_beyond_its_last_points_it_never_falls(grid: Grid, n: float, k: float, dn: float, dk: float) -> None:
    """Along either axis from its last node on, wherever the other coordinate is beyond its own last one or inside."""
    last_n, last_k = grid.requests[-1], grid.per_request[-1]
    corner = grid.at(last_n + n, last_k + k)
    assert grid.at(last_n + n + dn, last_k + k) >= corner - 1e-9
    assert grid.at(last_n + n, last_k + k + dk) >= corner - 1e-9
    assert grid.at(last_n + n + dn, k) >= grid.at(last_n + n, k) - 1e-9
    assert grid.at(n, last_k + k + dk) >= grid.at(n, last_k + k) - 1e-9


def test_interpolation_by_hand() -> None:
    grid = grid_of((1, 3), (1, 2), (1.0, 2.0), (3.0, 8.0))
    assert grid.at(2, 1) == 2
    assert grid.at(1, 1.5) == 1.5
    assert grid.at(2, 1.5) == pytest.approx((1 + 2 + 3 + 8) / 4)
    assert grid.at(1, 4) == pytest.approx(4), "last slope"
    assert grid.at(5, 1) == pytest.approx(5)
    assert grid.at(5, 3) == pytest.approx(13 + (13 - 3)), "bilinear goes on"
    assert grid.at(0.5, 0.5) == 1, "constant below the first points"
    falling = grid_of((1, 2), (1, 2), (5.0, 4.0), (3.0, 2.0))
    assert falling.at(9, 9) == 2
    closing = grid_of((1, 2), (1, 2), (1.0, 2.0), (5.0, 3.0))
    assert closing.at(4, 3) >= closing.at(4, 2) == 5, "rows that come closer would make a fall beyond both axes"


@given(st.integers(1, 8), st.integers(0, 40))
def test_a_bilinear_cost_is_found_everywhere(requests: int, more: int) -> None:
    def cost(n: float, k: float) -> float:
        return 0.003 + 0.0002 * n + 0.0001 * n * k

    nodes = (1.0, 2.0, 4.0)
    grid = grid_of(nodes, nodes, *(tuple(cost(n, k) for k in nodes) for n in nodes))
    table = replace(TABLE, verify=grid)
    tokens = requests + more
    assert table.verify_s(requests, tokens) == pytest.approx(cost(requests, tokens / requests))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": (2.0, 1.0)}, "grid.requests: got"),
        ({"requests": (1.0, 1.0)}, "grid.requests: got"),
        ({"per_request": (0.0, 1.0)}, "grid.per_request: got"),
        ({"per_request": ()}, "grid.per_request: got"),
        ({"requests": (1.0, float("inf"))}, "grid.requests: got"),
        ({"seconds": ((1.0, 2.0),)}, "expected 2 of 2"),
        ({"seconds": ((1.0, 2.0), (1.0,))}, "expected 2 of 2"),
        ({"seconds": ((1.0, 2.0), (1.0, 0.0))}, "got 0.0, expected positive seconds"),
        ({"seconds": ((1.0, 2.0), (1.0, float("nan")))}, "expected positive seconds"),
    ],
)
def test_grids_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    good = grid_of((1, 2), (1, 2), (1.0, 2.0), (2.0, 3.0))
    with pytest.raises(PlanError, match=message):
        replace(good, **change)  # type: ignore[arg-type]


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_table_answers_in_rounds() -> None:
    assert TABLE.verify_s(1, 2) == 0.030
    assert TABLE.verify_s(4, 4) == 0.013
    assert TABLE.verify_s(4, 6) == pytest.approx((0.013 + 0.034) / 2), "ragged rounds have fractions"
    assert TABLE.plain_s(4) == 0.012
    assert TABLE.draft_s("suffix", 4, 8) == 0.004
    assert TABLE.draft_s("suffix", 4, 0) == 0
    with pytest.raises(PlanError, match=r"got drafter 'eagle', expected one of \['suffix'\]"):
        TABLE.draft_s("eagle", 1, 1)
    with pytest.raises(AssertionError):
        TABLE.verify_s(4, 3)
    with pytest.raises(AssertionError):
        TABLE.plain_s(0)
    with pytest.raises(AssertionError):
        TABLE.draft_s("suffix", 1, -1)


@given(
    grids(),
    grids(),
    st.dictionaries(st.text(max_size=5), grids(), max_size=2),
    st.none() | st.builds(ProcessCosts, token_s=grids(), ahead_s=grids()),
)
def test_json_there_and_back(
    verify: Grid, plain: Grid, drafters: dict[str, Grid], process: ProcessCosts | None
) -> None:
    table = replace(TABLE, verify=verify, plain=plain, drafters=drafters, process=process)
    assert CostTable.from_json(table.to_json()) == table
    assert CostTable.from_json(table.to_json().encode()) == table


def test_a_file_without_drafter_processes_can_be_read() -> None:
    """As they were before such processes were measured."""
    text = TABLE.to_json().replace(',\n  "process": null', "")
    assert "process" not in text
    assert CostTable.from_json(text) == TABLE


def test_methods_of_a_table() -> None:
    both = replace(TABLE, process=PROCESS)
    assert (TABLE.methods, both.methods) == (("suffix",), ("suffix", METHOD))
    assert both.only([METHOD]) == replace(both, drafters={})
    assert both.only(["suffix"]) == TABLE


def test_a_file_that_is_no_table_is_refused() -> None:
    text = TABLE.to_json()
    with pytest.raises(PlanError, match="got version 2, expected 1"):
        CostTable.from_json(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(PlanError, match="got version 0"):
        CostTable.from_json('{"version": 0}')
    with pytest.raises(PlanError, match="missing required field"):
        CostTable.from_json('{"version": 1}')
    with pytest.raises(PlanError, match="cost table: "):
        CostTable.from_json(text[:-9])
    with pytest.raises(PlanError, match="positive seconds"):
        CostTable.from_json(text.replace("0.009", "-0.009"))


# --- fits -------------------------------------------------------------------------------------------------------------

COEFFICIENTS = st.tuples(st.floats(1e-4, 1e-2), st.floats(0, 1e-3), st.floats(1e-6, 1e-3))


@given(COEFFICIENTS, st.lists(st.tuples(st.integers(1, 64), st.integers(0, 8)), min_size=8, max_size=60))
def test_a_fit_of_a_linear_cost_is_that_cost(c: tuple[float, float, float], rounds: list[tuple[int, int]]) -> None:
    """Rank-deficient sets of rounds and more different ones than an axis has nodes are among them."""
    rounds = [*rounds, (1, 0), (2, 3), (7, 1), (7, 5)]

    def cost(n: float, tokens: float) -> float:
        return c[0] + c[1] * n + c[2] * tokens

    table = CostTable.fit([(n, n * (1 + w), cost(n, n * (1 + w))) for n, w in rounds])
    for n, w in rounds:
        assert table.verify_s(n, n * (1 + w)) == pytest.approx(cost(n, n * (1 + w)), rel=1e-5)
        assert table.plain_s(n) == pytest.approx(cost(n, n), rel=1e-5)


def test_a_fit_keeps_measured_cells_and_fills_the_others() -> None:
    jump = [(1, 1, 0.003), (1, 2, 0.009), (1, 4, 0.010), (8, 8, 0.009), (8, 32, 0.017)]
    stalled = [(1, 2, 0.5), (1, 2, 0.0091), (1, 2, 0.0089), (1, 2, 0.009)]
    table = CostTable.fit(jump + stalled)
    for n, tokens, seconds in jump:
        assert table.verify_s(n, tokens) == pytest.approx(seconds), "the median, not the mean, of the cell"
    assert table.verify.requests == (1, 8)
    assert table.verify.per_request == (1, 2, 4)
    assert 0.001 < table.verify_s(8, 16) < 0.5, "never measured"
    assert table.plain_s(1) == pytest.approx(0.003), "taken from the verify of one token"


def test_a_fit_takes_plain_steps_and_drafters_as_given() -> None:
    points = [(1, 1, 0.01), (1, 4, 0.02), (4, 4, 0.02)]
    table = CostTable.fit(
        points,
        plain=[(1, 1, 0.005), (4, 4, 0.006)],
        drafters={"suffix": [(1, 1, 1e-4), (4, 16, 4e-4)]},
    )
    assert table.plain_s(4) == pytest.approx(0.006)
    assert table.draft_s("suffix", 4, 4) == pytest.approx(4e-4)
    assert CostTable.from_json(table.to_json()) == table


def test_a_fit_of_ragged_rounds_stays_small() -> None:
    rounds = [(n, n + extra, 0.002 + 1e-4 * n + 1e-4 * (n + extra)) for n in range(1, 65) for extra in (0, n // 2, n)]
    table = CostTable.fit(rounds)
    assert len(table.verify.requests) <= MAX_NODES
    assert len(table.verify.per_request) <= MAX_NODES
    assert table.verify.requests[:3] == (1, 2, 3), "where one request more changes most"
    assert table.verify.requests[-1] == 64
    for n, tokens, seconds in rounds:
        assert table.verify_s(n, tokens) == pytest.approx(seconds, rel=1e-4)


def test_plain_steps_of_one_number_of_requests_are_a_share_of_verifies_of_others_too() -> None:
    points = [(n, n * k, 1e-3 * n * k) for n in (4, 8) for k in (1, 2, 4)]
    table = CostTable.fit(points, plain=[(4, 4, table_s := 0.5 * 4e-3)] * 3)
    assert table.plain_s(4) == pytest.approx(table_s)
    assert table.plain_s(8) == pytest.approx(0.5 * table.verify_s(8, 8))


def test_a_fit_never_makes_more_work_cheaper() -> None:
    """Noise that falls with work has a negative least-squares slope; the model's terms are not negative."""
    table = CostTable.fit([(4, 4, 0.020), (4, 8, 0.018), (4, 16, 0.015)])
    assert table.verify_s(1, 1) <= table.verify_s(1, 9) + 1e-12
    assert table.verify_s(1, 1) > 0


@pytest.mark.parametrize("points", [[], [(2, 4, 0.1)], [(2, 4, 0.1), (2, 4, 0.2)]])
def test_a_fit_needs_two_different_rounds(points: list[tuple[int, int, float]]) -> None:
    with pytest.raises(PlanError, match="expected at least 2"):
        CostTable.fit(points)


@pytest.mark.parametrize("point", [(0, 1, 0.1), (1, 0, 0.1), (1, 1, 0.0), (1, 1, float("nan"))])
def test_a_fit_refuses_points_that_cannot_be(point: tuple[int, int, float]) -> None:
    with pytest.raises(PlanError, match="fit: got the point"):
        CostTable.fit([(1, 2, 0.1), (1, 4, 0.1), point])


# --- the correction ---------------------------------------------------------------------------------------------------


def corrected(ratios: list[float]) -> float:
    correction = Correction()
    for ratio in ratios:
        correction.observe("suffix", predicted_s=0.004, measured_s=0.004 * ratio)
    return correction.factor("suffix")


@given(st.lists(st.floats(1e-3, 1e3), max_size=60))
def test_a_correction_is_bounded(ratios: list[float]) -> None:
    assert 0.25 <= corrected(ratios) <= 4
    if len(ratios) < MIN_ROUNDS:
        assert corrected(ratios) == 1


def test_a_correction_follows_what_is_measured_but_no_stall() -> None:
    assert corrected([1.5] * 20) == pytest.approx(1.5)
    assert corrected(([1.5] * 4 + [80.0]) * 6) == pytest.approx(1.5)
    assert corrected([1.0] * 100 + [2.0] * 20) == pytest.approx(2.0), "the last rounds count"
    assert corrected([100.0] * 20) == 4
    assert corrected([0.01] * 20) == 0.25


def test_kinds_of_rounds_are_corrected_apart() -> None:
    correction = Correction()
    for _ in range(10):
        correction.observe("off", predicted_s=1.0, measured_s=2.0)
    assert correction.factor("off") == 2
    assert correction.factor("suffix") == 1
    with pytest.raises(AssertionError):
        correction.observe("off", predicted_s=1.0, measured_s=0.0)
