"""One HTML page of a run: recipe, results, and metrics over the steps.

Invariants: no script and no network; texts from files are escaped; equal files give equal pages; a value that was not
finite is a hole in its curve.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, MaxNLocator

from specactor.config import MAX_WINDOW
from specactor.config.train import gap_bound
from specactor.errors import DataError
from specactor.metrics import Value, read_metrics

START = ("data", "warm-up", "engines")  # phases before the steps, at a start or resume
# Phases of an RL step in their order, with their colours.
PHASES = dict(
    rollout="#4c6a92",
    reward="#d9a441",
    train="#7fa7c9",
    sync="#c0504d",
    record="#5b8c5a",
    audit="#c98bb9",
    refresh="#8c6bb1",
    eval="#b8c4a0",
    checkpoint="#9a9a9a",
)
SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
EVAL, GAP = "accuracy/eval", "agreement/logprob_gap_max"
FURTHER = re.compile(r"(accuracy/(?!eval$|train$)[\w-]+)")  # of further held-out sets
SCORE, PASS_AT = re.compile(r"score/([\w-]+)"), re.compile(r"accuracy/(.+@\d+)")
BARE: Any = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True}
# The salt makes ids the same from call to call; a name with "$" is no formula.
LOOK: Any = BARE | {"grid.alpha": 0.25, "legend.frameon": False, "svg.hashsalt": "specactor", "text.parse_math": False}
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0; background: #f5f6f8; color: #1d2430; }
main { max-width: 84rem; margin: auto; padding: 1rem clamp(.75rem, 3vw, 2rem) 3rem; }
h1 { margin: .5rem 0 0; font-size: 1.7rem; overflow-wrap: anywhere; } h2 { margin: 2rem 0 .7rem; font-size: 1.2rem; }
.grid { display: grid; gap: .9rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 23rem), 1fr)); }
.card { margin: 0; padding: .8rem .9rem; background: #fff; border: 1px solid #dfe3e8; border-radius: .5rem; }
.card { overflow-x: auto; } .wide { grid-column: 1 / -1; } figcaption, caption { font-weight: 600; text-align: left; }
header p, small, thead th, tbody th { color: #5b6574; font-weight: 400; margin: 0; }
img { display: block; width: 100%; max-width: 34rem; margin: .4rem auto 0; } details { margin-top: 2rem; }
table { width: 100%; border-collapse: collapse; font-size: .93rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .28rem .8rem .28rem 0; border-top: 1px solid #edf0f3; }
td, pre { overflow-wrap: anywhere; white-space: pre-wrap; }
.numbers td, .numbers th + th { text-align: right; } .numbers td { white-space: nowrap; }
thead th { vertical-align: bottom; }
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title><style>{style}</style></head>
<body><main>{body}</main></body></html>
"""

