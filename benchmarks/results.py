"""Where a benchmark's figures go: a table on the terminal and a page under docs/results/, with date and machine."""

from __future__ import annotations

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
from rich.table import Table
from scipy.stats import quantile_test

from specactor.parallel import devices

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One benchmark's table."""

    title: str
    intro: str
    """What was run, and how a row is to be read."""
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    notes: str = ""
    """What explains the figures, aims that were missed included."""


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
    """Print the table and write ``docs/results/<name>.md``, or into another folder."""
    table = Table(title=result.title, caption=machine())
    for column in result.columns:
        table.add_column(column, justify="left" if column == result.columns[0] else "right")
    for row in result.rows:
        table.add_row(*row)
    Console(width=160).print(table)
    lines = [
        f"# {result.title}",
        "",
        result.intro,
        "",
        "| " + " | ".join(result.columns) + " |",
        "|" + " --- |" * len(result.columns),
        *("| " + " | ".join(row) + " |" for row in result.rows),
        "",
        *([result.notes, ""] if result.notes else []),
        f"Measured: {machine()}.",
    ]
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """median (minimum-maximum)."""
    return f"{form.format(median(values))} ({form.format(min(values))}-{form.format(max(values))})"


def likely(values: Sequence[float], form: str = "{:.2f}") -> str:
    """median (where the true median lies, with a confidence of 95 %). From six values on; fewer do not tell."""
    interval = quantile_test(values, p=0.5).confidence_interval(confidence_level=0.95)
    return f"{form.format(median(values))} ({form.format(interval.low)}-{form.format(interval.high)})"
