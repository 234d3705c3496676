"""The plots of the pages under docs/results/, each drawn from the rows of its page's CSV file.

Equal rows give equal files. `benchmarks.pictures` draws all of them again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import geometric_mean
from textwrap import fill
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = Mapping[str, str]
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "specactor",  # equal pictures are equal files
}
TRAINER, ENGINE, DRAFTER, LIGHT, INK = "#c44e52", "#4c72b0", "#55a868", "#d9dee8", "#333333"
GREY, YELLOW = "#8c8c8c", "#c9a227"
COLOURS = (ENGINE, DRAFTER, TRAINER, YELLOW, GREY)
CONTESTANTS = {
    "auto": (ENGINE, "SpecActor, auto"),
    "SGLang NGRAM": (GREY, "SGLang NGRAM"),
    "SGLang STANDALONE": (YELLOW, "SGLang STANDALONE"),
}
"""Column of the table of speeds -> colour, name."""


# ------------------------------------------------------------------------------------------------------------- helpers


def numbers(cell: str) -> list[float]:
    """Those of a cell, without signs: "0.98 (0.95-1.02)" gives three. A dash gives none."""
    return [float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*\.?\d*(?:e-?\d+)?", cell)]


def number(cell: str) -> float:
    """The first one of a cell."""
    return next(iter(numbers(cell)), nan)


def dots(axes: Axes, labels: Sequence[str], series: Mapping[str, Sequence[str]], *, line: float | None = None) -> None:
    """A row per label, a dot per series, with its interval where the cell has one; a line at what is compared with."""
    for place, ((name, cells), colour) in enumerate(zip(series.items(), COLOURS, strict=False)):
        shift = (place - (len(series) - 1) / 2) * 0.6 / max(1, len(series))
        for at, cell in enumerate(cells):
            found = numbers(cell)
            label = name if at == 0 else None
            axes.plot(found[:1] or [nan], [at + shift], "o", color=colour, markersize=4, label=label)
            if "-" in cell and len(found) == 3:
                axes.plot(found[1:], [at + shift] * 2, color=colour, linewidth=1)
    if line is not None:
        axes.axvline(line, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def column(rows: Sequence[Row], name: str) -> list[str]:
    """Cells of a column."""
    return [row[name] for row in rows]


# ------------------------------------------------------------------------------------------------------------- plots


def speeds(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return, per contestant and batch, the geometric mean of its speed over plain decoding."""
    found: dict[str, dict[int, list[float]]] = {}
    for name in CONTESTANTS:
        found[name] = defaultdict(list)
        for row in rows:
            if numbers(row.get(name, "-")):
                found[name][int(row["batch"])].append(number(row[name]))
    return {
        name: {batch: geometric_mean(ratios) for batch, ratios in by_batch.items()} for name, by_batch in found.items()
    }