Draw = Callable[[Axes, "Run"], None]
Panel = tuple[str, str, Draw]  # title, unit, and what draws it; a panel whose axes stay empty is left out
Curve = tuple[str, str, str, str]  # label, metric, colour and matplotlib's style of line
Rows = list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    config: Mapping[str, Any]  # config.json; empty when there is none
    lines: Sequence[Mapping[str, Value]]  # of metrics.jsonl by step; step 0 is before the first RL step
    has_summary: bool

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read a run. Raises DataError for none."""
        expected = "expected the folder of a run, with lines in metrics.jsonl. Name for example runs/quickstart."
        if not (folder / "metrics.jsonl").is_file():
            raise DataError(f"{folder}: got no metrics.jsonl, {expected}")
        try:
            lines = sorted(read_metrics(folder), key=lambda line: int(line["step"]))
            file = folder / "config.json"
            config = dict(json.loads(file.read_text())) if file.exists() else {}
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise DataError(f"{folder}: got a file that no run writes ({error!r}), {expected}") from None
        if not lines:
            raise DataError(f"{folder}: got an empty metrics.jsonl, {expected}")
        name = str(config.get("name") or folder.resolve().name)
        return cls(name=name, config=config, lines=lines, has_summary=(folder / "summary.json").exists())

    def points(self, metric: str) -> dict[int, float]:
        """Return step -> value, in order; nan for non-finite."""
        logged = {int(line["step"]): line[metric] for line in self.lines if metric in line}
        numbers = {step: float(value) for step, value in logged.items() if isinstance(value, int | float)}
        return {step: value if math.isfinite(value) else math.nan for step, value in numbers.items()}

    def finite(self, metric: str) -> dict[int, float]:
        """As `points`, where finite."""
        return {step: value for step, value in self.points(metric).items() if math.isfinite(value)}

    def totals(self, *metrics: str) -> list[float]:
        """Return the sums over the steps where all are finite; nan without any."""
        found = [self.finite(metric) for metric in metrics]
        steps = [step for step in found[0] if all(step in of for of in found)]
        return [sum(of[step] for step in steps) if steps else math.nan for of in found]

    def named(self, pattern: re.Pattern[str]) -> dict[str, str]:
        """Return metrics by what `pattern` finds in their names."""
        keys = dict.fromkeys(key for line in self.lines for key in line)
        return {found[1]: key for key in keys if (found := pattern.fullmatch(key))}

    def setting(self, path: str) -> Any:
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def gap_bound(self) -> float:
        return gap_bound(self.setting("train.max_logprob_gap"), self.setting("model.dtype"))

    @property
    def state(self) -> str:
        done, wanted = int(self.lines[-1]["step"]), self.setting("train.steps")
        finished = self.has_summary and (wanted is None or done >= wanted)
        return f"{'Finished' if finished else 'Not finished'}: {done} of {'?' if wanted is None else wanted} steps"

    @property
    def drafters(self) -> dict[str, str]:
        keys = [key for line in self.lines for key in line if key.startswith("speculation/")]
        names = dict.fromkeys(key.partition("/")[2].rpartition("/")[0] for key in keys)
        return {name: "#9a9a9a" if name == "off" else f"C{i % 10}" for i, name in enumerate(names)}


def page(run: Run) -> str:
    tables = table("Recipe", facts(run)) + table("Results", results(run)) + table("Seconds", seconds(run))
    sections = {"Run": tables, "Training": _figures(run, training())}
    if run.drafters:
        sections["Speculation"] = table("Over the run, means over its steps", drafting(run)) + _figures(
            run, speculation(run)
        )
    body = f"<header><h1>{escape(run.name)}</h1><p>{escape(run.state)}</p></header>"
    body += "".join(f'<h2>{title}</h2>\n<div class="grid">{cards}</div>\n' for title, cards in sections.items())
    body += f"<details><summary>config.json</summary><pre>{escape(json.dumps(run.config, indent=2))}</pre></details>"
    return PAGE.format(policy=POLICY, title=escape(run.name), style=STYLE, body=body)


def facts(run: Run) -> Rows:
    get, mode = run.setting, run.setting("rollout.speculation.mode")
    rows: dict[str, Iterable[Any]] = {
        "Model": [get("model.path"), get("model.dtype")],
        "Task": [get("data.train")],
        "Layout": [f"{name} {size}" for name in SIZES if (size := get(f"parallel.{name}")) not in (None, 1)],
        "Engines": [get("parallel.engines")],
        "Algorithm": [get(f"algorithm.{key}") for key in ("advantage", "loss", "aggregation")],
        "Speculation": [mode, *((get("rollout.speculation.drafters") or ()) if mode != "off" else ())],
        "Seed": [get("seed")],
        "Steps": [get("train.steps")],
    }
    texts = {name: ", ".join(str(value) for value in values if value is not None) for name, values in rows.items()}
    return [(name, text) for name, text in texts.items() if text]


def results(run: Run) -> Rows:
    held_out = run.finite(EVAL)
    last = max(held_out, default=0)
    rewards, gaps = list(run.finite("reward/mean").values()), run.finite(GAP)
    reward = f"{fmean(rewards):.3f} on average" if rewards else "-"
    if len(rewards) >= 10:
        reward = f"{fmean(rewards[:5]):.3f} in the first 5 steps, {fmean(rewards[-5:]):.3f} in the last"
    logged, bound = len(run.points(GAP)), run.gap_bound
    holes = f", not finite at {logged - len(gaps)} of {logged} steps" if len(gaps) < logged else ""
    gap = _number(max(gaps.values(), default=math.nan), form=".1e") + holes
    return [
        ("Held-out accuracy before", f"{held_out[0]:.3f}" if 0 in held_out else "-"),
        ("Held-out accuracy after", f"{held_out[last]:.3f} after step {last}" if last else "-"),
        *((key, _first_and_last(run.finite(key))) for key in run.named(FURTHER).values()),
        ("Reward", reward),
        ("Rollout tokens/s", _number(*run.totals("rollout/tokens", "time/rollout_s"), form=",.0f")),
        ("Largest engine-trainer gap, nats", gap),
        ("Bound of that gap", f"{bound}"),
    ]


def _first_and_last(points: Mapping[int, float]) -> str:
    ends = dict.fromkeys((min(points), max(points))) if points else ()
    return ", ".join(f"{points[step]:.3f} after step {step}" for step in ends) or "-"


def seconds(run: Run) -> Rows:
    steps = max(1, sum(int(line["step"]) > 0 for line in run.lines))
    rows: Rows = [("phase", "in all", "per RL step")]
    for phase in (*START, *PHASES):
        if spent := run.finite(f"time/{phase}_s"):
            in_steps = sum(value for step, value in spent.items() if step > 0) / steps
            rows.append((phase, f"{sum(spent.values()):,.1f}", f"{in_steps:,.3f}" if phase in PHASES else "-"))
    return rows


def drafting(run: Run) -> Rows:
    sums = {"drafted": ",.0f", "accepted": ",.0f", "wasted": ",.0f", "draft_s": ",.2f", "verify_s": ",.2f"}
    head = ("drafter", *sums, "predicted_s / measured_s", "accept_rate", "mean accept_length", "mean share_of_rounds")
    rows: Rows = [tuple(word.replace("_", " ") for word in head)]
    shares = {name: run.finite(f"speculation/{name}/share_of_rounds") for name in run.drafters}
    steps = len(set().union(*shares.values()))
    for name in run.drafters:
        key = f"speculation/{name}/".__add__
        row = [_number(*run.totals(key(part)), form=form) for part, form in sums.items()]
        for part, whole in (("predicted_s", "measured_s"), ("accepted", "drafted")):
            row.append(_number(*run.totals(key(part), key(whole)), form=".3f"))
        length = fmean(run.finite(key("accept_length")).values() or [math.nan])
        rows.append((name, *row, _number(length, form=".3f"), _number(sum(shares[name].values()), steps, form=".3f")))
    return rows


def training() -> list[Panel]:
    lengths = [("mean", "mean", "C0", "-"), ("95th percentile", "p95", "C0", "--"), ("longest", "max", "C0", ":")]
    tokens = [(label, f"response/length_{key}", colour, style) for label, key, colour, style in lengths]
    memory = [
        ("largest rank", "memory/rank_rss_bytes", "C0", "-"),
        ("all engines", "memory/engine_rss_bytes", "C1", "-"),
    ]
    talk = [("turns", "environment/turns_mean", "C0", "-"), ("failed", "environment/failed", "C1", ":")]
    phases = [(phase, f"time/{phase}_s", colour, "") for phase, colour in PHASES.items()]
    return [
        ("Accuracy", "share of right answers", _accuracy),
        ("One of K samples is right", "share of held-out problems", _of_sets(PASS_AT, top=1.02)),
        ("Held-out score", "mean", _of_sets(SCORE)),
        ("Reward", "mean", _curves([("", "reward/mean", "C0", "-")], bottom=None)),
        ("Response length", "tokens", _curves(tokens)),
        ("Conversations", "turns, mean; those whose environment failed", _curves(talk)),
        ("Seconds of environments", "summed over conversations", _curves([("", "time/environment_s", "C0", "-")])),
        ("Entropy", "nats per response token", _curves([("", "policy/entropy", "C0", "-")])),
        ("KL", "nats per response token, to the reference", _curves([("", "policy/kl", "C0", "-")])),
        ("MTP layer's loss", "nats per response token", _curves([("", "policy/mtp_loss", "C0", "-")], bottom=None)),
        ("Clipped", "share of tokens", _curves([("", "policy/clip_fraction", "C0", "-")])),
        ("Gradient norm", "before clipping", _curves([("", "policy/grad_norm", "C0", "-")])),
        ("Learning rate", "of the step", _curves([("", "policy/learning_rate", "C0", "-")])),
        ("Engine against trainer", "largest gap, nats", _gap),
        ("Seconds per phase", "of each RL step, stacked", _stack(phases)),
        ("Rollout speed", "response tokens/s", _curves([("", "rollout/tokens_per_s", "C0", "-")])),
        ("Weight sync", "GB/s", _curves([("", "sync/gb_per_s", "C0", "-")])),
        ("Memory", "resident GiB", _curves(memory, unit=2**30)),
        ("Draft model's loss", "last update of each refresh", _curves([("", "drafter/loss", "C0", "-")], bottom=None)),
        ("Draft model's updates", "per refresh", _curves([("", "drafter/updates", "C0", "-")])),
        ("Seconds of refreshing", "per step", _curves([("", "time/refresh_s", "C0", "-")])),
    ]


def speculation(run: Run) -> list[Panel]:
    def of(*parts: tuple[str, str, str]) -> list[Curve]:
        """Return a curve per drafter and part: (label with {}, last part of the metric, style)."""
        pairs = [(name, colour, part) for name, colour in run.drafters.items() for part in parts]
        return [(label.format(n), f"speculation/{n}/{key}", colour, style) for n, colour, (label, key, style) in pairs]

    tokens = of(("{}: accepted", "accepted", ""), ("{}: wasted", "wasted", "pale"))
    seconds = of(("{}: draft", "draft_s", "--"), ("{}: verify", "verify_s", "-"))
    ahead = of(("drafted", "drafted_ahead", "-"), ("thrown away", "wasted_ahead", ":"))
    lost = of(("stale tails", "stale_tails", "-"), ("dropped frames", "dropped_frames", ":"))
    return [
        ("Accept rate", "accepted / drafted", _curves(of(("{}", "accept_rate", "-")), top=1.02)),
        ("Accept length", "emitted / verifies", _curves(of(("{}", "accept_length", "-")))),
        ("Draft tokens", "drafted, per step", _stack(tokens)),
        ("Acceptance by position", "accepted / drafted", _by_position),
        ("Share of rounds", "stacked", _stack(of(("{}", "share_of_rounds", "")))),
        ("Drafting and verifying", "seconds per step", _curves(seconds)),
        ("Rounds", "seconds, predicted and measured", _predictions),
        ("Drafting ahead", "draft tokens per step", _curves(ahead)),
        ("Late drafts and messages", "per step", _curves(lost)),
        (
            "Drafter processes",
            "share of the generation that they draft",
            _curves(of(("", "utilisation", "-")), top=1.02),
        ),
    ]


def _number(value: float, over: float = 1.0, *, form: str) -> str:
    return format(value / over, form) if over and math.isfinite(value / over) else "-"


def table(title: str, rows: Rows) -> str:
    if not rows:
        return ""
    cells = [[escape(cell) for cell in row] for row in rows]
    head = cells.pop(0) if len(cells[0]) > 2 else []
    kind = "card" + " numbers" * bool(head) + " wide" * (len(head) > 3)
    body = "".join(f"<tr><th>{name}</th><td>{'</td><td>'.join(rest)}</td></tr>\n" for name, *rest in cells)
    top = f"<thead><tr><th>{'</th><th>'.join(head)}</th></tr></thead>" * bool(head)
    return f'<div class="{kind}"><table><caption>{title}</caption>{top}<tbody>{body}</tbody></table></div>'


def _figures(run: Run, panels: Sequence[Panel]) -> str:
    """Return the panels as images, which share no ids, and in which nothing could run."""
    cards = []
    for title, unit, draw in panels:
        with rc_context(LOOK):
            figure = Figure(figsize=(4.2, 2.7), layout="constrained")
            axes = figure.add_subplot(xlabel="RL step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            draw(axes, run)
            if not axes.has_data():
                continue
            if labels := axes.get_legend_handles_labels()[1]:
                figure.legend(loc="outside upper left", ncols=max(1, 66 // (max(map(len, labels)) + 7)), fontsize=9)
            file = io.BytesIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
        data = base64.b64encode(file.getvalue()).decode()
        caption = f"<figcaption>{escape(title)} <small>{escape(unit)}</small></figcaption>"
        image = f'<img alt="{escape(title)}, {escape(unit)}" src="data:image/svg+xml;base64,{data}">'
        cards.append(f'<figure class="card">{caption}{image}</figure>\n')
    return "".join(cards)


def _curves(curves: Sequence[Curve], *, unit: float = 1, bottom: float | None = 0, top: float | None = None) -> Draw:
    def draw(axes: Axes, run: Run) -> None:
        for label, metric, colour, style in curves:
            if run.finite(metric):
                steps, values = zip(*run.points(metric).items(), strict=True)
                mark = "." if len(steps) <= 20 and "o" not in style else ""  # a single point would be invisible without
                axes.plot(steps, [value / unit for value in values], mark + style, color=colour, lw=1.4, label=label)
        axes.set_ylim(bottom, top)

    return draw


def _accuracy(axes: Axes, run: Run) -> None:
    samples = run.setting("eval.samples") or 1
    kind = "greedy" if samples == 1 else f"mean of {samples}"
    curves = [("training samples", "accuracy/train", "C0", "-"), (f"held-out, {kind}", EVAL, "C1", "o")]
    further = [(key.partition("/")[2], key, f"C{i % 10}", "o") for i, key in enumerate(run.named(FURTHER).values(), 2)]
    _curves([*curves, *further], top=1.02)(axes, run)


def _of_sets(pattern: re.Pattern[str], *, top: float | None = None) -> Draw:
    def draw(axes: Axes, run: Run) -> None:
        curves = [(name, key, f"C{i % 10}", "o-") for i, (name, key) in enumerate(run.named(pattern).items(), 1)]
        _curves(curves, bottom=0 if top else None, top=top)(axes, run)

    return draw


def _stack(layers: Sequence[Curve]) -> Draw:

    def draw(axes: Axes, run: Run) -> None:
        found = [run.finite(metric) for _, metric, *_ in layers]
        steps = sorted({step for of in found for step in of if step > 0})
        columns = range(steps[0], steps[-1] + 1) if steps else range(0)
        edges, below = [step - 0.5 for step in (*columns, columns.stop)], [0.0] * len(columns)
        for (label, _, colour, style), of in zip(layers, found, strict=True):
            top = [base + of.get(step, 0.0) for base, step in zip(below, columns, strict=True)]
            if top != below:
                alpha = 0.35 if style == "pale" else 1.0
                axes.stairs(top, edges, baseline=below, fill=True, color=colour, alpha=alpha, lw=0, label=label)
            below = top

    return draw


def _gap(axes: Axes, run: Run) -> None:
    shown = [value for value in run.finite(GAP).values() if value > 0]
    if not shown:
        return
    _curves([("", GAP, "C0", "-")], bottom=None)(axes, run)
    bound = run.gap_bound
    if bound < math.inf:
        axes.axhline(bound, color="black", ls="--", lw=1, label="train.max_logprob_gap")
        shown.append(bound)
    axes.set_yscale("log")
    axes.set_ylim(10 ** math.floor(math.log10(min(shown))), 2 * 10 ** math.ceil(math.log10(max(shown)) - 1e-9))
    axes.yaxis.set_major_formatter("{x:.0e}")
    axes.yaxis.set_minor_formatter("")


def _by_position(axes: Axes, run: Run) -> None:
    width = 0.8 / len(run.drafters)
    for i, (name, colour) in enumerate(run.drafters.items()):
        key = f"speculation/{name}/".__add__
        sums = {j: run.totals(key(f"accepted_at_{j}"), key(f"drafted_at_{j}")) for j in range(1, MAX_WINDOW + 1)}
        shares = {j + width * (i + 0.5) - 0.4: a / d for j, (a, d) in sums.items() if d > 0}
        if shares:
            axes.bar(list(shares), list(shares.values()), width, color=colour, label=name)
    axes.set(xlabel="position in the draft", ylim=(0, 1.02))


def _predictions(axes: Axes, run: Run) -> None:
    for name, colour in run.drafters.items():
        predicted, measured = (run.finite(f"speculation/{name}/{key}") for key in ("predicted_s", "measured_s"))
        steps = [step for step in predicted if measured.get(step)]
        if steps:
            x, y = ([of[step] for step in steps] for of in (predicted, measured))
            axes.plot(x, y, "o", ms=3.5, alpha=0.6, color=colour, label=name)
    if axes.lines:
        axes.axline((0, 0), slope=1, color="black", ls="--", lw=1, label="equal")
        axes.set(xlabel="predicted", ylabel="measured", xlim=(0, None), ylim=(0, None))
        axes.xaxis.set_major_locator(AutoLocator())


def write(folder: Path, out: Path | None = None) -> Path:
    text, file = page(Run.read(folder)), out or folder / "report.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    return file
