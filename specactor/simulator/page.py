"""One HTML page of simulated runs: tables, what devices did, and how the long tail ran out.

Invariants: as of `specactor.report`: the page needs nothing but itself, texts are escaped, equal runs give an equal
page.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from specactor.report import LOOK, PAGE, POLICY, STYLE
from specactor.simulator.ledger import KINDS, Span
from specactor.simulator.steps import Run

Rows = Sequence[Sequence[str]]
GANTT_DEVICES = 128
"""Rows of a chart at most; of more devices, evenly spread ones are shown."""
GAP_SHARE = 0.002
"""Of the time axis: shorter gaps between equal spans are not drawn."""


def page(title: str, runs: Mapping[str, Run], facts: Rows, summary: Rows) -> str:
    """The whole page. `facts`: (name, value); `summary`: a heading, then a row per run."""
    cards = _table("What was simulated", facts, heading=False) + _table("Results", summary, heading=True)
    tail = _figure("Long tail", "requests that still run, first step", lambda axes: _tail(axes, runs))
    charts = "".join(
        _figure(f"{name}: what devices did", "one row per device, all steps", _gantt(run), wide=True)
        for name, run in runs.items()
    )
    body = (
        f"<header><h1>{escape(title)}</h1><p>Simulated, in virtual time. Nothing was run.</p></header>"
        f'<h2>Run</h2>\n<div class="grid">{cards}</div>\n<h2>Time</h2>\n<div class="grid">{tail}{charts}</div>'
    )
    return PAGE.format(policy=POLICY, title=escape(title), style=STYLE, body=body)


def drawn(spans: Sequence[Span], devices: int, seconds: float) -> list[tuple[int, float, float, str]]:
    """(row, start_s, seconds, kind) of the devices that are shown, without gaps that nobody would see."""
    step = max(1, -(-devices // GANTT_DEVICES))
    last: dict[int, int] = {}
    out: list[tuple[int, float, float, str]] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        for device in range(-(-span.first // step) * step, span.first + span.devices, step):
            i = last.get(device)
            if i is not None and out[i][3] == span.kind and span.start_s - sum(out[i][1:3]) <= GAP_SHARE * seconds:
                out[i] = (out[i][0], out[i][1], span.end_s - out[i][1], span.kind)
            else:
                last[device] = len(out)
                out.append((device // step, span.start_s, span.end_s - span.start_s, span.kind))
    return out


def _gantt(run: Run) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        bars = drawn(run.spans, run.job.devices, run.seconds)
        for kind in KINDS:
            some = [bar for bar in bars if bar[3] == kind]
            if some:
                rows, starts, lengths = zip(*[bar[:3] for bar in some], strict=True)
                axes.barh(rows, lengths, left=starts, height=1.0, color=KINDS[kind], lw=0)
        kinds = [kind for kind in KINDS if any(bar[3] == kind for bar in bars)]
        axes.legend(
            handles=[Patch(color=KINDS[kind], label=kind) for kind in kinds],
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=len(kinds),
            fontsize=8,
        )
        axes.set(xlabel="seconds", ylabel="device", xlim=(0, run.seconds), ylim=(max(b[0] for b in bars) + 0.5, -0.5))
        axes.grid(visible=False)

    return draw


def _tail(axes: Axes, runs: Mapping[str, Run]) -> None:
    for name, run in runs.items():
        ends = np.sort(run.steps[0].outcome.finish_s)
        axes.step(np.concatenate([[0.0], ends]), np.arange(len(ends), -1, -1), where="post", lw=1.4, label=name)
    axes.set(xlabel="seconds", ylabel="requests", xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize=8)


def _figure(title: str, unit: str, draw: Callable[[Axes], None], *, wide: bool = False) -> str:
    with rc_context(LOOK):
        figure = Figure(figsize=(9.5, 3.6) if wide else (4.6, 3.0), layout="constrained")
        draw(figure.add_subplot())
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    data = base64.b64encode(file.getvalue()).decode()
    style = ' style="max-width:none"' if wide else ""
    return (
        f'<figure class="card{" wide" * wide}"><figcaption>{escape(title)} <small>{escape(unit)}</small></figcaption>'
        f'<img alt="{escape(title)}, {escape(unit)}"{style} src="data:image/svg+xml;base64,{data}"></figure>\n'
    )


def _table(title: str, rows: Rows, *, heading: bool) -> str:
    cells = [[escape(cell) for cell in row] for row in rows]
    head = cells.pop(0) if heading else []
    body = "".join(f"<tr><th>{name}</th><td>{'</td><td>'.join(rest)}</td></tr>\n" for name, *rest in cells)
    top = f"<thead><tr><th>{'</th><th>'.join(head)}</th></tr></thead>" if heading else ""
    kind = "card numbers wide" if heading else "card wide"
    return f'<div class="{kind}"><table><caption>{escape(title)}</caption>{top}<tbody>{body}</tbody></table></div>'
