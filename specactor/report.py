"""One HTML page of a run: what it was, what it reached, and its metrics over the steps.

Invariants: the page needs nothing but itself, as its own security policy says (no script, no network); texts that come
from files reach it escaped, or inside a picture; the same files give the same page; a metric that is missing is not
drawn, and a value that was not finite is a hole in its curve.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specactor.config import MAX_WINDOW
from specactor.errors import DataError
from specactor.metrics import Value, read_metrics

ENDS = 5
"""Steps of the moving average of a noisy curve, and of the averages at its two ends."""
MARKED = 60
"""Most points of a curve that also get a mark each; a single point would be invisible without."""
PHASES = dict(
    rollout="#4c6a92", reward="#d9a441", train="#7fa7c9", sync="#c0504d", eval="#b8c4a0", checkpoint="#9a9a9a"
)
"""Phases of an RL step in their order, with their colours. Those of `START` come before it, at a start or resume."""
START = ("data", "warm-up", "engines")
TINY = dict(num_layers="layers", hidden_size="wide", num_experts="experts", experts_per_token="per token")
LAYOUT = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
GAP = "agreement/logprob_gap_max"

RC: dict[str, Any] = {f"axes.spines.{side}": False for side in ("top", "right")} | {
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "specactor",  # else ids, and with them pages, differ from call to call
}
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f5f6f8; color: #1d2430; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 84rem; margin: auto; padding: 1rem clamp(.75rem, 3vw, 2rem) 3rem; }
h1 { margin: .5rem 0 0; font-size: 1.7rem; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .7rem; font-size: 1.2rem; }
.grid { display: grid; gap: .9rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 23rem), 1fr)); }
.card { margin: 0; padding: .8rem .9rem; background: #fff; border: 1px solid #dfe3e8; border-radius: .5rem; overflow-x: auto; }
.wide { grid-column: 1 / -1; }
figcaption, caption { font-weight: 600; text-align: left; }
header p, small, thead th, tbody th { color: #5b6574; font-weight: 400; margin: 0; }
img { display: block; width: 100%; max-width: 34rem; margin: .4rem auto 0; }
table { width: 100%; border-collapse: collapse; font-size: .93rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .28rem .8rem .28rem 0; border-top: 1px solid #edf0f3; }
td { overflow-wrap: anywhere; }
.numbers td, .numbers th + th { text-align: right; white-space: nowrap; }
details { margin-top: 2rem; }
pre { overflow-x: auto; font-size: .82rem; }
"""

