"""Draws the pictures of the README and the plots of docs/results/ from stored results: python -m benchmarks.pictures

`speed.svg` shows the rows of docs/results/speculation_speed.csv, `timeline.svg` the trace of a real step that is
stored as docs/results/decoupled_trace.json, `step.svg` which process has which device in a step (not to scale),
docs/results/replay_hunt.svg a response and its replay.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots import (
    CONTESTANTS,
    DRAFTER,
    ENGINE,
    INK,
    LIGHT,
    PLOTS,
    STYLE,
    TRAINER,
    save,
    speeds,
)
from benchmarks.results import RESULTS, stored

PICTURES = RESULTS.parent / "pictures"

WINDOW_MS = (60.0, 520.0)  # part of the stored trace that is drawn, from its first round on


def draw_speed(axes: Axes, by_contestant: dict[str, dict[int, float]]) -> None:
    """Draw tokens per second over plain decoding by batch."""
    for name, by_batch in by_contestant.items():
        colour, label = CONTESTANTS[name]
        axes.plot(
            [str(batch) for batch in by_batch],
            list(by_batch.values()),
            color=colour,
            label=label,
            marker="o",
            linewidth=2.2 if name == "auto" else 1.4,
        )
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate("plain decoding", (0, 1.0), xytext=(-8, -11), textcoords="offset points", fontsize=8, color=INK)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens/s over plain SGLang")
    axes.set_ylim(0.6, 2.8)
    axes.legend(frameon=False)


def draw_step(axes: Axes) -> None:
    """Draw who has which device in which phase of a step."""
    phases = {"rollout": (0, 54), "reward": (54, 61), "train": (61, 77), "refresh": (77, 85), "sync": (85, 93)}
    rows = ["GPU 0", "GPU 1", "GPU 2", "GPU 3", "GPU 4"]

    def box(row: int, start: float, end: float, colour: str, text: str, *, rows: int = 1, ink: str = "white") -> None:
        axes.barh(row + (rows - 1) / 2, end - start - 0.4, left=start + 0.2, height=rows - 0.16, color=colour)
        axes.text((start + end) / 2, row + (rows - 1) / 2, text, ha="center", va="center", color=ink, fontsize=8)

    box(0, 0, 54, ENGINE, "engine 0 (TP 2): verifies drafts, samples with keyed noise", rows=2)
    box(2, 0, 32, ENGINE, "engine 1 (TP 2): verifies drafts", rows=2)
    box(2, 32, 54, DRAFTER, "has run dry: its devices\ndraft for engine 0", rows=2)
    box(4, 0, 54, DRAFTER, "drafter process: drafts ahead for all requests of both engines")
    box(0, 54, 61, LIGHT, "score", rows=4, ink=INK)
    box(0, 61, 77, TRAINER, "trainer ranks 0-3:\nMegatron-core with\nTP, PP, EP, CP, DP", rows=4)
    box(0, 77, 85, DRAFTER, "distil the\ndrafter", rows=4)
    box(0, 85, 93, LIGHT, "weights\nv+1", rows=4, ink=INK)
    for name, (start, end) in phases.items():
        axes.text((start + end) / 2, -0.75, name, ha="center", fontsize=8, color=INK)
        axes.axvline(end, color=INK, linewidth=0.5, linestyle=":")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -1.1)
    axes.set_xlim(0, 93)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlabel("one RL step (not to scale)")


def draw_hunt(axes: Axes, hunt: dict[str, Any]) -> None:
    """Draw both continuations of a prompt around the first token that differs, and each token's score with noise."""
    at = hunt["token"]
    first = max(0, at - 9)
    for row, (name, tokens, scores) in enumerate(
        zip(("the run", "its replay"), hunt["texts"], hunt["scores"], strict=True)
    ):
        for i, (token, score) in enumerate(
            zip(tokens[first : at + 8], scores[first : at + 8], strict=True), start=first
        ):
            colour = LIGHT if i < at else (TRAINER if row == 0 else ENGINE) if i == at else "white"
            axes.barh(row, 0.92, left=i - 0.46, height=0.5, color=colour, edgecolor=LIGHT)
            ink = "white" if i == at else INK
            axes.text(i, row, token.strip() or repr(token)[1:-1], ha="center", va="center", fontsize=9, color=ink)
            axes.text(i, row + 0.38, f"{score:+.2f}", ha="center", va="center", fontsize=6, color=INK)
        axes.text(first - 0.8, row, name, ha="right", va="center", fontsize=8, color=INK)
    axes.set_xlim(first - 3, at + 8)
    axes.set_ylim(1.7, -0.6)
    axes.set_xticks(range(first, at + 8))
    axes.set_yticks([])
    axes.set_xlabel(f"token of the response to {hunt['prompt']!r}; below each: log-probability and noise")
    axes.spines["left"].set_visible(False)


