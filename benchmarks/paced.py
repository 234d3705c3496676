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
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks import paced_prediction, paced_turns
from benchmarks.paced_devices import Devices, Setting, script_of, shortened, started, undisturbed
from benchmarks.paced_engine import Passes
from benchmarks.paced_settings import AUTO, AUTO_COUPLED, CONTESTANTS, FASTEST, FIRST_ALONE, OFF, TIE, costs, settings
from benchmarks.paced_turns import Causes
from benchmarks.pictures import draw_timeline, spans
from benchmarks.plots import STYLE, number
from benchmarks.results import RESULTS, Result, Table, likely, machine, publish, stored, write_rows
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.speculation.counters import Counts
from specactor.trace import chrome_trace

BATCHES = 2  # of requests, decoded one after the other
MUCH_BETWEEN = 0.05  # of a pass, between two of plain decoding: more than that, and the machine had other work
BESIDE = ", beside other tests"  # ends the machine of stored rows, by hand: a run does not know what else ran


@dataclass(kw_only=True)
class Seen:
    """Of one contestant in one setting."""

    ratios: list[float] = field(default_factory=list)  # over off, a batch each
    counts: Counts = field(default_factory=Counts)
    passes: Passes = field(default_factory=Passes)
    causes: Causes = field(default_factory=Causes)
    drafter_s: float = 0.0
    timed_s: float = 0.0
    emitted: int = 0

    def add(self, other: Seen) -> None:
        self.ratios += other.ratios
        self.counts += other.counts
        self.passes = add(self.passes, other.passes)
        self.causes.add(other.causes)
        self.drafter_s += other.drafter_s
        self.timed_s += other.timed_s
        self.emitted += other.emitted

    def row(self, setting: Setting, name: str) -> list[str]:
        apart = CONTESTANTS.get(name, OFF).is_decoupled
        engines = setting.verifiers if apart else setting.groups
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
WHEN = ("date", "machine")  # of a row's own measurement: settings are measured on different days
SIMULATED = 3  # place of the simulator's figure, behind the measured one
COLUMNS = (*MEASURED[:SIMULATED], "simulated", *MEASURED[SIMULATED:])
PAIRED = ("tokens per turn", "idle, engines")


def add(one: Passes, other: Passes) -> Passes:
    return Passes(**{name: getattr(one, name) + getattr(other, name) for name in Passes.__struct_fields__})


def turn(devices: Devices, name: str, off_s: Sequence[float], process: DrafterProcess) -> Seen:
    """Let one contestant decode all batches, after one that teaches. Raises DisturbedError."""
    config, seen = CONTESTANTS[name], Seen()
    devices.begin(config)
    prefill_s = devices.decode(shortened(devices.requests[0]), config)
    devices.decode(devices.requests[0], config)
    devices.forget_passes()
    devices.counts(), devices.turns(), process.work(trace=False)
    began_s = time.perf_counter()
    for batch, plain_s in zip(devices.requests, off_s, strict=True):
        seconds = devices.decode(batch, config) - prefill_s
        seen.ratios.append(plain_s / seconds)
        seen.timed_s += seconds
        seen.emitted += sum(r.sampling.max_new_tokens - 1 for r in batch)
    seen.counts, seen.passes = devices.counts(), devices.passes()
    work, turns = process.work(trace=False), devices.turns()
    if config.is_decoupled:
        seen.drafter_s = work.busy_s if work is not None else 0.0
        seen.causes = Causes.of(turns, devices.steps(began_s))
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


Rows = list[list[str]]


