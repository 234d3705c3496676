"""The page of the quickstart's speed, from runs written by hand."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.drafter_refresh_runs import LENGTH, Run
from benchmarks.quickstart_speed import CONTESTANTS, PLAIN, table


def finished(name: str, *, seconds: float, length: float = 0.0) -> Run:
    line = {"step": 1, "rollout/tokens": 100, "time/rollout_s": seconds}
    drafting = {LENGTH: length, "speculation/model/share_of_rounds": 0.5} if length else {}
    return Run(name=name, lines=[line | drafting], tokens="t", facts=[{"step": 1, "policy/loss": 0.25}])


def test_speed_is_over_plain_of_the_same_turn() -> None:
    plain_s = (1.0, 2.0, 1.0, 2.0, 1.0, 2.0)
    runs = {name: [finished(name, seconds=s / 2, length=4.0) for s in plain_s] for name in CONTESTANTS}
    runs[PLAIN] = [finished(PLAIN, seconds=s) for s in plain_s]
    page = table(runs, steps=1, made_s={"head": 30.0})
    rows = {row[0]: row[1:] for row in page.rows}
    assert rows[PLAIN][1:] == ["1.00 (1.00-1.00)", "-", "-", "-"]
    assert rows["head"][1:] == ["2.00 (2.00-2.00)", "4.00", "0.50", "30"]
    assert "median: layer 2.00 (2.00-2.00), head 2.00" in page.verdict
    assert "All runs have the same responses" in page.verdict

    runs["head"][3] = replace(runs["head"][3], tokens="other")
    page = table(runs, steps=1, made_s={"head": 30.0})
    assert "DIFFERENT: head: responses or rewards differ from those of plain." in page.verdict