def cells_of_auto(axes: Axes, rows: Sequence[Row]) -> None:
    """Every cell of `auto`, and the geometric means of all contestants."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    for model, marker in zip(dict.fromkeys(row["model"] for row in rows), "osv^", strict=False):
        own = [row for row in rows if row["model"] == model]
        values = [number(row.get("auto", "-")) for row in own]
        axes.plot(
            [batches.index(row["batch"]) for row in own],
            values,
            marker,
            color=ENGINE,
            alpha=0.45,
            markersize=4,
            label=f"auto, {model}",
        )
    for name, by_batch in speeds(rows).items():
        colour, label = CONTESTANTS[name]
        axes.plot(
            [batches.index(str(b)) for b in by_batch], list(by_batch.values()), color=colour, label=f"mean: {label}"
        )
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(batches)), batches)
    axes.set(xlabel="requests at once", ylabel="tokens/s over plain SGLang")
    axes.legend(frameon=False, fontsize=8)


def plans(axes: Axes, rows: Sequence[Row]) -> None:
    """Gains of the best decoupled plan over those of the best coupled one, a dot per row."""
    for added, colour in zip(dict.fromkeys(column(rows, "added to a draft step")), COLOURS, strict=False):
        own = [row for row in rows if row["added to a draft step"] == added]
        points = [[number(row[name]) for row in own] for name in ("coupled", "decoupled")]
        axes.plot(*points, "o", color=colour, markersize=4, label=f"draft step + {added}")
    axes.plot([0.8, 3.0], [0.8, 3.0], color=INK, linewidth=0.8, linestyle=":")
    axes.set(xlabel="best coupled plan, over plain", ylabel="best decoupled plan, over plain")
    axes.legend(frameon=False, fontsize=8)


def drafts(axes: Axes, rows: Sequence[Row]) -> None:
    """Draft tokens and accepted ones, of each drafter and window in all engines."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        for at, name in enumerate(("drafted", "accepted")):
            sums[f"{row['drafter']}, {row['windows']}"][at] += number(row[name]) / 1e3
    for at, (name, colour) in enumerate((("drafted", LIGHT), ("accepted", DRAFTER))):
        axes.barh(list(sums), [of[at] for of in sums.values()], color=colour, label=name)
    axes.invert_yaxis()
    axes.set_xlabel("thousand draft tokens")
    axes.legend(frameon=False)


def deaths(axes: Axes, rows: Sequence[Row]) -> None:
    """What was killed, in which phase, and how it went on."""
    victims, phases = (list(dict.fromkeys(column(rows, name))) for name in ("killed", "in phase"))
    kinds: dict[str, tuple[str, Callable[[Row], bool]]] = {
        "went on": (DRAFTER, lambda r: r["the run"] == "completed"),
        "resumed": (ENGINE, lambda r: r["the run"].endswith("resumed, completed")),
        "ended with a message": (YELLOW, lambda r: "completed" not in r["the run"]),
    }
    good = [row for row in rows if row["step's metrics"] == "identical" and row["left behind"] == "nothing"]
    bad = [row for row in rows if row not in good]
    for label, (colour, of) in {**kinds, "differs, or left something": (TRAINER, lambda r: True)}.items():
        own = [row for row in (good if label in kinds else bad) if of(row)]
        places = [
            [options.index(row[name]) for row in own] for options, name in ((phases, "in phase"), (victims, "killed"))
        ]
        axes.plot(*places, "s", color=colour, markersize=9, label=f"{label}: {len(own)}")
    axes.set_xticks(range(len(phases)), phases)
    axes.set_yticks(range(len(victims)), victims)
    axes.set_ylim(len(victims) - 0.4, -0.6)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.45, -0.12))


def decoupled(axes: Axes, rows: Sequence[Row]) -> None:
    """Speed over `off` of the three ways to draft."""
    labels = [f"{row['drafter']}, {row['acceptance']}, batch {row['batch']}" for row in rows]
    dots(axes, labels, {name: column(rows, f"{name} x off") for name in ("auto", "coupled", "decoupled")}, line=1.0)
    axes.set_xlabel("tokens/s over off")


def paced(axes: Axes, rows: Sequence[Row]) -> None:
    """Speed over `off` by setting, a dot per contestant."""
    names = [name for name in dict.fromkeys(column(rows, "contestant")) if name != "off"]
    cells = {name: [row["tokens/s over off"] for row in rows if row["contestant"] == name] for name in names}
    labels = [fill(name, 36) for name in dict.fromkeys(column(rows, "setting"))]
    dots(axes, labels, cells, line=1.0)
    axes.set_xlabel("tokens/s over off, on as many devices")


