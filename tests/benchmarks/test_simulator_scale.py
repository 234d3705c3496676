"""The row of a cluster, and the times of decisions."""

from __future__ import annotations

from benchmarks.simulator_scale import COLUMNS, decision_ms, row


def test_a_row_says_what_was_simulated() -> None:
    found = dict(zip(COLUMNS, row(8, 4), strict=True))
    assert (found["GPUs"], found["requests"]) == ("8", "32")
    assert int(found["events"]) >= 32
    assert all(found[mode].endswith(" s") for mode in ("search", "off", "auto"))


def test_decisions_are_timed() -> None:
    found = decision_ms()
    assert len(found) == 2
    assert all(0 < ms < 1000 for ms in found.values())
