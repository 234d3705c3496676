"""The page of weight syncs, written again from stored rows."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import weights_sync, weights_sync_checks
from benchmarks.results import RESULTS, Result, write_rows


def test_a_page_from_stored_rows_says_nothing_of_checks_that_were_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("weights_sync.csv", "weights_sync.md"):
        shutil.copy(RESULTS / name, tmp_path)
    made: list[Result] = []
    monkeypatch.setattr(weights_sync, "RESULTS", tmp_path)
    monkeypatch.setattr(weights_sync, "publish", lambda name, result: made.append(result))
    monkeypatch.setattr(sys, "argv", ["weights_sync", "--stored"])
    weights_sync.main()
    checks = [("memcpy alone", "", "", "0.125", "100%", "on that day")]
    write_rows("weights_sync_checks", weights_sync_checks.COLUMNS, checks, tmp_path)
    weights_sync.main()
    without, beside = made
    assert "weights_sync_checks.csv" not in without.notes
    assert "Measured: on that day." in beside.notes
    for part in without.notes.split("\n\n"):
        assert part in beside.notes