def where(axes: Axes, rows: Sequence[Row]) -> None:
    """What is fastest, by what decides: the grid at acceptance .8, and models by published figures."""
    colours = {"off": GREY, "coupled": ENGINE, "decoupled": DRAFTER}
    for row in rows:
        is_grid = row["setting"].startswith("draft step")
        if is_grid and row["acceptance"] != "0.8":
            continue
        at = number(row["draft step of a pass"]), number(row["pass with twice the requests"])
        axes.plot(*at, "s" if is_grid else "o", color=colours[row["fastest"]], markersize=11 if is_grid else 5,
                  markeredgecolor="white" if is_grid else INK)  # fmt: skip
        if is_grid:
            best = max(number(row["coupled"]), number(row["decoupled"]))
            axes.annotate(f"{best:.2f}", at, xytext=(0, -14), textcoords="offset points", ha="center", fontsize=7)
    for name, colour in colours.items():
        axes.plot([], [], "s", color=colour, label=name)
    axes.set(xscale="log", xlabel="draft step, as a share of a pass", ylabel="pass with twice the requests")
    axes.set_xticks([1 / 16, 1 / 8, 1 / 4, 1 / 2], ["1/16", "1/8", "1/4", "1/2"])
    axes.minorticks_off()
    axes.set_ylim(0.93, None)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), title="fastest")


def rollouts(axes: Axes, rows: Sequence[Row]) -> None:
    """Rollouts in the paper's settings."""
    names = ("auto", "decoupled", "vanilla")
    dots(axes, column(rows, "setting"), {name: column(rows, name) for name in names}, line=1.0)
    axes.set_xlabel("rollout, times as fast as plain (simulated)")