def measured(setting: Setting, repetitions: int, *, timeline: Path | None = None) -> tuple[Rows, Rows]:
    """Return the rows of a setting, and those of its turns without drafts. Raises DisturbedError where the machine has
    too much to do for long."""
    seen = {name: Seen() for name in ("off", *CONTESTANTS)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paced-")))
        devices = stack.enter_context(started(setting, folder, batches=BATCHES))
        for _ in range(repetitions):
            off_s, of_off = undisturbed(lambda: off(devices))
            seen["off"].add(of_off)
            for name in CONTESTANTS:
                runner_up = 0.0 if name == FIRST_ALONE else setting.runner_up
                with devices.drafter(script_of(setting, runner_up=runner_up)) as process:
                    seen[name].add(undisturbed(partial(turn, devices, name, off_s, process)))
                    print("  ".join(seen[name].row(setting, name)), flush=True)
                    if timeline is not None and name == "decoupled":
                        draw(devices, process, timeline)
                        timeline = None
    date, _, where = machine().partition(", ")
    pass_s = plain_pass_s(setting)
    return (
        [[*of.row(setting, name), date, where] for name, of in seen.items()],
        [
            of.causes.row(setting.name, name, pass_s)
            for name, of in seen.items()
            if CONTESTANTS.get(name, OFF).is_decoupled
        ],
    )


def plain_pass_s(setting: Setting) -> float:
    """Return the dilated seconds of a group's pass in plain decoding."""
    each = -(-setting.batch // setting.groups)
    return setting.pace.pass_s(each, each)


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


INTRO = """\
The shipped engines, drafter process, protocol and planner, on CPUs: a pass computes real tokens of a tiny model and \
sleeps until the time is over that a roofline of published figures gives for the named model and device, times a \
dilation; drafters sleep for their steps. A setting has equal groups of devices; each has an engine with its share of \
the requests, or one of them drafts for the others (`decoupled`); where a setting names a device that drafts, it comes \
on top for `decoupled`, and its messages take so long each way. Drafters know the right tokens and are wrong as \
often as dialled, some requests more than others; where the first choice is wrong, the second is right as often as the \
cost table says. `text` drafts in the engine at no cost, right with .5 ± .4. In mode auto a request has one of two \
methods, or none; with `fastest of 2` both, in a tree. Responses are equally long, or with a long tail: most a quarter \
of the longest. Medians of batches, with 95 % intervals from six on; every \
response was compared with plain decoding. A turn is a request in a round. Idle is the share of a group's time \
in which its device would have nothing to do. The CSV file has these for all contestants, what the simulator predicts, \
and `computing` and `between`, this machine's own milliseconds, undilated: the tiny model, and what is between two \
passes and after the last of a batch. When the last run began, {load:.1f} \
processes wanted one of {cores} cores.{beside}"""


GREEDY = """\
`auto` takes what emits most tokens of all requests per second, now. Requests that text serves well run ahead, and a \
batch ends with its slowest request: where responses are equally long, `auto: coupled or text` may be slower than \
coupled drafting alone."""


def at_a_glance(rows: Sequence[Sequence[str]]) -> Table:
    """Return a row per setting: tokens/s over off by contestant, of `COLUMNS`, and what coupled and decoupled did."""
    ratio, *both, drafts = map(COLUMNS.index, ("tokens/s over off", *PAIRED, "turns with drafts"))
    by_setting: dict[str, dict[str, Sequence[str]]] = {}
    for row in rows:
        by_setting.setdefault(row[0], {})[row[1]] = row
    found = []
    for name, of in by_setting.items():
        coupled, decoupled = of["coupled"], of["decoupled"]
        pairs = [f"{coupled[column]}, {decoupled[column]}" for column in both]
        found.append([name, *(of[contestant][ratio] for contestant in CONTESTANTS), *pairs, decoupled[drafts]])
    paired = [f"{what}: coupled, decoupled" for what in PAIRED]
    return ("setting", *CONTESTANTS, *paired, "turns with drafts: decoupled"), found


def beside_tests(rows: Sequence[Sequence[str]]) -> str:
    """Say in which settings the machine ran other tests, too."""
    names = dict.fromkeys(row[0] for row in rows if row[-1].endswith(BESIDE))
    if not names:
        return ""
    return (
        " Beside these settings other tests ran on the machine, which costs little where passes sleep (`between` "
        f"tells how much): {'; '.join(names)}."
    )


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


def told_before(page: str) -> tuple[float, int]:
    """Return the load and the cores of a stored page."""
    found = re.search(r"began, ([\d.]+) processes wanted one of (\d+) cores", page)
    assert found is not None, "the page says how busy the machine was"
    return float(found[1]), int(found[2])


def source(rows: Sequence[Sequence[str]]) -> str:
    """Say when and where rows were measured, of which each has date and machine at its end."""
    dates: dict[str, list[str]] = {}
    for *_, date, where in rows:
        dates.setdefault(where, []).append(date)
    spans_of = {where: sorted({min(of), max(of)}) for where, of in dates.items()}
    return "Measured: " + "; ".join(f"{' to '.join(span)}, {where}" for where, span in spans_of.items()) + "."


def busy(rows: Sequence[Sequence[str]], known: Mapping[str, Setting]) -> str:
    """Say in which settings the machine had so much to do that plain decoding was held up between passes."""
    place = COLUMNS.index("between, ms per pass")
    shares = {row[0]: number(row[place]) / 1e3 / plain_pass_s(known[row[0]]) for row in rows if row[1] == "off"}
    over = [f"{name} ({100 * share:.0f} %)" for name, share in shares.items() if share > MUCH_BETWEEN]
    most = f"Between two passes of plain decoding went at most {100 * max(shares.values()):.1f} % of a pass"
    if not over:
        return f"{most}: plain decoding was not held up (bound: {100 * MUCH_BETWEEN:.0f} %)."
    return (
        f"**Plain decoding was held up** in {len(over)} of {len(shares)} settings: between two of its passes went more "
        f"than {100 * MUCH_BETWEEN:.0f} % of a pass, so that their figures are of a disturbed run: "
        f"{'; '.join(over)}."
    )


def run(names: Sequence[str], repetitions: int) -> tuple[Result, Rows]:
    """Measure these settings, without any nothing is new but the predictions; return the page, and all rows about turns
    without drafts."""
    known = settings()
    load, cores = (os.getloadavg()[1], os.cpu_count()) if names else told_before((RESULTS / "paced.md").read_text())
    found: dict[str, Rows] = {}
    turns: dict[str, Rows] = {}
    for name in names:
        timeline = RESULTS / "paced_timeline.svg" if name == next(iter(known)) else None
        found[name], turns[name] = measured(known[name], repetitions, timeline=timeline)
    rows_of = _beside_kept(found, known, "paced", (*MEASURED, *WHEN))
    turns_of = _beside_kept(turns, known, "paced_turns", paced_turns.COLUMNS)
    rows = beside_predictions([row for of in rows_of.values() for row in of], known)
    shown = [row[: len(COLUMNS)] for row in rows]
    turn_rows = [row for of in turns_of.values() for row in of]
    parts = [
        busy(shown, known),
        paced_prediction.errors(shown, SIMULATED - 1, SIMULATED),
        GREEDY,
        paced_turns.described([row for row in turn_rows if row[1] == "decoupled"]),
        "Costs, in ms before dilation:",
        costs([known[name] for name, of in rows_of.items() if of], {row[0]: row[-2] for row in rows}),
        "![Rounds of the first setting, and what its drafter does meanwhile](paced_timeline.svg)",
    ]
    result = Result(
        title="Drafting at the pace of GPUs",
        verdict=verdict([row for row in shown if known[row[0]].drafter is None]),
        intro=INTRO.format(load=load, cores=cores, beside=beside_tests(rows)),
        columns=(*COLUMNS, *WHEN),
        rows=rows,
        summary=at_a_glance(shown),
        notes="\n\n".join(part for part in parts if part),
        source=source(rows),
    )
    return result, turn_rows


def _beside_kept(
    found: Mapping[str, Rows], known: Mapping[str, Setting], name: str, columns: Sequence[str]
) -> dict[str, Rows]:
    """Return what was found by setting, or is stored of one that was not run."""
    there = stored(name) if (RESULTS / f"{name}.csv").exists() else []
    kept = [[row[column] for column in columns] for row in there]
    return {setting: found.get(setting) or [row for row in kept if row[0] == setting] for setting in known}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--settings", nargs="+", type=int, help="numbers, from 1; default: all")
    parser.add_argument("--page-only", action="store_true", help="run nothing, predict stored settings again")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that engines are stopped
    names = list(settings())
    chosen = [] if options.page_only else [names[k - 1] for k in options.settings or range(1, len(names) + 1)]
    result, turn_rows = run(chosen, options.repetitions)
    if turn_rows:
        write_rows("paced_turns", paced_turns.COLUMNS, turn_rows)
    publish("paced", result)


if __name__ == "__main__":
    main()
