"""Costs that are learned while an engine runs: right after a few rounds, bounded; a given table is only corrected."""

from __future__ import annotations

import pytest

from specactor.rollout.speculation.costs import FIRST_FIT, MAX_POINTS, CostTable, OnlineCosts
from specactor.rollout.speculation.windows import OFF


def true_s(requests: int, rows: int) -> float:
    return 1e-3 + 1e-4 * requests + 5e-5 * rows


def play(costs: OnlineCosts, rounds: int, *, requests: int = 4, slower: float = 1.0) -> None:
    """Rounds with the windows that are wanted, or 3."""
    for _ in range(rounds):
        window = costs.wanted(8) if costs.table is None else 3
        rows = requests * (1 + window)
        predicted = costs.table.verify_s(requests, rows) if costs.table else 0.0
        costs.observe(
            "suffix" if window else OFF,
            requests=requests,
            rows=rows,
            depth=window,
            verify_s=slower * true_s(requests, rows),
            draft_s=0.0,
            predicted_s=predicted,
        )


def test_a_table_is_there_after_a_few_different_rounds_and_is_right() -> None:
    costs = OnlineCosts()
    with pytest.raises(AssertionError, match="until there is a table"):
        costs.plain_s(1)
    play(costs, FIRST_FIT)
    assert costs.table is not None
    for rows in (4, 8, 12, 20):
        assert costs.table.verify_s(4, rows) == pytest.approx(true_s(4, rows), rel=0.05)
    assert costs.plain_s(4) == pytest.approx(true_s(4, 4), rel=0.05)


def test_a_curve_is_what_its_points_are() -> None:
    costs = OnlineCosts()
    with pytest.raises(AssertionError, match="until there is a table"):
        costs.verify_curve(1, 1)
    for slower in (1.0, 3.0):  # fitted again: no old curve is kept
        play(costs, 4 * FIRST_FIT, slower=slower)
        assert costs.table is not None
        points = [costs.table.verify_s(3, rows) for rows in range(3, 28)]
        assert costs.verify_curve(3, 27).tolist() == pytest.approx(points)


def test_windows_to_try_differ_and_stay_within_the_largest() -> None:
    costs = OnlineCosts()
    tried = set()
    for _ in range(FIRST_FIT):
        tried.add(costs.wanted(2))
        play(costs, 1)
    assert tried == {0, 1, 2}


def test_rounds_that_are_all_alike_give_no_table() -> None:
    costs = OnlineCosts()
    for _ in range(50):
        costs.observe(OFF, requests=4, rows=4, depth=0, verify_s=1e-3, draft_s=0.0, predicted_s=0.0)
    assert costs.table is None


def test_memory_is_bounded() -> None:
    costs = OnlineCosts()
    play(costs, 3 * MAX_POINTS)
    assert len(costs.verifies) == MAX_POINTS


def test_a_given_table_is_corrected_and_never_replaced() -> None:
    table = CostTable.fit([(n, n * k, true_s(n, n * k)) for n in (1, 4, 16) for k in (1, 2, 4, 8)])
    costs = OnlineCosts(table)
    play(costs, 100, slower=2.0)
    assert costs.table is table
    assert costs.correction.factor("suffix") == pytest.approx(2.0, rel=0.05)


def test_a_drafter_that_was_not_measured_costs_nothing_yet() -> None:
    costs = OnlineCosts()
    play(costs, FIRST_FIT)
    assert costs.draft_s("suffix", 4)(8) == 0.0


def test_a_drafter_whose_rounds_were_alike_costs_what_they_did() -> None:
    costs = OnlineCosts()
    for _ in range(2 * FIRST_FIT):
        window = costs.wanted(8)
        rows = 1 + window
        costs.observe(
            "model" if window else OFF,
            requests=1,
            rows=rows,
            depth=8 if window else 0,
            verify_s=true_s(1, rows),
            draft_s=0.016 if window else 0.0,
            predicted_s=0.0,
        )
    assert costs.table is not None
    assert "model" not in costs.table.drafters
    assert [costs.draft_s("model", 1)(depth) for depth in (0, 4, 8)] == pytest.approx([0.0, 0.008, 0.016])


def test_a_plain_round_that_comes_next_is_foretold() -> None:
    costs = OnlineCosts()
    for _ in range(8):
        foretold = costs.plain_is_next()
        play(costs, 1)
        assert foretold == (costs.wanted(8) == 0)


def test_plain_rounds_alone_teach_what_plain_decoding_costs() -> None:
    """A round that could have drafts and has none costs more: it is on the engine's other path."""
    costs = OnlineCosts()
    play(costs, FIRST_FIT)
    for _ in range(2 * FIRST_FIT):
        costs.observe(OFF, requests=4, rows=4, depth=0, verify_s=2e-3, draft_s=0.0, predicted_s=0.0)
        costs.observe_plain(4, round_s=1e-3, predicted_s=0.0)
        costs.observe_plain(4, round_s=3e-3, predicted_s=0.0, after_another=True)
    assert costs.plain_s(4) == pytest.approx(1e-3)
    assert list(costs.plain) == [(4, 4, 1e-3)] * (2 * FIRST_FIT)
    assert (4, 4, 1e-3) not in costs.verifies


def test_a_plain_round_after_another_counts_if_there_is_no_other() -> None:
    costs = OnlineCosts()
    costs.observe_plain(4, round_s=3e-3, predicted_s=0.0, after_another=True)
    assert list(costs.plain) == [(4, 4, 3e-3)]


def test_rounds_without_drafts_give_no_table() -> None:
    """Nothing says then what a row costs, and a fit would say that it costs nothing."""
    costs = OnlineCosts()
    for requests in (4, 8, 16) * FIRST_FIT:
        costs.observe(OFF, requests=requests, rows=requests, depth=0, verify_s=1e-3, draft_s=0.0, predicted_s=0.0)
    assert costs.table is None
    play(costs, FIRST_FIT)
    assert costs.table is not None


def test_another_number_of_requests_is_soon_measured() -> None:
    """A line through 63 and 64 requests says nothing of 4."""
    costs = OnlineCosts()
    play(costs, 50 * FIRST_FIT, requests=64)
    for requests in (63, 64):
        noisy_s = true_s(requests, requests) * (1.03 if requests == 63 else 1.0)
        costs.observe_plain(requests, round_s=noisy_s, predicted_s=0.0)
    table = costs.table
    for _ in range(FIRST_FIT + 1):
        costs.observe_plain(4, round_s=true_s(4, 4), predicted_s=0.0)
    assert costs.table is not table
    assert costs.plain_s(4) == pytest.approx(true_s(4, 4), rel=0.05)
