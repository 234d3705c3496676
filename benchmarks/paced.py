"""Coupled and decoupled drafting at the pace of real devices, on equal numbers of them.

    python -m benchmarks.paced [--settings NUMBER ... | --page-only] [--repetitions 3]

The shipped engines, drafter process, protocol and planner run; a pass and a draft step take as long as on the devices
that a setting names (`paced_engine`, `paced_devices`). Settings that are not run keep their rows of the stored page;
with `--page-only` none is run, and the page is written again with what the simulator predicts now.

Invariants: every response is what plain decoding emits, which is checked; contestants take turns, and know costs and
acceptance from a batch that they decoded before; prefills are left out of all times (those of a single token).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks import paced_prediction
from benchmarks.paced_devices import (
    MAX_WINDOW,
    Devices,
    Setting,
    flat,
    published,
    script_of,
    shortened,
    started,
    undisturbed,
)
from benchmarks.paced_engine import Passes
from benchmarks.pictures import draw_timeline, spans
from benchmarks.plots import STYLE, number
from benchmarks.results import RESULTS, Result, likely, markdown, publish, stored
from specactor.config import SpeculationConfig
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.speculation.counters import Counts
from specactor.trace import chrome_trace

BATCHES = 2  # of requests, decoded one after the other
DENSE = {"target": "Qwen2.5-32B", "gpu": "H100"}
EXPERTS = {"target": "Qwen3-235B-A22B", "draft": "Qwen3-0.6B", "gpu": "H200", "devices": 8, "context": 4096}


COUPLED, TEXT = "benchmarks.dialled:InEngine", "benchmarks.dialled:Text"


def ways(*drafters: str, mode: str, fastest_of: int = 1) -> SpeculationConfig:
    return SpeculationConfig(
        mode=mode,  # type: ignore[arg-type]
        drafters=drafters,
        fastest_of=fastest_of,
        max_window=MAX_WINDOW,
        draft_model=("there",),
    )


FIRST_ALONE = "decoupled, first choices alone"
AUTO, AUTO_COUPLED = "auto: decoupled or text", "auto: coupled or text"
FASTEST = "fastest of 2: decoupled and text"
TIE = 1.03  # times as fast, below which two are taken for equal
CONTESTANTS = {
    "coupled": ways(COUPLED, mode="coupled"),
    "decoupled": ways("decoupled", mode="decoupled"),
    FIRST_ALONE: ways("decoupled", mode="decoupled"),
    AUTO_COUPLED: ways(COUPLED, TEXT, mode="auto"),
    AUTO: ways("decoupled", TEXT, mode="auto"),
    FASTEST: ways("decoupled", TEXT, mode="auto", fastest_of=2),
}
OFF = SpeculationConfig()


def settings() -> dict[str, Setting]:
    """Return all, by name."""
    short = {**DENSE, "draft": "Qwen2.5-1.5B", "devices": 8, "context": 1024}
    long = {**DENSE, "draft": "Qwen2.5-0.5B", "devices": 4, "context": 4096}
    at64 = published(**long, most=64, dilation=20.0)  # type: ignore[arg-type]
    found = [
        Setting(name="a draft step takes a quarter of a pass, batch 8", pace=flat(0.080, 0.020, dilation=1.5), batch=8),
        *(
            Setting(
                name=f"32B on 8 H100, 1.5B drafts, 1k context, batch {batch}",
                pace=published(**short, most=batch, dilation=dilation),  # type: ignore[arg-type]
                batch=batch,
                spread=0.1,
                tokens=tokens,
            )
            for batch, tokens, dilation in ((8, 96, 30.0), (32, 96, 30.0), (64, 64, 60.0), (128, 64, 60.0))
        ),
        *(
            Setting(
                name=f"32B on 8 H100, 1.5B drafts, 1k context, batch {batch}, long tail",
                pace=published(**short, most=batch, dilation=60.0),  # type: ignore[arg-type]
                batch=batch,
                spread=0.1,
                tokens=128,
                tail=True,
            )
            for batch in (64, 128)
        ),
        Setting(
            name="32B on 4 H100, 0.5B drafts, 4k context, batch 16",
            pace=published(**long, most=16, dilation=16.0),  # type: ignore[arg-type]
            batch=16,
            spread=0.1,
        ),
        *(
            Setting(
                name=f"the same, batch 64, {groups - 1} engines of {groups} when decoupled",
                pace=at64,
                batch=64,
                groups=groups,
                spread=0.1,
                tokens=64,
            )
            for groups in (2, 4)
        ),
        Setting(
            name="235B of experts on 8 H200, 0.6B drafts, 4k context, batch 32",
            pace=published(**EXPERTS, most=32, dilation=8.0),  # type: ignore[arg-type]
            batch=32,
            spread=0.1,
        ),
    ]
    return {setting.name: setting for setting in found}


@dataclass(kw_only=True)
class Seen:
    """Of one contestant in one setting."""

    ratios: list[float] = field(default_factory=list)  # over off, a batch each
    counts: Counts = field(default_factory=Counts)
    passes: Passes = field(default_factory=Passes)
    drafter_s: float = 0.0
    timed_s: float = 0.0
    emitted: int = 0

    def add(self, other: Seen) -> None:
        self.ratios += other.ratios
        self.counts += other.counts
        self.passes = add(self.passes, other.passes)
        self.drafter_s += other.drafter_s
        self.timed_s += other.timed_s
        self.emitted += other.emitted

    def row(self, setting: Setting, name: str) -> list[str]:
        apart = CONTESTANTS.get(name, OFF).is_decoupled
        engines = setting.groups - apart
        turns = max(1, self.emitted - self.counts.accepted)
        device_s = engines * self.timed_s
        return [
            setting.name,
            name,
            likely(self.ratios) if len(self.ratios) > 5 else f"{median(self.ratios):.2f}",
            f"{self.emitted / turns:.2f}",
            f"{(self.counts.drafted_at[0] if self.counts.drafted_at else 0) / turns:.2f}",
            f"{1 - self.passes.busy_s / device_s:.2f}",
            f"{1 - self.drafter_s / self.timed_s:.2f}" if apart else "-",
            f"{1e3 * self.passes.own_s / self.passes.passes:.1f}",
            f"{1e3 * max(0.0, device_s - self.passes.busy_s) / self.passes.passes:.1f}",
            str(len(self.ratios)),
        ]


MEASURED = (
    "setting",
    "contestant",
    "tokens/s over off",
    "tokens per turn",
    "turns with drafts",
    "idle, engines",
    "idle, drafter",
    "computing, ms per pass",
    "between, ms per pass",
    "batches",
)
SIMULATED = 3  # place of the simulator's figure, behind the measured one
COLUMNS = (*MEASURED[:SIMULATED], "simulated", *MEASURED[SIMULATED:])


def add(one: Passes, other: Passes) -> Passes:
    return Passes(**{name: getattr(one, name) + getattr(other, name) for name in Passes.__struct_fields__})


def turn(devices: Devices, name: str, off_s: Sequence[float], process: DrafterProcess) -> Seen:
    """Let one contestant decode all batches, after one that teaches. Raises DisturbedError."""
    config, seen = CONTESTANTS[name], Seen()
    devices.begin(config)
    prefill_s = devices.decode(shortened(devices.requests[0]), config)
    devices.decode(devices.requests[0], config)
    devices.forget_passes()
    devices.counts(), process.work(trace=False)
    for batch, plain_s in zip(devices.requests, off_s, strict=True):
        seconds = devices.decode(batch, config) - prefill_s
        seen.ratios.append(plain_s / seconds)
        seen.timed_s += seconds
        seen.emitted += sum(r.sampling.max_new_tokens - 1 for r in batch)
    seen.counts, seen.passes = devices.counts(), devices.passes()
    work = process.work(trace=False)
    seen.drafter_s = work.busy_s if work is not None and config.is_decoupled else 0.0
    return seen


def off(devices: Devices) -> tuple[list[float], Seen]:
    """Return the seconds of every batch without drafts. Raises DisturbedError."""
    devices.begin(OFF)
    prefill_s = devices.decode(shortened(devices.requests[0]), OFF)
    devices.forget_passes()
    found = [devices.decode(batch, OFF) - prefill_s for batch in devices.requests]
    emitted = sum(r.sampling.max_new_tokens - 1 for batch in devices.requests for r in batch)
    ones = [1.0] * len(found)
    return found, Seen(ratios=ones, passes=devices.passes(), timed_s=sum(found), emitted=emitted)


def measured(setting: Setting, repetitions: int, *, timeline: Path | None = None) -> list[list[str]]:
    """Return the rows of a setting. Raises DisturbedError where the machine has too much to do for long."""
    seen = {name: Seen() for name in ("off", *CONTESTANTS)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paced-")))
        devices = stack.enter_context(started(setting, folder, batches=BATCHES))
        for _ in range(repetitions):
            off_s, of_off = undisturbed(lambda: off(devices))
            seen["off"].add(of_off)
            for name in CONTESTANTS:
                second = 0.0 if name == FIRST_ALONE else setting.second
                with devices.drafter(script_of(setting, second=second)) as process:
                    seen[name].add(undisturbed(partial(turn, devices, name, off_s, process)))
                    print("  ".join(seen[name].row(setting, name)), flush=True)
                    if timeline is not None and name == "decoupled":
                        draw(devices, process, timeline)
                        timeline = None
    return [of.row(setting, name) for name, of in seen.items()]


def draw(devices: Devices, process: DrafterProcess, path: Path) -> None:
    """Draw half a second of rounds above what the drafter does meanwhile."""
    devices.trace(on=True)
    process.work(trace=True)
    devices.decode(devices.requests[1], CONTESTANTS["decoupled"])
    work = process.work(trace=False)
    assert work is not None
    found = spans(json.loads(chrome_trace({"engine 0": devices.trace(on=False), "drafter 0": work.spans})))
    with rc_context(STYLE):
        figure = Figure(figsize=(8.6, 2.1), layout="constrained")
        draw_timeline(figure.add_subplot(), found, window_ms=(400.0, 1600.0))
        figure.savefig(path, metadata={"Date": None})


def costs(known: Sequence[Setting]) -> str:
    """The cost table, in milliseconds before dilation."""
    rows = []
    for setting in known:
        engines, each = setting.groups, -(-setting.batch // setting.groups)
        own = setting.pace
        rows.append(
            [
                setting.name,
                f"{engines} x {each}",
                f"{1e3 * own.plain.at(each, 1):.2f}",
                f"{1e3 * own.verify.at(each, 4):.2f}",
                f"{1e3 * own.draft.at(each, 1):.2f}",
                f"{1e3 * own.draft.at(setting.batch, 1):.2f}, {1e3 * own.draft.at(4 * setting.batch, 1):.2f}",
                f"{setting.acceptance:g} ± {setting.spread:g}",
                f"{setting.second:g}",
                f"{own.dilation:g}",
            ]
        )
    return markdown(
        (
            "setting",
            "groups x requests",
            "plain pass",
            "4 rows per request",
            "draft step",
            "of all requests, and four times as many",
            "acceptance",
            "second choice",
            "dilation",
        ),
        rows,
    )


INTRO = """\
The shipped engines, drafter process, protocol and planner, on CPUs: a pass computes real tokens of a tiny model and \
sleeps until the time is over that a roofline of published figures gives for the named model and device, times a \
dilation; drafters sleep for their steps. A setting has equal groups of devices; each has an engine with its share of \
the requests, or one of them drafts for the others (`decoupled`). Drafters know the right tokens and are wrong as \
often as dialled, some requests more than others; where the first choice is wrong, the second is right as often as the \
cost table says. `text` drafts in the engine at no cost, right with .5 ± .4. In mode auto a request has one of two \
methods, or none; with `fastest of 2` both, in a tree. Responses are equally long, or with a long tail: most a quarter \
of the longest. Medians of batches, with 95 % intervals from six on; every \
response was compared with plain decoding. `simulated`: what the simulator \
predicts. A turn is a request in a round. Idle is the share of a group's time \
in which its device would have nothing to do. Computing and `between` are this machine's own milliseconds, undilated: \
the tiny model, and what is between two passes and after the last of a batch. When the last run began, {load:.1f} \
processes wanted one of {cores} cores."""


def verdict(rows: Sequence[Sequence[str]]) -> str:
    """Say who wins where."""
    by_setting: dict[str, dict[str, float]] = {}
    for setting, name, ratio, *_ in rows:
        by_setting.setdefault(setting, {})[name] = number(ratio)
    wins = [name for name, of in by_setting.items() if of.get("decoupled", 0) > TIE * of.get("coupled", 0)]
    best = max(by_setting, key=lambda name: by_setting[name].get("decoupled", 0) / by_setting[name].get("coupled", 1))
    gains = [of["decoupled"] / of[FIRST_ALONE] for of in by_setting.values()]
    worth = f"{min(gains):.2f}" + (f" to {max(gains):.2f}" if len(gains) > 1 else "")
    text = with_text([of for of in by_setting.values() if AUTO in of])
    return (
        f"Decoupled drafting is faster than coupled drafting on as many devices in {len(wins)} of {len(by_setting)} "
        f"settings, by more than {100 * (TIE - 1):.0f} %; at best {by_setting[best]['decoupled']:.2f} beside "
        f"{by_setting[best]['coupled']:.2f} times plain decoding ({best}). Drafting on from second choices makes it "
        f"{worth} times as fast as without.{text}"
    )


def with_text(found: Sequence[Mapping[str, float]]) -> str:
    """Say what engines gain that may draft over text as well."""
    if not found:
        return ""

    def between(ratios: Sequence[float]) -> str:
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    return (
        f" With a drafter over text beside it (`auto`) decoupled drafting has {between([of[AUTO] for of in found])}, "
        f"coupled drafting {between([of[AUTO_COUPLED] for of in found])}; both methods in one tree are "
        f"{between([of[FASTEST] / of[AUTO] for of in found])} times as fast as one of them per request."
    )


def beside_predictions(rows: Sequence[Sequence[str]], known: Mapping[str, Setting]) -> list[list[str]]:
    """Return rows with what the simulator predicts of their setting and mode."""
    place = MEASURED.index("between, ms per pass")
    host_s = {row[0]: number(row[place]) / 1e3 for row in rows if row[1] == "off"}
    predicted = {name: paced_prediction.over_off(known[name], host_s[name]) for name in host_s}
    found = []
    for row in rows:
        ratio = predicted[row[0]].get("decoupled" if row[1] == FIRST_ALONE else row[1])
        found.append([*row[:SIMULATED], "-" if ratio is None else f"{ratio:.2f}", *row[SIMULATED:]])
    return found


def told_before(page: str) -> tuple[float, int, str]:
    """Return (load, cores, date and machine) of a stored page."""
    busy = re.search(r"began, ([\d.]+) processes wanted one of (\d+) cores", page)
    assert busy is not None, "the page says how busy the machine was"
    return float(busy[1]), int(busy[2]), page.strip().rpartition("\n\n")[2]


def run(names: Sequence[str], repetitions: int) -> Result:
    """Measure these settings; without any nothing is new but the predictions."""
    known = settings()
    load, cores, source = os.getloadavg()[1], os.cpu_count(), ""
    if not names:
        load, cores, source = told_before((RESULTS / "paced.md").read_text())
    found: dict[str, list[list[str]]] = {}
    for name in names:
        timeline = RESULTS / "paced_timeline.svg" if name == next(iter(known)) else None
        found[name] = measured(known[name], repetitions, timeline=timeline)
    kept = [[row[name] for name in MEASURED] for row in stored("paced")] if (RESULTS / "paced.csv").exists() else []
    rows_of = {name: found.get(name) or [row for row in kept if row[0] == name] for name in known}
    rows = beside_predictions([row for name in known for row in rows_of[name]], known)
    shown = [known[name] for name in known if rows_of[name]]
    return Result(
        title="Drafting at the pace of GPUs",
        verdict=verdict(rows),
        intro=INTRO.format(load=load, cores=cores),
        columns=COLUMNS,
        rows=rows,
        notes=paced_prediction.errors(rows, SIMULATED - 1, SIMULATED)
        + "\n\nCosts, in ms before dilation:\n\n"
        + costs(shown)
        + "\n\n![Rounds of the first setting, and what its drafter does meanwhile](paced_timeline.svg)",
        source=source,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--settings", nargs="+", type=int, help="numbers, from 1; default: all")
    parser.add_argument("--page-only", action="store_true", help="run nothing, predict stored settings again")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that engines are stopped
    names = list(settings())
    chosen = [] if options.page_only else [names[k - 1] for k in options.settings or range(1, len(names) + 1)]
    publish("paced", run(chosen, options.repetitions))


if __name__ == "__main__":
    main()
