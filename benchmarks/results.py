"""Where a benchmark's figures go: a table on the terminal; under docs/results/ a page, its plot and all rows as CSV.

A page opens with its verdict. Then come the plot, what was run, a table, what explains the figures, date and machine.
"""

from __future__ import annotations

import csv
import datetime
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.plots import PLOTS, save
from specactor.parallel import devices

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # (columns, rows)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One benchmark's table, and what to make of it."""

    title: str
    verdict: str  # at most three sentences: what wins and by how much, what loses or misses its aim
    intro: str  # what was run, and how a row is to be read
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    summary: Table | None = None  # what the page shows where the rows are many; all rows are in the CSV file
    notes: str = ""  # what explains the figures, aims that were missed included
    picture: str = ""
    """As Markdown, of a benchmark that draws its own; others have theirs in `benchmarks.plots`."""
    source: str = ""  # the last line, where nothing was measured; otherwise date and machine


def machine() -> str:
    """One line: date, processor, memory, GPUs, versions."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core", "sglang", "transformers"))
    return (
        f"{datetime.date.today()}, {psutil.cpu_count()} cores of {model}, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {accelerators()}, {packages}"
    )


def accelerators() -> str:
    """The GPUs of this machine: ``8 x NVIDIA H100 (80 GiB)``, or ``no GPU``."""
    counts = Counter(f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in devices.gpus())
    return ", ".join(f"{count} x {gpu}" for gpu, count in counts.items()) or "no GPU"


def publish(name: str, result: Result, folder: Path | None = None) -> None:
    """Print the table and write ``docs/results/<name>.md``, ``.csv`` and ``.svg``, or into another folder."""
    terminal = RichTable(title=result.title, caption=machine())
    for column in result.columns:
        terminal.add_column(column, justify="left" if column == result.columns[0] else "right")
    for row in result.rows:
        terminal.add_row(*row)
    console = Console(width=160)
    console.print(terminal)
    console.print(result.verdict)
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(name, result.columns, result.rows, folder)
    (folder / f"{name}.md").write_text(page(name, result))
    if name in PLOTS:
        save(name, stored(name, folder), folder)


def write_rows(name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], folder: Path | None = None) -> None:
    """Write ``docs/results/<name>.csv``, or into another folder."""
    with ((folder or RESULTS) / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([distinct(columns), *rows])


def page(name: str, result: Result) -> str:
    """The page, as Markdown."""
    picture = f"![{PLOTS[name].caption}]({name}.svg)" if name in PLOTS else result.picture
    parts = [
        f"# {result.title}",
        result.verdict,
        picture,
        result.intro,
        markdown(*(result.summary or (result.columns, result.rows))),
        f"[All rows and columns]({name}.csv)." if result.summary else f"[As CSV]({name}.csv).",
        result.notes,
        result.source or f"Measured: {machine()}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def distinct(columns: Sequence[str]) -> list[str]:
    """Columns; one that has the name of an earlier one is told apart by the one before it."""
    return [f"{name} ({columns[at - 1]})" if name in columns[:at] else name for at, name in enumerate(columns)]


def stored(name: str, folder: Path | None = None) -> list[dict[str, str]]:
    """The rows of a stored result, by column."""
    with ((folder or RESULTS) / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """median (minimum-maximum)."""
    return f"{form.format(median(values))} ({form.format(min(values))}-{form.format(max(values))})"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return where the true median lies, with a confidence of 95 %. From six values on; fewer do not tell."""
    from scipy.stats import quantile_test  # takes two seconds

    found = quantile_test(values, p=0.5).confidence_interval(confidence_level=0.95)
    return float(found.low), float(found.high)


def likely(values: Sequence[float], form: str = "{:.2f}") -> str:
    """median (its 95 % interval), from six values on."""
    low, high = interval(values)
    return f"{form.format(median(values))} ({form.format(low)}-{form.format(high)})"