def spans(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stored trace with the names of their processes, in milliseconds from the first round."""
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    first = min(event["ts"] for event in events if event["name"] == "verify")
    return [
        {
            "process": names[event["pid"]],
            "name": event["name"],
            "start": (event["ts"] - first) / 1e3,
            "ms": event.get("dur", 0.0) / 1e3,
            "args": event["args"],
        }
        for event in events
        if event["ph"] != "M"
    ]


def draw_timeline(axes: Axes, events: list[dict[str, Any]], *, window_ms: tuple[float, float] = WINDOW_MS) -> None:
    """Draw rounds of an engine above what its drafter process does meanwhile."""
    begin, end = window_ms
    for event in events:
        start, ms, name = event["start"], event["ms"], event["name"]
        if not begin <= start < end or event["process"] == "trainer":
            continue
        engine = event["process"].startswith("engine")
        if name == "verify":
            axes.barh(0, ms, left=start, height=0.7, color=ENGINE)
            drafted = event["args"]["rows"] - event["args"]["requests"]
            axes.text(start + ms / 2, 0, f"{drafted}", ha="center", va="center", color="white", fontsize=7)
        elif name == "emit" and start > begin + 5:
            emitted = event["args"]["tokens"]
            axes.text(start + ms, -0.52, f"{emitted}", ha="center", va="center", color=INK, fontsize=7)
        elif name == "draft" and not engine:
            axes.barh(1, ms, left=start, height=0.7, color=DRAFTER)
        elif name == "rollback":
            axes.plot([start, start], [0.45, 0.62], color=TRAINER, linewidth=1.2)
    axes.set_yticks([-0.52, 0, 0.53, 1], ["tokens emitted", "engine verifies (draft tokens)", "roll back", "drafts"])
    axes.set_ylim(1.5, -0.9)
    axes.set_xlim(begin - 1, end)
    axes.set_xlabel("ms")
    axes.tick_params(left=False)


def main() -> None:
    """Write all pictures."""
    PICTURES.mkdir(exist_ok=True)
    with rc_context(STYLE):
        for name, size, draw in (
            ("speed", (6.4, 3.2), lambda a: draw_speed(a, speeds(stored("speculation_speed")))),
            ("step", (8.6, 3.0), draw_step),
            ("timeline", (8.6, 2.1), lambda a: draw_timeline(a, spans(stored_trace()))),
        ):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure.add_subplot())
            figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
    save_hunt()
    for name in (name for name in PLOTS if (RESULTS / f"{name}.csv").exists()):
        save(name, stored(name), RESULTS)


def save_hunt() -> None:
    """Draw what a replay found, if one is stored."""
    if (stored_hunt := RESULTS / "replay_hunt.json").exists():
        with rc_context(STYLE):
            figure = Figure(figsize=(8.6, 1.8), layout="constrained")
            draw_hunt(figure.add_subplot(), json.loads(stored_hunt.read_text()))
            figure.savefig(stored_hunt.with_suffix(".svg"), metadata={"Date": None})


def stored_trace() -> dict[str, Any]:
    """Return the trace of a decoupled step: step 8 of the quickstart, its draft model refreshed after every step."""
    trace: dict[str, Any] = json.loads(Path(RESULTS / "decoupled_trace.json").read_text())
    return trace


if __name__ == "__main__":
    main()
