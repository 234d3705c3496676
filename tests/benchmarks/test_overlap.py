"""The benchmark of rounds launched ahead runs at its pretended device's pace, and its page says what is hidden."""

from __future__ import annotations

from pathlib import Path

from benchmarks import overlap


def test_the_verdict_names_every_batch() -> None:
    said = overlap.verdict({8: [(0.96, 0.8)] * 3, 64: [(1.92, 1.92)] * 3})
    assert "8 requests: 1.20 times, 1.7 ms per round; 64 requests: 1.00 times, 0.0 ms per round" in said


def test_a_small_run_writes_its_page(tmp_path: Path) -> None:
    """SystemExit if a token was read before it was there: each depends on the one before."""
    overlap.main(["--turns", "6", "--batches", "2", "--out", str(tmp_path)])
    assert (tmp_path / "overlap.md").read_text().startswith("# Plain rounds launched ahead")
