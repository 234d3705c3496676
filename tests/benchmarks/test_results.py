"""The page that a benchmark leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.plots import PLOTS, save
from specactor.parallel import devices
from specactor.parallel.devices import Gpu


def test_publishes_terminal_table_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")

    results.publish(
        "speed",
        results.Result(
            title="Speed",
            verdict="We win.",
            intro="What.",
            columns=("who", "tokens/s"),
            rows=[["us", "5"], ["them, too", "4"]],
            summary=(("who",), [["us"]]),
            notes="Why.",
        ),
    )

    page = (tmp_path / "results" / "speed.md").read_text()
    assert page.startswith(
        "# Speed\n\nWe win.\n\nWhat.\n\n| who |\n| --- |\n| us |\n\n[All rows and columns](speed.csv).\n\nWhy.\n"
    )
    assert (tmp_path / "results" / "speed.csv").read_text() == 'who,tokens/s\nus,5\n"them, too",4\n'
    assert "torch " in page
    assert "GiB" in page
    assert "us" in capsys.readouterr().out


def test_a_page_with_a_plot_has_it_under_its_verdict(tmp_path: Path) -> None:
    columns = ("Requests", "ipc", "tcp", "ipc, CURVE")
    made = results.Result(title="T", verdict="V.", intro="I.", columns=columns, rows=[["1", *["0.3 (0.2-0.4)"] * 3]])
    results.publish("draft_protocol", made, tmp_path)
    assert "V.\n\n![Milliseconds per round](draft_protocol.svg)\n\nI." in (tmp_path / "draft_protocol.md").read_text()
    first = (tmp_path / "draft_protocol.svg").read_bytes()
    results.publish("draft_protocol", made, tmp_path)
    assert (tmp_path / "draft_protocol.svg").read_bytes() == first, "equal rows, equal files"


def test_columns_of_one_name_are_told_apart() -> None:
    assert results.distinct(("a", "x", "b", "x")) == ["a", "x", "b", "x (b)"]


PAGES = sorted(results.RESULTS.glob("*.md"))


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_a_page_opens_with_its_verdict_and_shows_its_picture(file: Path) -> None:
    title, verdict, picture = file.read_text().split("\n\n")[:3]
    assert title.startswith("# ")
    assert verdict[0] not in "#|!-["
    assert len(verdict.split()) <= 70 or len(re.findall(r"[.:?!](?=\s|$)", verdict)) <= 3, verdict
    assert picture.startswith("![")
    named = re.findall(r"\]\(([\w.]+\.(?:svg|png|csv))\)", file.read_text())
    assert [name for name in named if not (file.parent / name).exists()] == []


@pytest.mark.parametrize("name", [file.stem for file in PAGES if file.stem in PLOTS])
def test_a_plot_is_of_the_stored_rows(name: str, tmp_path: Path) -> None:
    save(name, results.stored(name), tmp_path)
    drawn = (tmp_path / f"{name}.svg").read_bytes()
    assert drawn == (results.RESULTS / f"{name}.svg").read_bytes(), "run python -m benchmarks.pictures"


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


@pytest.mark.parametrize("name", sorted(file.stem for file in results.RESULTS.glob("*.csv")))
def test_what_is_stored_has_rows(name: str) -> None:
    assert results.stored(name)
