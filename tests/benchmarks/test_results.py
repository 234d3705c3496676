"""The page that a benchmark leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import results
from specactor.parallel import devices
from specactor.parallel.devices import Gpu


def test_publishes_terminal_table_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")

    results.publish(
        "speed",
        results.Result(title="Speed", intro="What.", columns=("who", "tokens/s"), rows=[["us", "5"]], notes="Why."),
    )

    page = (tmp_path / "results" / "speed.md").read_text()
    assert page.startswith("# Speed\n\nWhat.\n\n| who | tokens/s |\n| --- | --- |\n| us | 5 |\n\nWhy.\n")
    assert "torch " in page
    assert "GiB" in page
    assert "us" in capsys.readouterr().out


def test_the_machine_is_said_with_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(name="NVIDIA H100", memory_bytes=80 * 2**30)
    for found, said in (((), "no GPU"), ((gpu, gpu), "2 x NVIDIA H100 (80 GiB)")):
        monkeypatch.setattr(devices, "gpus", lambda found=found: found)
        assert f" GiB, {said}, torch " in results.machine()


def test_spread_is_median_and_range() -> None:
    assert results.spread([3.0, 1.0, 2.0], "{:.1f}") == "2.0 (1.0-3.0)"


def test_likely_is_median_and_where_it_may_lie() -> None:
    # of 6 values the smallest and the largest hold the median with 1 - 2 / 2**6 = 97 %; of 10 the second and the ninth
    # with 98 %, the third and the eighth only with 89 %
    assert results.likely([3.0, 1.0, 2.0, 6.0, 5.0, 4.0], "{:.1f}") == "3.5 (1.0-6.0)"
    assert results.likely([float(i) for i in range(10)], "{:.1f}") == "4.5 (1.0-8.0)"
