"""The page of predicted plans: what its notes say holds for its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.paper_plans import COLUMNS, NOTES, Setting, doubled, result, row, settings
from benchmarks.results import stored

DENSE = Setting(target="Qwen2.5-32B", drafter="Qwen2.5-0.5B", engine=4, gpu="H100", rate=0.8, batch=128)
ROUTED = Setting(target="Qwen3-235B-A22B", drafter="Qwen3-0.6B", engine=8, gpu="H20", rate=0.6, batch=256)


ADDED = "added to a draft step"


def cells(setting: Setting) -> dict[str, str]:
    return dict(zip(COLUMNS, row(setting), strict=True))


def gain(cell: str) -> float:
    return float(cell.partition(" ")[0])


@pytest.mark.parametrize("step_ms", [0.0, 8.0])
@pytest.mark.parametrize("setting", [DENSE, ROUTED], ids=lambda s: s.target)
def test_the_search_is_never_below_algorithm_1(setting: Setting, step_ms: float) -> None:
    found = cells(replace(setting, step_ms=step_ms))
    best = gain(found["its gain"])
    assert best >= gain(found["in our model, over plain"])
    assert best >= max(1.0, gain(found["coupled"]), gain(found["decoupled"]))


def test_hidden_draft_steps_turn_coupled_into_decoupled() -> None:
    """The trade-off of the paper, which reads keys once."""
    fast, slow = cells(DENSE), cells(replace(DENSE, step_ms=8.0))
    assert fast["keys once: chosen"].startswith("coupled")
    assert slow["keys once: chosen"].startswith("decoupled")
    assert gain(fast["gain of that"]) > 2 * gain(fast["its gain"])
    assert gain(fast["over coupled"]) < 1 < gain(slow["over coupled"])


def test_a_large_batch_of_a_moe_on_a_slow_device_is_off() -> None:
    found = cells(ROUTED)
    assert (found["chosen"], found["its gain"]) == ("off", "1.00")


def test_memory_that_bounds_a_batch_is_told() -> None:
    assert cells(replace(DENSE, batch=256))["batch"] == "256 (207 fit)"


PAGE = stored("paper_plans")


def test_the_page_is_of_these_plans() -> None:
    assert len(PAGE) == len(settings())
    for index in (2, 20, 39):
        assert list(PAGE[index].values()) == row(settings()[index]), "run python -m benchmarks.paper_plans"


def test_what_the_notes_say_holds_in_every_row() -> None:
    for found in PAGE:
        best = gain(found["its gain"])
        assert best >= gain(found["in our model, over plain"])
        assert best == max(1.0, gain(found["coupled"]), gain(found["decoupled"]))
        assert best == 1.0 or found["chosen"] != "off"
        assert gain(found["gain of that"]) >= best
        assert (gain(found["over coupled"]) > 1) == (found[ADDED] == "8 ms")
        place = found["batch"], found[ADDED]
        assert found["chosen"].startswith("decoupled") == (place in (("64", "2 ms"), ("64", "4 ms")))
        once = place in (("64", "4 ms"), ("64", "8 ms"), ("128", "8 ms"))
        assert found["keys once: chosen"].startswith("decoupled") == once


def test_the_page_is_whole() -> None:
    page = result([DENSE])
    assert len(page.rows[0]) == len(page.columns)
    assert f"{doubled(128, 4):.2f} times (32 B" in page.notes
    assert "{" not in page.notes
    assert page.notes != NOTES
    assert "H20: 148 TFLOP/s bfloat16, 96 GB at 4 TB/s" in page.intro
    assert len(settings()) == 2 * 2 * 2 * 4 + 2 * 4
