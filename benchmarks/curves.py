"""Curves and a table of finished runs, from their metrics.jsonl.

python -m benchmarks.curves RUN_DIR [RUN_DIR ...] --out docs/results/quickstart

writes OUT.png (accuracy, response length, entropy, agreement of engine and trainer, seconds per phase) and OUT.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.results import machine
from specactor.config.train import gap_bound
from specactor.metrics import Value, read_metrics

SMOOTHING = 5  # steps of the centred moving average of the training accuracy

PHASES = {
    "rollout": "#4c6a92",
    "reward": "#d9a441",
    "advantage": "#8c6bb1",
    "train": "#7fa7c9",
    "sync": "#c0504d",
    "refresh": "#5b8c5a",
    "eval": "#b8c4a0",
    "checkpoint": "#9a9a9a",
}
"""Phases of an RL step in their order, with the colours of their bars, which are not those of runs."""

NOT_SPENT = ("time/refresh_limit_s", "time/environment_s")  # granted; of conversations side by side

COLUMNS = (
    "run",
    "seed",
    "steps",
    "held-out before",
    "held-out after",
    "gain",
    "wall time",
    "of it RL",
    "rollout tokens/s",
    "largest gap",
)


@dataclass(frozen=True)
class Run:
    """What one run wrote."""

    name: str
    seed: int | None
    max_gap: float | None  # largest |engine - trainer| log-probability that the run tolerates
    lines: Sequence[dict[str, Value]]
    """Of metrics.jsonl, in order of their step; line 0 is from before the first RL step."""

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """(steps, finite values) of a metric."""
        points = [(int(line["step"]), float(line[metric])) for line in self.lines if metric in line]
        kept = [(step, value) for step, value in points if math.isfinite(value)]
        return [step for step, _ in kept], [value for _, value in kept]

    def rl_lines(self) -> list[dict[str, Value]]:
        return [line for line in self.lines if int(line["step"]) > 0]


def read_run(folder: Path) -> Run:
    """SystemExit when the folder holds no metrics."""
    lines = read_metrics(folder)
    if not lines:
        raise SystemExit(f"{folder}: got no metrics, expected lines in metrics.jsonl. Name the folder of a run.")
    config = folder / "config.json"
    settings = json.loads(config.read_text()) if config.exists() else {}
    bound = gap_bound(settings.get("train", {}).get("max_logprob_gap"), settings.get("model", {}).get("dtype"))
    max_gap = bound if bound < math.inf else None
    return Run(folder.resolve().name, settings.get("seed"), max_gap, lines)


def seconds(line: dict[str, Value]) -> float:
    """Of one line: the whole step where it was measured, otherwise all its phases."""
    if "time/step_s" in line:
        return float(line["time/step_s"])
    return sum(float(value) for name, value in line.items() if name.startswith("time/") and name not in NOT_SPENT)


def duration(value_s: float) -> str:
    return f"{value_s:.0f} s" if value_s < 100 else f"{value_s / 60:.1f} min"


def smoothed(values: Sequence[float], width: int = SMOOTHING) -> list[float]:
    """Centred moving average; the window is cut at both ends."""
    half = width // 2
    return [mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def table_row(run: Run) -> list[str]:
    """One row of `COLUMNS`; a dash where the run has no such figure."""
    _, held_out = run.series("accuracy/eval")
    _, gaps = run.series("agreement/logprob_gap_max")
    _, tokens = run.series("rollout/tokens")
    _, rollout_s = run.series("time/rollout_s")
    rl = run.rl_lines()
    return [
        run.name,
        "-" if run.seed is None else str(run.seed),
        str(int(run.lines[-1]["step"])),
        f"{held_out[0]:.3f}" if held_out else "-",
        f"{held_out[-1]:.3f}" if len(held_out) > 1 else "-",
        f"{held_out[-1] - held_out[0]:+.3f}" if len(held_out) > 1 else "-",
        duration(sum(map(seconds, run.lines))),
        duration(sum(map(seconds, rl))),
        f"{sum(tokens) / sum(rollout_s):.0f}" if tokens and rollout_s else "-",
        f"{max(gaps):.1e}" if gaps else "-",
    ]


def table(runs: Sequence[Run], picture: str) -> str:
    """Markdown: what was gained, the picture, a row per run, and what the columns mean."""
    gains = [values[-1] - values[0] for _, values in (run.series("accuracy/eval") for run in runs) if len(values) > 1]
    lines = [
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * 2 + " ---: |" * (len(COLUMNS) - 2),
        *("| " + " | ".join(table_row(run)) + " |" for run in runs),
        "",
        "Held-out accuracy is greedy, on problems that are never trained on, before the first and after the last step "
        "of reinforcement learning. Wall time is the sum of the measured phases, with data, supervised warm-up (or its "
        "cache) and start of the engines; start of the processes is not in it. Gap: the largest |engine - trainer| "
        "log-probability of any sampled token, in nats.",
    ]
    gain = (
        f"Held-out accuracy over {len(gains)} runs: mean {mean(gains):+.3f}, smallest {min(gains):+.3f}."
        if gains
        else ""
    )
    return "\n".join(
        [
            gain or "No run has a held-out accuracy before and after.",
            "",
            f"![Curves of these runs]({picture})",
            "",
            *lines,
            "",
        ]
    )


def draw(runs: Sequence[Run]) -> Figure:
    """Five panels; a colour per run."""
    style: dict[Any, Any] = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
    }
    with plt.rc_context(style):
        figure = plt.figure(figsize=(14, 8), layout="constrained")
        grid = figure.add_gridspec(2, 3)
        colours = [plt.get_cmap("tab10" if len(runs) <= 10 else "tab20")(i) for i in range(len(runs))]
        _accuracy(figure.add_subplot(grid[0, :2]), runs, colours)
        _curve(figure.add_subplot(grid[0, 2]), runs, colours, "response/length_mean", "Response length", "tokens, mean")
        _curve(figure.add_subplot(grid[1, 0]), runs, colours, "policy/entropy", "Entropy", "nats per response token")
        _gap(figure.add_subplot(grid[1, 1]), runs, colours)
        _phases(figure.add_subplot(grid[1, 2]), runs, colours)
    return figure


def _accuracy(axes: Axes, runs: Sequence[Run], colours: Sequence[Any]) -> None:
    for run, colour in zip(runs, colours, strict=True):
        steps, values = run.series("accuracy/train")
        axes.plot(steps, values, color=colour, alpha=0.22, linewidth=1)
        axes.plot(steps, smoothed(values), color=colour, linewidth=1.4)
        steps, values = run.series("accuracy/eval")
        link = ":" if len(values) > 2 else ""  # between two points it would suggest a course
        axes.plot(
            steps, values, f"o{link}", color=colour, linewidth=1, markersize=9, markeredgecolor="white", clip_on=False
        )
    axes.set(title="Accuracy", xlabel="RL step", ylabel="share of right answers", ylim=(0, 1.02))
    kinds = [
        Line2D([], [], color="black", alpha=0.3, linewidth=1, label="training samples"),
        Line2D([], [], color="black", linewidth=1.4, label=f"the same, mean over {SMOOTHING} steps"),
        Line2D([], [], color="black", marker="o", linestyle="", markersize=8, label="held-out problems, greedy"),
    ]
    names = [
        Line2D([], [], color=colour, linewidth=4, label=run.name) for run, colour in zip(runs, colours, strict=True)
    ]
    axes.legend(handles=[*names, *kinds], loc="lower right", frameon=False, ncols=2 if len(runs) > 2 else 1)


def _curve(axes: Axes, runs: Sequence[Run], colours: Sequence[Any], metric: str, title: str, unit: str) -> None:
    for run, colour in zip(runs, colours, strict=True):
        axes.plot(*run.series(metric), color=colour, linewidth=1.4)
    axes.set(title=title, xlabel="RL step", ylabel=unit)
    axes.set_ylim(bottom=0)


def _gap(axes: Axes, runs: Sequence[Run], colours: Sequence[Any]) -> None:
    """Whole decades, with the bound at which a run stops itself."""
    shown = [run.max_gap for run in runs if run.max_gap is not None]
    for bound in sorted(set(shown)):
        axes.axhline(bound, color="black", linestyle="--", linewidth=1)
        axes.annotate("a run stops above this", (0, bound), xytext=(2, -12), textcoords="offset points", fontsize=9)
    for run, colour in zip(runs, colours, strict=True):
        steps, values = run.series("agreement/logprob_gap_max")
        positive = [(step, value) for step, value in zip(steps, values, strict=True) if value > 0]
        axes.plot([step for step, _ in positive], [value for _, value in positive], color=colour, linewidth=1.4)
        shown += [value for _, value in positive]
    axes.set(title="Engine against trainer", xlabel="RL step", ylabel="largest |log-probability gap|, nats")
    axes.set_yscale("log")
    if shown:
        axes.set_ylim(10 ** math.floor(math.log10(min(shown))), 2 * 10 ** math.ceil(math.log10(max(shown)) - 1e-9))


def _phases(axes: Axes, runs: Sequence[Run], colours: Sequence[Any]) -> None:
    """A stacked bar per run: mean seconds of one RL step."""
    places = range(len(runs))
    bases = [0.0] * len(runs)
    for phase, colour in PHASES.items():
        sums = [sum(float(line.get(f"time/{phase}_s", 0.0)) for line in run.rl_lines()) for run in runs]
        widths = [total / max(1, len(run.rl_lines())) for total, run in zip(sums, runs, strict=True)]
        if any(widths):
            axes.barh(places, widths, left=bases, height=0.6, color=colour, label=f"{phase} {mean(widths):.2f}")
        bases = [base + width for base, width in zip(bases, widths, strict=True)]
    axes.set(title="Seconds per RL step", xlabel="s, mean over the run", yticks=places)
    axes.set_yticklabels([run.name for run in runs])
    for tick, colour in zip(axes.get_yticklabels(), colours, strict=True):
        tick.set_color(colour)
    axes.set_ylim(len(runs) - 0.4 + 0.35 * max(1, len(runs)), -0.6)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right", frameon=False, ncols=2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="folder with metrics.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="path of the results, without .png and .md")
    parser.add_argument("--note", default="", help="what else a reader must know of these runs")
    options = parser.parse_args(arguments)
    runs = [read_run(folder) for folder in options.runs]
    out: Path = options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    figure = draw(runs)
    figure.savefig(out.with_name(out.name + ".png"), dpi=130)
    plt.close(figure)
    text = table(runs, out.name + ".png") + (f"\n{options.note}\n" if options.note else "")
    out.with_name(out.name + ".md").write_text(
        f"# {out.name.replace('_', ' ').capitalize()}: runs and curves\n\n{text}\nMeasured: {machine()}.\n"
    )
    print(text)


if __name__ == "__main__":
    main()