def rounds(axes: Axes, rows: Sequence[Row]) -> None:
    """Milliseconds of a round."""
    labels, left = column(rows, "contestant"), [0.0] * len(rows)
    ours = ("rows", "emit", "learn", "tell", "decide")
    for label, parts, colour in (
        ("target", ("target",), ENGINE),
        ("SGLang's scheduler", ("around",), LIGHT),
        ("drafting", ("draft",), DRAFTER),
        ("the rest of speculation", ours, TRAINER),
    ):
        widths = [sum(number(row[part]) for part in parts) for row in rows]
        axes.barh(labels, widths, left=left, color=colour, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms per round, under a profiler")
    axes.legend(frameon=False, fontsize=8)


def acceptance(axes: Axes, rows: Sequence[Row]) -> None:
    """accept_length over that of the constant temperature."""
    pairs = list(dict.fromkeys(column(rows, "policy, draft model of")))
    lengths: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        lengths[row["draft temperature"]].append(row["of the constant's (accept_length, window 4)"])
    shown = {name: cells for name, cells in lengths.items() if "constant" not in name}
    dots(axes, pairs, shown, line=1.0)
    axes.set_xlabel("accept_length over that of draft temperature 1/1.5")


def tasks(axes: Axes, rows: Sequence[Row]) -> None:
    """accept_length by method."""
    methods = [name.removeprefix("accept_length, ") for name in rows[0] if name.startswith("accept_length, ")]
    dots(axes, column(rows, "task"), {m: column(rows, f"accept_length, {m}") for m in methods}, line=1.0)
    axes.set_xlabel("accept_length")


def tail(axes: Axes, rows: Sequence[Row]) -> None:
    """Rollout and tail over plain decoding."""
    own = [row for row in rows if row["tail / off"] != "-"]
    shown = {"tail": column(own, "tail / off"), "rollout": column(own, "rollout / off")}
    dots(axes, column(own, "contestant"), shown, line=1.0)
    axes.set_xlabel("tokens/s over off, median (minimum to maximum)")


def sync(axes: Axes, rows: Sequence[Row]) -> None:
    """Rates of a push and of a copy."""
    labels = [f"{row['Trainer']}, engine TP {row['engine TP']}" for row in rows]
    shown = {"weight sync": column(rows, "sync GB/s"), "memcpy": column(rows, "memcpy GB/s")}
    dots(axes, labels, shown)
    axes.set(xscale="log", xlabel="GB/s, median (minimum to maximum)")


def text(axes: Axes, rows: Sequence[Row]) -> None:
    """accept_length of the second step."""
    labels = [f"{row['Text']}: {row['drafter']}" for row in rows]
    shown = {"same prompts again": column(rows, "step 2"), "new prompts": column(rows, "accept_length, step 1")}
    dots(axes, labels, shown, line=1.0)
    axes.set_xlabel("accept_length")


def training(axes: Axes, rows: Sequence[Row]) -> None:
    """Training speed over plain PyTorch."""
    labels = [f"{row['model']}: {row['contestant']}" for row in rows]
    dots(axes, labels, {"": column(rows, "of plain")}, line=1.0)
    axes.axvline(0.9, color=TRAINER, linewidth=0.8, linestyle=":")
    axes.set_xlabel("tokens/s over the fastest plain loop (red: the aim)")


def recovery(axes: Axes, rows: Sequence[Row]) -> None:
    """accept_length by rollout, a line per run."""
    before, after = "accept_length, rollouts 2-5", ["6, after the switch", "7", "8", "9"]
    refreshes = list(dict.fromkeys(column(rows, "refresh")))
    for row in rows:
        colour, label = COLOURS[refreshes.index(row["refresh"])], row["refresh"] if row["seed"] == "0" else None
        values = [number(row[name]) for name in (before, *after)]
        axes.plot(["2-5", "6", "7", "8", "9"], values, "o-", color=colour, markersize=3, linewidth=1, label=label)
    axes.set(xlabel="rollout; problems are harder from 6 on", ylabel="accept_length")
    axes.legend(frameon=False, fontsize=8)


def scale(axes: Axes, rows: Sequence[Row]) -> None:
    """Processor seconds by GPUs."""
    for name, colour in zip(("auto", "off", "search"), COLOURS, strict=False):
        points = [(number(row["GPUs"]), number(row[name])) for row in rows if number(row[name]) > 0]
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", color=colour, markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="processor seconds")
    axes.legend(frameon=False)


def protocol(axes: Axes, rows: Sequence[Row]) -> None:
    """Milliseconds per round by transport."""
    dots(
        axes,
        [f"{row['Requests']} requests" for row in rows],
        {n: column(rows, n) for n in ("ipc", "tcp", "ipc, CURVE")},
    )
    axes.set_xlabel("ms per round, median (minimum to maximum)")


def dead(axes: Axes, rows: Sequence[Row]) -> None:
    """Speed over plain decoding."""
    labels = [f"{row['Drafter']}, {row['Requests']} requests" for row in rows]
    dots(axes, labels, {name: column(rows, name) for name in ("auto", "window 4", "chosen windows")}, line=1.0)
    axes.axvline(0.97, color=TRAINER, linewidth=0.8, linestyle=":")
    axes.set_xlabel("tokens/s over off (red: the aim)")


def warmed_up(axes: Axes, rows: Sequence[Row]) -> None:
    """Speed over plain rollouts."""
    dots(axes, column(rows, "contestant"), {"": column(rows, "over plain")}, line=1.0)
    axes.axvline(1.2, color=TRAINER, linewidth=0.8, linestyle=":")
    axes.set_xlabel("rollout tokens/s over plain (red: the aim)")


def launched_ahead(axes: Axes, rows: Sequence[Row]) -> None:
    """Speed of plain decoding with overlap over that without."""
    labels = [f"{row['requests']} requests, passes of {row['pass, ms']} ms" for row in rows]
    dots(axes, labels, {"": column(rows, "with / without")}, line=1.0)
    axes.set_xlabel("tokens/s with rounds launched ahead, over without")


def head_training(axes: Axes, rows: Sequence[Row]) -> None:
    """accept_length by fifth of the run: a colour per head, a line style per task."""
    styles = dict(zip(dict.fromkeys(column(rows, "task")), ("-", "--", ":"), strict=False))
    colours = dict(zip(dict.fromkeys(column(rows, "head")), (GREY, ENGINE, TRAINER), strict=False))
    for row in rows:
        lengths = [number(cell) for name, cell in row.items() if name.endswith(" fifth")]
        label = f"{row['task']}, {row['head']}"
        axes.plot(range(1, 6), lengths, styles[row["task"]], color=colours[row["head"]], label=label)
    axes.set(xlabel="fifth of the run", ylabel="accept_length", xticks=range(1, 6))
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def keys_once(axes: Axes, rows: Sequence[Row]) -> None:
    """Times that keys gathered once are faster than keys for each row, over contexts."""
    for count, colour in zip(dict.fromkeys(column(rows, "rows")), COLOURS, strict=False):
        own = [row for row in rows if row["rows"] == count]
        contexts = [number(row["context"]) for row in own]
        at, low, high = zip(*(numbers(row["each / once"]) for row in own), strict=True)
        axes.plot(
            contexts, at, "o-", color=colour, markersize=3, label="plain round" if count == "1" else f"{count} rows"
        )
        axes.vlines(contexts, low, high, color=colour, linewidth=0.8)
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="ms with keys for each row, over once")
    axes.legend(frameon=False)