Draw = Callable[[Axes], None]
Panel = tuple[str, str, Draw]
"""Title, unit and what draws it; a panel whose axes stay empty is left out."""
Rows = list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run wrote so far."""

    name: str
    config: Mapping[str, Any]
    """config.json; empty when there is none."""
    lines: Sequence[Mapping[str, Value]]
    """Of metrics.jsonl, in order of their step; the line of step 0 is from before the first RL step."""
    num_ranks: int
    """0 when it is not known."""
    has_summary: bool

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Raises DataError when the folder is not a run's, or holds a file that a run does not write."""
        expected = "expected the folder of a run, with metrics.jsonl. Name for example runs/quickstart"
        if not (folder / "metrics.jsonl").is_file():
            raise DataError(f"{folder}: got no metrics.jsonl, {expected}.")
        try:
            lines = sorted(read_metrics(folder), key=lambda line: int(line["step"]))
            config, status = (_json(folder / name) for name in ("config.json", "status.json"))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise DataError(f"{folder}: got a file that no run writes ({error!r}), {expected}.") from None
        if not lines:
            raise DataError(f"{folder}: got no line in metrics.jsonl, {expected}, or wait for its first step.")
        return cls(
            name=str(config.get("name") or folder.resolve().name),
            config=config,
            lines=lines,
            num_ranks=len(status.get("rank_pids") or ()),
            has_summary=(folder / "summary.json").exists(),
        )

    def points(self, metric: str) -> tuple[list[int], list[float]]:
        """(steps, values) where the metric was logged; nan where it was not finite."""
        logged = [(int(line["step"]), line[metric]) for line in self.lines if metric in line]
        kept = [(step, float(value)) for step, value in logged if isinstance(value, int | float)]
        return [step for step, _ in kept], [value if math.isfinite(value) else math.nan for _, value in kept]

    def finite(self, metric: str) -> dict[int, float]:
        """Step -> value where the metric was logged and finite, in order."""
        return {step: value for step, value in zip(*self.points(metric), strict=True) if math.isfinite(value)}

    def total(self, *metrics: str) -> list[float]:
        """Sums over the steps at which all of the metrics are finite; nan when there is no such step."""
        found = [self.finite(metric) for metric in metrics]
        steps = [step for step in found[0] if all(step in of for of in found)]
        return [sum(of[step] for step in steps) if steps else math.nan for of in found]

    def setting(self, path: str) -> Any:
        """Of config.json, by dotted path; None when it is not there."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def drafters(self) -> dict[str, str]:
        """Names under ``speculation/`` with their colours; "off", rounds of plain decoding, is grey."""
        keys = [key for line in self.lines for key in line if key.startswith("speculation/")]
        names = dict.fromkeys(key.partition("/")[2].rpartition("/")[0] for key in keys)
        return {name: "#9a9a9a" if name == "off" else f"C{i % 10}" for i, name in enumerate(names)}


def page(run: Run) -> str:
    """The whole page."""
    parts = [
        f"<header><h1>{escape(run.name)}</h1><p>{escape(_state(run))}</p></header>",
        f'<h2>Run</h2><div class="grid">{_table("Recipe", facts(run))}{_table("Results", results(run))}',
        f"{_table('Seconds', seconds(run))}</div>",
        f'<h2>Training</h2><div class="grid">{_figures(training(run))}</div>',
    ]
    if run.drafters:
        totals = _table("Over the whole run", drafting(run), wide=True)
        parts.append(f'<h2>Speculation</h2><div class="grid">{totals}{_figures(speculation(run))}</div>')
    if run.config:
        text = escape(json.dumps(run.config, indent=2))
        parts.append(f"<details><summary>The whole configuration</summary><pre>{text}</pre></details>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}</title><style>{STYLE}</style></head>\n<body><main>"
        + "\n".join(parts)
        + "</main></body></html>\n"
    )


def _state(run: Run) -> str:
    done, wanted = int(run.lines[-1]["step"]), run.setting("train.steps")
    finished = run.has_summary and (wanted is None or done >= wanted)
    return f"{'Finished' if finished else 'Not finished'}: {done} of {'?' if wanted is None else wanted} steps"


def facts(run: Run) -> Rows:
    """What was run: (name, value), without settings that config.json lacks."""
    get = run.setting
    tiny = [f"{get(f'model.tiny.{key}')} {unit}" for key, unit in TINY.items() if get("model.tiny")]
    mode = get("rollout.speculation.mode")
    rows: dict[str, Iterable[Any]] = {
        "Model": [*([get("model.path")] if get("model.path") else tiny), get("model.dtype")],
        "Task": [get("data.train.path") or get("data.train.task")],
        "Layout": [f"{name} {size}" for name in LAYOUT if (size := get(f"parallel.{name}")) not in (None, 1)],
        "Ranks": [run.num_ranks or None],
        "Engines": [get("parallel.engines")],
        "Algorithm": [get(f"algorithm.{key}") for key in ("advantage", "loss", "aggregation")],
        "Speculation": [mode, *((get("rollout.speculation.drafters") or ()) if mode != "off" else ())],
        "Seed": [get("seed")],
        "Steps": [get("train.steps")],
    }
    texts = {name: ", ".join(str(value) for value in values if value is not None) for name, values in rows.items()}
    return [(name, text) for name, text in texts.items() if text]


def results(run: Run) -> Rows:
    """What was reached: (name, value); a dash where the run has no such figure."""
    held_out = [f"{value:.3f} after step {step}" for step, value in run.finite("accuracy/eval").items()]
    rewards = list(run.finite("reward/mean").values())
    reward = f"{fmean(rewards):.3f}, mean of {len(rewards)} steps" if rewards else "-"
    if len(rewards) >= 2 * ENDS:
        reward = f"{fmean(rewards[:ENDS]):.3f} in the first {ENDS} steps, {fmean(rewards[-ENDS:]):.3f} in the last"
    gaps = run.points(GAP)[1]
    holes = sum(map(math.isnan, gaps))
    gap = f"{max(run.finite(GAP).values(), default=math.nan):.1e} nats" + f"; not finite at {holes} steps" * bool(holes)
    bound = run.setting("train.max_logprob_gap")
    return [
        ("Held-out accuracy before", held_out[0] if held_out else "-"),
        ("Held-out accuracy after", held_out[-1] if len(held_out) > 1 else "-"),
        ("Reward", reward),
        ("Rollout tokens/s", _number(*run.total("rollout/tokens", "time/rollout_s"), form=",.0f")),
        ("Largest engine-trainer gap", gap if gaps else "-"),
        ("Bound of the gap", f"{bound:g} nats" if isinstance(bound, int | float) else "-"),
    ]


def seconds(run: Run) -> Rows:
    """A heading, and per phase its seconds in all and per RL step, where it belongs to one."""
    steps = max(1, sum(int(line["step"]) > 0 for line in run.lines))
    rows: Rows = [("phase", "in all", "per RL step")]
    for phase in (*START, *PHASES):
        spent = run.finite(f"time/{phase}_s")
        in_steps = sum(value for step, value in spent.items() if step > 0)
        if spent:
            rows.append((phase, f"{sum(spent.values()):,.1f}", f"{in_steps / steps:,.3f}" if phase in PHASES else "-"))
    return rows


def drafting(run: Run) -> Rows:
    """A heading, and what each drafter did over the run; of values that cannot be summed the mean over steps."""
    counts, means, times = (
        ("drafted", "accepted", "wasted"),
        ("accept_length", "share_of_rounds"),
        ("draft_s", "verify_s"),
    )
    rows: Rows = [("drafter", *counts, "accept_rate", *means, *times, "predicted_s / measured_s")]
    for name in run.drafters:
        key = f"speculation/{name}/".__add__
        values = [run.finite(key(part)).values() for part in means]
        row = [_number(*run.total(key(part)), form=",.0f") for part in counts]
        row += [_number(*run.total(key("accepted"), key("drafted")), form=".3f")]
        row += [f"{fmean(of):.3f}" if of else "-" for of in values]
        row += [_number(*run.total(key(part)), form=",.2f") for part in times]
        rows.append((name, *row, _number(*run.total(key("predicted_s"), key("measured_s")), form=".3f")))
    return rows


def training(run: Run) -> list[Panel]:
    lengths = {"mean": "response/length_mean", "95 %": "response/length_p95", "longest": "response/length_max"}
    memory = {"largest trainer rank": "memory/rank_rss_bytes", "engines": "memory/engine_rss_bytes"}
    phases = [(phase, colour, 1.0, f"time/{phase}_s") for phase, colour in PHASES.items()]
    return [
        ("Accuracy", "share of right answers", _accuracy(run)),
        ("Reward", f"mean per step, and over {ENDS} steps", lambda axes: _noisy(axes, run, "reward/mean")),
        ("Response length", "tokens", _curves(run, lengths)),
        ("Entropy", "nats per response token", _curves(run, {"": "policy/entropy"})),
        ("Engine against trainer", "largest |log-probability gap|, nats", _gap(run)),
        ("Seconds per phase", "stacked", _stack(run, phases)),
        ("Rollout speed", "response tokens per second", _curves(run, {"": "rollout/tokens_per_s"})),
        ("Memory", "resident GiB", _curves(run, memory, unit=2**30)),
    ]


def speculation(run: Run) -> list[Panel]:
    names = run.drafters

    def of(part: str, label: str = "{}") -> dict[str, str]:
        return {label.format(name): f"speculation/{name}/{part}" for name in names}

    shades = [("{}", 1.0, "accepted"), ("{}, wasted", 0.35, "wasted")]
    counts = [(s.format(n), names[n], alpha, f"speculation/{n}/{part}") for n in names for s, alpha, part in shades]
    shares = [(name, colour, 1.0, f"speculation/{name}/share_of_rounds") for name, colour in names.items()]
    colours = list(names.values())
    return [
        ("accept_rate", "accepted / drafted", _curves(run, of("accept_rate"), colours)),
        ("accept_length", "emitted / verifies", _curves(run, of("accept_length"), colours)),
        ("Draft tokens", "per step: drafted = accepted + wasted", _stack(run, counts)),
        ("Acceptance by position", "accepted / drafted there", _by_position(run)),
        ("Share of rounds", "stacked", _stack(run, shares)),
        ("Drafting", "seconds per step", _curves(run, of("draft_s"), colours)),
        ("Verifying", "seconds per step", _curves(run, of("verify_s"), colours)),
        ("Predicted against measured", "seconds of rounds, a point per step", _predictions(run)),
    ]


def _number(value: float, over: float = 1.0, *, form: str) -> str:
    """value / over; a dash where that is no number."""
    return format(value / over, form) if over and math.isfinite(value / over) else "-"


def _table(title: str, rows: Rows, *, wide: bool = False) -> str:
    """A card; rows of more than two cells are numbers, under a heading."""
    head, body = ("", rows) if len(rows[0]) == 2 else (_cells(rows[0], "th"), rows[1:])
    kind = f"card{' numbers' * bool(head)}{' wide' * wide}"
    lines = "".join(_cells(row, "td") for row in body)
    return (
        f'<div class="{kind}"><table><caption>{escape(title)}</caption>'
        f"<thead>{head}</thead><tbody>{lines}</tbody></table></div>"
    )


def _cells(row: Sequence[str], tag: str) -> str:
    return f"<tr><th>{escape(row[0])}</th>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row[1:]) + "</tr>\n"


def _figures(panels: Sequence[Panel]) -> str:
    """A card per panel that draws something. Pictures are data URLs: their ids cannot meet, their texts run nothing."""
    cards = []
    for title, unit, draw in panels:
        with rc_context(RC):
            figure = Figure(figsize=(4.8, 2.9), layout="constrained")
            axes = figure.add_subplot()
            draw(axes)
            if not axes.has_data():
                continue
            labels = axes.get_legend_handles_labels()[1]
            if any(labels):
                figure.legend(loc="outside upper left", ncols=3 if sum(map(len, labels)) < 90 else 1, fontsize=9)
            if not axes.get_xlabel():
                axes.set_xlabel("RL step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            file = io.BytesIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
        picture = base64.b64encode(file.getvalue()).decode()
        cards.append(
            f'<figure class="card"><figcaption>{escape(title)} <small>{escape(unit)}</small></figcaption>'
            f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{picture}"></figure>\n'
        )
    return "".join(cards)


def _label(name: str) -> str:
    """As matplotlib shows it literally: "$" would start a formula."""
    return name.replace("$", r"\$")


def _curves(run: Run, metrics: Mapping[str, str], colours: Sequence[str] = (), unit: float = 1.0) -> Draw:
    """A curve per metric, from label -> name."""

    def draw(axes: Axes) -> None:
        for i, (label, metric) in enumerate(metrics.items()):
            steps, values = run.points(metric)
            if run.finite(metric):
                mark = "." if len(steps) <= MARKED else ""
                colour = colours[i] if colours else f"C{i}"
                axes.plot(steps, [v / unit for v in values], marker=mark, color=colour, lw=1.4, label=_label(label))
        axes.set_ylim(bottom=0)

    return draw


def _noisy(axes: Axes, run: Run, metric: str) -> None:
    """Every value pale, and their centred moving average, whose window is cut at both ends."""
    found, half = run.finite(metric), ENDS // 2
    if found:
        steps, values = list(found), list(found.values())
        mark = "." if len(steps) <= MARKED else ""
        axes.plot(steps, values, marker=mark, color="C0", alpha=0.3, lw=1)
        axes.plot(
            steps, [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))], color="C0", lw=1.6
        )


def _accuracy(run: Run) -> Draw:
    def draw(axes: Axes) -> None:
        _noisy(axes, run, "accuracy/train")
        for line, label in zip(axes.lines, ("training samples", f"over {ENDS} steps"), strict=False):
            line.set_label(label)
        if found := run.finite("accuracy/eval"):
            link = ":" if len(found) > 2 else ""  # between two points it would suggest a course
            axes.plot(
                list(found), list(found.values()), f"o{link}", color="C1", label="held-out, greedy", clip_on=False
            )
        axes.set_ylim(0, 1.02)

    return draw


def _gap(run: Run) -> Draw:
    """Whole decades, with the bound."""

    def draw(axes: Axes) -> None:
        steps, values = run.points(GAP)
        shown = [value for value in values if value > 0]
        if not shown:
            return
        axes.plot(steps, [v if v > 0 else math.nan for v in values], marker="." if len(steps) <= MARKED else "")
        bound = run.setting("train.max_logprob_gap")
        if isinstance(bound, int | float) and math.isfinite(bound):
            axes.axhline(bound, color="black", linestyle="--", lw=1, label="the run stops above")
            shown.append(bound)
        axes.set_yscale("log")
        axes.set_ylim(10 ** math.floor(math.log10(min(shown))), 2 * 10 ** math.ceil(math.log10(max(shown)) - 1e-9))

    return draw


def _stack(run: Run, layers: Sequence[tuple[str, str, float, str]]) -> Draw:
    """Columns of RL steps, from (label, colour, opacity, metric) of each layer, the lowest first."""

    def draw(axes: Axes) -> None:
        found = [run.finite(metric) for *_, metric in layers]
        steps = sorted({step for of in found for step in of if step > 0})
        columns = range(steps[0], steps[-1] + 1) if steps else range(0)
        below = [0.0] * len(columns)
        for (label, colour, alpha, _), of in zip(layers, found, strict=True):
            top = [base + of.get(step, 0.0) for base, step in zip(below, columns, strict=True)]
            if top != below:
                edges = [columns[0] - 0.5, *(step + 0.5 for step in columns)]
                axes.stairs(top, edges, baseline=below, fill=True, color=colour, alpha=alpha, label=_label(label))
            below = top

    return draw


def _by_position(run: Run) -> Draw:
    """A bar per position and drafter, from sums over the run."""

    def draw(axes: Axes) -> None:
        width = 0.8 / len(run.drafters)
        for i, (name, colour) in enumerate(run.drafters.items()):
            key = f"speculation/{name}/".__add__
            sums = {j: run.total(key(f"accepted_at_{j}"), key(f"drafted_at_{j}")) for j in range(1, MAX_WINDOW + 1)}
            shares = {j + width * (i + 0.5) - 0.4: a / d for j, (a, d) in sums.items() if d > 0}
            if shares:
                axes.bar(list(shares), list(shares.values()), width, color=colour, label=_label(name))
        axes.set(xlabel="position in the draft", ylim=(0, 1.02))

    return draw


def _predictions(run: Run) -> Draw:
    def draw(axes: Axes) -> None:
        for name, colour in run.drafters.items():
            predicted, measured = (run.finite(f"speculation/{name}/{part}_s") for part in ("predicted", "measured"))
            steps = [step for step in predicted if measured.get(step)]
            if steps:
                x, y = [predicted[s] for s in steps], [measured[s] for s in steps]
                axes.plot(x, y, "o", markersize=4, alpha=0.6, color=colour, label=_label(name))
        if axes.lines:
            axes.axline((0, 0), slope=1, color="black", linestyle="--", lw=1, label="equal")
            axes.set(xlabel="predicted", ylabel="measured", xlim=(0, None), ylim=(0, None))

    return draw
