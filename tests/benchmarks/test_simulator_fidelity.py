"""What the simulator is told of a run, what it predicts from that, and how errors are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulator_fidelity import BATCHES, MAX_WINDOW, result, settings
from benchmarks.simulator_fidelity_prediction import (
    Comparison,
    Seen,
    Setting,
    predicted_s,
    summary,
    told,
)
from specactor.rollout.speculation.costs import CostTable, Grid
from specactor.rollout.speculation.counters import Counts

TABLE = CostTable(
    model="",
    device="",
    date="",
    verify=Grid(requests=(1.0, 8.0), per_request=(1.0, 5.0), seconds=((0.010, 0.018), (0.010, 0.018))),
    plain=Grid(requests=(1.0, 8.0), per_request=(1.0,), seconds=((0.008,), (0.008,))),
    drafters={
        "model": Grid(requests=(1.0, 8.0), per_request=(1.0, 4.0), seconds=((0.001, 0.004), (0.001, 0.004))),
        "suffix": Grid(requests=(1.0, 8.0), per_request=(1.0, 4.0), seconds=((0.001, 0.001), (0.001, 0.001))),
    },
)
OFF = Setting(batch=4)
TWO = Setting(batch=4, drafters=("model",), window=2)


def counted(rounds: list[tuple[int, int]]) -> Counts:
    """(drafted, accepted) of one request's rounds."""
    counts = Counts()
    for drafted, accepted in rounds:
        counts.round([drafted], [accepted], verify_s=1.0, draft_s=0.0)
    return counts


def seconds(setting: Setting, seen: dict[str, Seen], lengths: list[int]) -> float:
    return predicted_s(setting, TABLE, seen, lengths, list(range(len(lengths))), max_window=4)


def test_rounds_without_a_draft_count() -> None:
    rounds = [(2, 2), (2, 1), (2, 0), (0, 0)]
    found = Seen.of(counted(rounds), tokens=4 + 3, window=2)
    assert found == Seen(rates=(0.5, 0.5), found=0.75)
    full = Seen.of(counted(rounds[:3]), tokens=3 + 3, window=2)
    assert full.found == 1.0
    assert full.rates[0] == pytest.approx(2 / 3)


def test_a_drafter_that_was_never_right_emits_one_token_a_round() -> None:
    never = Seen.of(counted([(2, 0)] * 10), tokens=10, window=2)
    assert never.rates == (0.0, 0.0)
    assert seconds(TWO, {"model": never}, [11]) == pytest.approx(10 * (0.014 + 0.002))


def test_plain_decoding_takes_a_step_for_every_token_but_the_prefills() -> None:
    assert seconds(OFF, {}, [11, 6, 1]) == pytest.approx(10 * 0.008)


def test_accepted_draft_tokens_save_rounds() -> None:
    always = Seen.of(counted([(2, 2)] * 10), tokens=30, window=2)
    assert seconds(TWO, {"model": always}, [31]) == pytest.approx(10 * (0.014 + 0.002))


def test_windows_that_are_half_empty_verify_half_as_many_rows() -> None:
    half = Seen.of(counted([(2, 0), (0, 0)] * 5), tokens=10, window=2)
    assert half.found == 0.5
    way = replace(TWO, drafters=("suffix",))
    assert seconds(way, {"suffix": half}, [11]) == pytest.approx(10 * (0.012 + 0.001))
    table = told(TABLE, {"suffix": 0.5})
    assert (table.verify_s(2, 2 * 5), table.plain_s(2)) == (TABLE.verify_s(2, 2 * 3), TABLE.plain_s(2))
    assert set(table.drafters) == {"suffix"}
    assert told(TABLE, {"suffix": 0.5, "model": 1.0}).verify == TABLE.verify


def test_chosen_windows_are_no_slower_than_what_does_not_pay() -> None:
    never = Seen(rates=(0.0,) * 4, found=1.0)
    auto = Setting(batch=4, drafters=("suffix", "model"), auto=True)
    fixed = seconds(replace(TWO, window=4), {"model": never}, [201] * 4)
    assert seconds(auto, {"suffix": never, "model": never}, [201] * 4) < 0.6 * fixed


def test_errors_are_relative_to_what_was_measured() -> None:
    slow = Comparison(setting=TWO, measured_s=2.0, predicted_s=2.2, tokens=100)
    fast = Comparison(setting=OFF, measured_s=4.0, predicted_s=2.0, tokens=100)
    assert slow.error == pytest.approx(0.1)
    assert fast.error == -0.5
    text = summary([slow, fast])
    assert "2 settings: median error 30.0% (aim: at most 10%), largest 50.0% (aim: at most 25%); not met" in text
    assert "has 0.50 of the speed" in text
    assert "; met." in summary([slow, replace(slow, setting=OFF, predicted_s=2.1)])


def test_chosen_windows_find_counts_of_the_widest_fixed_one() -> None:
    for quick in (True, False):
        of = settings(16, quick=quick)
        fixed = {one.drafters for one in of if one.window == MAX_WINDOW}
        assert len(set(of)) == len(of)
        assert all((name,) in fixed for one in of for name in one.drafters)
    assert sum(len(settings(batch, quick=False)) for batch in BATCHES) >= 12


def test_the_page_has_a_row_for_each() -> None:
    found = [
        Comparison(setting=setting, measured_s=2.0, predicted_s=2.2, tokens=100) for setting in settings(4, quick=False)
    ]
    page = result(found, 3)
    assert len(page.rows) == len(found)
    assert all(len(row) == len(page.columns) for row in page.rows)
