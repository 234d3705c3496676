"""An earlier commit beside the present code: contestants of `speculation_speed` in two processes of one kind.

All modules of a process are those of its checkout (`earlier_code_process`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import geometric_mean, median

import msgspec

from benchmarks.earlier_code_process import Emitted, Order, Played
from benchmarks.results import Table, likely
from benchmarks.speculation_speed_table import AUTO, FEWEST, PLAIN, Cell, against, below
from benchmarks.trained_models import Models
from specactor.rollout import warm_starter
from specactor.types import RolloutRequest

EARLIER = "earlier "  # before the name of a contestant
NAMES = (PLAIN, AUTO, "off")  # that are compared with their namesakes; plain decoding in any case
FLOOR = 0.95  # of the earlier code's speed: a cell is worse when its whole interval is below
END_S = 60.0  # longest wait for the end of its engines


class Way:
    """A contestant in another process, in an engine's place. Its seconds are taken there."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.played_s = 0.0
        self._process = process

    def generate(self, requests: Sequence[RolloutRequest], timeout_s: float) -> list[Emitted]:
        order = Order(way=self.name, requests=list(requests), timeout_s=timeout_s)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        played = msgspec.json.decode(_line(self._process), type=Played)
        self.played_s += played.seconds
        return played.emitted


@contextmanager
def ways_of(
    checkout: Path, models: Models, batch: int, folder: Path, names: Sequence[str], processor_time: bool
) -> Iterator[list[Way]]:
    """Its engines run until the end of the context. Raises SystemExit when they do not start."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != warm_starter.NAME}
    program = Path(__file__).with_name("earlier_code_process.py").resolve()
    clock = "processor" if processor_time else "clock"
    process = subprocess.Popen(
        # safe path: else this folder's modules would hide others of their names
        [sys.executable, "-P", program, models.target, models.draft, models.head, str(batch), folder, clock, *names],
        cwd=checkout,
        env=environment | {"PYTHONPATH": str(checkout.resolve())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        imported = Path(_line(process).decode().strip())
        if not imported.is_relative_to(checkout.resolve()):
            raise SystemExit(f"{checkout}: its process has imported {imported}")
        _line(process)  # its engines are ready
        yield [Way(name, process) for name in names]
    finally:
        assert process.stdin is not None
        process.stdin.close()  # which ends it
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise SystemExit("--old: the process of a checkout has ended, see above")
    return line


def ratios(cells: Sequence[Cell]) -> dict[str, dict[tuple[str, str, int], list[float]]]:
    """How many times as fast as its earlier namesake each contestant is: name -> place -> a value per repetition."""
    found = {(cell.name, cell.place): cell for cell in cells}
    places = dict.fromkeys(cell.place for cell in cells)
    return {
        name: {p: against(found[name, p], found[EARLIER + name, p]) for p in places if (EARLIER + name, p) in found}
        for name in NAMES
        if any(cell.name == name for cell in cells)
    }


def table(cells: Sequence[Cell]) -> Table:
    """A row per model, step and batch, and the geometric mean of each repetition's cells."""
    of = ratios(cells)
    rows = [
        [*map(str, place), *(shown(by_place[place]) for by_place in of.values())] for place in next(iter(of.values()))
    ]
    rows.append(["geometric mean", "", "", *(shown(means(by_place)) for by_place in of.values())])
    return ("model", "step", "batch", *of), rows


def means(by_place: Mapping[tuple[str, str, int], Sequence[float]]) -> list[float]:
    """Geometric mean over places, of each repetition."""
    return [geometric_mean(of_all) for of_all in zip(*by_place.values(), strict=True)]


def verdict(cells: Sequence[Cell]) -> str:
    """Which contestants, and which of their cells, are slower than before."""
    parts = []
    for name, by_place in ratios(cells).items():
        worse = [f"{' '.join(map(str, p))}: {shown(of)}" for p, of in by_place.items() if below(of, FLOOR)]
        slower = "slower" if below(means(by_place), 1.0) else "not shown to be slower"
        cells_worse = f"{len(worse)} of {len(by_place)} cells under {FLOOR}" + (
            f" ({'; '.join(worse)})" if worse else ""
        )
        parts.append(f"{name} {shown(means(by_place))}, {slower}, {cells_worse}")
    return f"Speed over the earlier code, by whole 95 % intervals: {'. '.join(parts)}."


def shown(values: Sequence[float]) -> str:
    """Median, with its 95 % interval where there are enough values."""
    return likely(values, "{:.3f}") if len(values) >= FEWEST else f"{median(values):.3f}"