def two_hosts(axes: Axes, rows: Sequence[Row]) -> None:
    """Seconds of a step, by link and phase."""
    left = [0.0] * len(rows)
    names = [row["link"] for row in rows]
    for name, colour in zip(("rollout, s", "train, s", "checkpoint, s", "sync, s"), COLOURS, strict=False):
        widths = [number(cell) for cell in column(rows, name)]
        axes.barh(names, widths, left=left, color=colour, label=name.removesuffix(", s"))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def growth(axes: Axes, rows: Sequence[Row]) -> None:
    """What each process holds, after the first steps and in the end."""
    held = [row for row in rows if row["what"].startswith("memory, ")]
    names = [row["what"].removeprefix("memory, ") for row in held]
    cells = {name: column(held, name) for name in ("after the first 100 steps", "at the end")}
    dots(axes, names, cells)
    axes.set(xscale="log", xlabel="MiB")


@dataclass(frozen=True)
class Plot:
    """Of one page."""

    draw: Callable[[Axes, Sequence[Row]], None]
    caption: str
    height: float = 3.0


def endpoint(axes: Axes, rows: Sequence[Row]) -> None:
    """Processor time of a request."""
    dots(axes, column(rows, "contestant"), {"": column(rows, "processor ms per request")})
    axes.set(xlim=(0, None), xlabel="processor ms per request in the trainer rank")


def heads(axes: Axes, rows: Sequence[Row]) -> None:
    """Speed over plain decoding."""
    dots(axes, column(rows, "drafter"), {"": column(rows, "tokens/s over plain")}, line=1.0)
    axes.set_xlabel("tokens/s over plain")


def owned(axes: Axes, rows: Sequence[Row]) -> None:
    """Memory of a rank by number of ranks."""
    ways = list(dict.fromkeys(row["tokens are"] for row in rows))
    for way, colour in zip(ways, COLOURS, strict=False):
        own = [row for row in rows if row["tokens are"] == way]
        memory = [number(row["memory per rank MB"]) for row in own]
        axes.plot([number(row["Ranks"]) for row in own], memory, "o-", color=colour, markersize=4, label=way)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="MB per rank")
    axes.legend(frameon=False)


def by_window(axes: Axes, rows: Sequence[Row]) -> None:
    names = {name: f"window {name.rpartition(' ')[2]}" for name in rows[0] if name.startswith("window")}
    dots(
        axes, [f"{row['requests']} requests" for row in rows], {n: column(rows, c) for c, n in names.items()}, line=1.0
    )
    axes.set(xlabel="times plain decoding's speed")


