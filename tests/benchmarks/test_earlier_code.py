"""Present and earlier code side by side: the table's arithmetic, and how its process is talked to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks import earlier_code
from benchmarks.earlier_code import EARLIER, Way, table, verdict
from benchmarks.earlier_code_process import Emitted
from benchmarks.speculation_speed_table import Cell
from specactor.types import RolloutRequest, SamplingParams

DRIFT = (1.0, 3.0, 0.5, 2.0, 1.5, 0.8)
"""Of the machine's pace, from one repetition to the next."""


def cells(name: str, batch: int, ratio: float, *, lucky: float = 0.0) -> list[Cell]:
    """The present contestant, `ratio` times as fast as the earlier one; in one repetition `lucky` faster."""
    own = [ratio * pace for pace in DRIFT[:-1]] + [(ratio + lucky) * DRIFT[-1]]
    return [
        Cell(model="B", phase="warm", batch=batch, name=who, tokens_per_s=1.0, ratios=tuple(ratios), accept_length=0.0)
        for who, ratios in ((name, own), (EARLIER + name, DRIFT))
    ]


def unpaired(one: Cell, other: Cell) -> list[float]:
    return [a / b for a, b in zip(one.ratios, sorted(other.ratios), strict=True)]


def upside_down(one: Cell, other: Cell) -> list[float]:
    return [b / a for a, b in zip(one.ratios, other.ratios, strict=True)]


def test_what_is_compared_was_measured_in_one_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = cells("auto", 1, 1.5) + cells("auto", 4, 0.6) + cells("plain", 1, 1.0) + cells("plain", 4, 1.0)
    right = (
        ("model", "step", "batch", "plain", "auto"),
        [
            ["B", "warm", "1", "1.000 (1.000-1.000)", "1.500 (1.500-1.500)"],
            ["B", "warm", "4", "1.000 (1.000-1.000)", "0.600 (0.600-0.600)"],
            ["geometric mean", "", "", "1.000 (1.000-1.000)", "0.949 (0.949-0.949)"],
        ],
    )
    assert table(measured) == right
    for wrong in (unpaired, upside_down):
        monkeypatch.setattr(earlier_code, "against", wrong)
        assert table(measured) != right, wrong.__name__


def test_a_cell_is_worse_when_its_whole_interval_is() -> None:
    assert "auto 0.949 (0.949-0.949), slower, 1 of 2 cells under 0.95 (B warm 4: 0.600 (0.600-0.600))" in verdict(
        cells("auto", 1, 1.5) + cells("auto", 4, 0.6)
    )
    assert ", not shown to be slower, 0 of 1 cells under 0.95." in verdict(cells("auto", 4, 0.9, lucky=0.2))
    assert ", slower, 0 of 1 cells under 0.95." in verdict(cells("auto", 4, 0.96))
    few = cells("auto", 4, 0.6)
    assert ", not shown to be slower, 0 of 1" in verdict([replace(cell, ratios=cell.ratios[:5]) for cell in few]), (
        "five repetitions have no interval"
    )


PLAYER = """
import sys, msgspec
from benchmarks.earlier_code_process import Emitted, Order, Played
line = sys.stdin.buffer.readline()
order = msgspec.json.decode(line, type=Order)
emitted = [Emitted(order.way + r.request_id, r.prompt_ids) for r in order.requests]
sys.stdout.buffer.write(msgspec.json.encode(Played(2.5, emitted)) + b"\\n")
"""


def requests(names: Sequence[str]) -> list[RolloutRequest]:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=8)
    return [RolloutRequest(request_id=name, prompt_ids=(5, 6), sampling=sampling, seed=1, group_id=0) for name in names]


def test_seconds_are_those_of_the_process_and_its_end_is_told() -> None:
    with subprocess.Popen([sys.executable, "-c", PLAYER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        way = Way("auto ", process)
        assert way.generate(requests("ab"), timeout_s=9.0) == [Emitted("auto a", (5, 6)), Emitted("auto b", (5, 6))]
        assert way.played_s == 2.5
        with pytest.raises((SystemExit, BrokenPipeError)):
            way.generate(requests("c"), timeout_s=9.0)
