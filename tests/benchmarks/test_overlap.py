"""The benchmark of rounds launched ahead runs at its pretended device's pace, and its page says what is hidden."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import overlap
from specactor.rollout.warm_starter import WarmStarter


def test_the_verdict_says_where_nothing_is_shown() -> None:
    said = overlap.verdict({8: [(0.96, 0.8)] * 6, 64: [(1.92, 1.92)] * 6})
    assert "1.20 (1.20-1.20) times with 8 requests; 1.00 (1.00-1.00) times with 64 requests" in said
    assert said.endswith("intervals hold 1: 64.")
    assert overlap.verdict({8: [(0.96, 0.8)] * 6}).endswith("All gain.")


@pytest.fixture
def _short(warm_starter: WarmStarter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "TOKENS", 32)


@pytest.mark.deep
@pytest.mark.usefixtures("_short")
def test_a_small_run_writes_its_page(tmp_path: Path) -> None:
    """SystemExit if a token was read before it was there: each depends on the one before."""
    overlap.main(["--turns", "6", "--batches", "2", "--out", str(tmp_path)])
    assert (tmp_path / "overlap.md").read_text().startswith("# Plain rounds launched ahead")


@pytest.mark.deep
@pytest.mark.usefixtures("_short")
def test_a_loop_that_does_not_wait_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "NOBODY", "tests.benchmarks.overlap_unwaited:Nobody")
    with pytest.raises(SystemExit, match="tokens are not those without overlap"):
        overlap.main(["--turns", "1", "--batches", "2", "--out", str(tmp_path)])