def recycled(axes: Axes, rows: Sequence[Row]) -> None:
    """Held-out accuracy by step, means over seeds: a colour per number of visits, a line style per task."""
    tasks, kinds = dict.fromkeys(column(rows, "task")), dict.fromkeys(column(rows, "visits"))
    for task, style in zip(tasks, ("-", "--"), strict=False):
        for visits, colour in zip(kinds, COLOURS, strict=False):
            by_step = defaultdict(list)
            for row in rows:
                if (row["task"], row["visits"]) == (task, visits) and numbers(row["held-out"]):
                    by_step[int(row["step"])].append(number(row["held-out"]))
            means = [sum(values) / len(values) for values in by_step.values()]
            axes.plot([*by_step], means, style, color=colour, label=f"{task}, {visits} visits")
    axes.set(xlabel="step", ylabel="held-out accuracy")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


PLOTS = {
    "speculation_speed": Plot(cells_of_auto, "Speed over plain SGLang, every cell", 3.6),
    "paper_plans": Plot(plans, "Gains of decoupled plans beside coupled ones", 3.4),
    "equality": Plot(drafts, "Draft tokens that were compared", 3.8),
    "faults": Plot(deaths, "What was killed, when, and how the run went on", 2.6),
    "decoupled_speed": Plot(decoupled, "Speed over plain decoding, every cell", 6.0),
    "paced_clock": Plot(where, "What is fastest on equal devices; circles are models by published figures", 3.4),
    "paced": Plot(paced, "Speed over plain decoding at the pace of GPUs", 4.6),
    "paper_rollouts": Plot(rollouts, "Simulated rollouts over plain ones", 4.6),
    "speculation_speed_profile": Plot(rounds, "Milliseconds of a round", 5.2),
    "acceptance": Plot(acceptance, "accept_length beside the constant draft temperature"),
    "tasks": Plot(tasks, "accept_length by task and method", 3.4),
    "tail_speed": Plot(tail, "Tail and rollout over plain decoding"),
    "endpoint": Plot(endpoint, "Processor time of a request in process and over HTTP", 1.6),
    "heads": Plot(heads, "Speed over plain decoding", 1.6),
    "samples": Plot(owned, "Memory per rank for a step's samples"),
    "weights_sync": Plot(sync, "GB/s of weight sync and of memcpy"),
    "text_drafters": Plot(text, "accept_length by text and drafter"),
    "trainer_speed": Plot(training, "Training speed over plain PyTorch"),
    "drafter_refresh_recovery": Plot(recovery, "accept_length before and after the switch"),
    "simulator_scale": Plot(scale, "Processor seconds by GPUs"),
    "draft_protocol": Plot(protocol, "Milliseconds per round", 2.4),
    "keys_once": Plot(keys_once, "Speed of keys gathered once"),
    "dead_drafter": Plot(dead, "Speed over plain decoding"),
    "long_run": Plot(growth, "Memory of each process, after 100 steps and in the end", 2.2),
    "two_hosts": Plot(two_hosts, "Seconds of a step by link and phase", 2.2),
    "recycled_noise": Plot(recycled, "Held-out accuracy by the visits that share noise, means over seeds"),
    "overlap": Plot(launched_ahead, "Speed with plain rounds launched ahead", 1.8),
    "head_training": Plot(head_training, "accept_length of heads over a run", 3.0),
    "gpu": Plot(by_window, "Speed over plain decoding on an H200, by requests and window", 2.2),
    "quickstart_speed": Plot(warmed_up, "Rollout speed over plain", 1.8),
}
"""By page, of which one may not have been measured yet."""


def save(name: str, rows: Sequence[Row], folder: Path) -> None:
    """Draw the plot of a page into its folder."""
    with rc_context({**STYLE, "font.family": ["DejaVu Sans", "sans-serif"], "svg.fonttype": "none"}):  # small files
        figure = Figure(figsize=(6.8, PLOTS[name].height), layout="constrained")
        PLOTS[name].draw(figure.add_subplot(), rows)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
