"""The benchmark of keys that are read once compares equal work, and its page says where it loses."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import keys_once


def test_both_ways_compute_the_same() -> None:
    rows, tiles = keys_once.attentions(100, 9, requests=2)
    torch.testing.assert_close(rows(), tiles(), atol=1e-5, rtol=1e-5)


def test_the_verdict_names_what_plain_rounds_pay_and_where_tiles_win() -> None:
    said = keys_once.verdict(
        {(64, 1): [(1.0, 4.0)] * 3, (64, 5): [(2.0, 4.0)] * 3, (900, 1): [(1.0, 2.0)] * 3, (900, 5): [(6.0, 4.0)] * 3}
    )
    assert "takes 2.00 to 4.00 times as long" in said
    assert "64: never; 900: 5 rows" in said
    assert "1.50 times as fast (5 rows of 900 tokens)" in said


def test_a_small_run_writes_its_page(tmp_path: Path) -> None:
    keys_once.main(["--turns", "6", "--contexts", "16", "32", "--out", str(tmp_path)])
    assert (tmp_path / "keys_once.svg").exists()
    assert (tmp_path / "keys_once.md").read_text().startswith("# Keys read once")
