"""Coupled and decoupled drafting on the same two cores, and whether the planner knew which would win.

    python -m benchmarks.decoupled_speed [--quick] [--batches 1 4 ...] [--repetitions 3]

Plain and coupled decoding use two engines of one core each, with half of the requests each; decoupled, pre-drafting
(decoupled with `branches`) and auto, one engine with all requests on a core, and one drafter process on the other. In
every round auto chooses for each request: off, drafting in the engine, or what the drafter process (without branches)
has drafted; it cannot become two engines. Drafters are a trained draft model, and `dialled` ones of known cost and
acceptance. What is predicted comes from rounds that were timed before, on other requests.

Invariants: every response is what plain decoding emits, which is checked; contestants take turns, and all have decoded
these requests once when they are timed, so that costs and acceptance are known to them; prefills are left out of all
times (each run is timed again with a single token, and that is subtracted).
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.decoupled_speed_bench import MAX_WINDOW, NEW_TOKENS, Bench, Way, bench, drafters, speculation
from benchmarks.decoupled_speed_table import COLUMNS, INTRO, MODES, Cell, Progress, aims
from benchmarks.dialled import Script
from benchmarks.dialled_branches import HIT_RATE
from benchmarks.results import Result, publish
from benchmarks.trained_models import Models, task_models
from specactor.rollout.draft.counts import Counts
from specactor.rollout.planning.costs import CostTable, Grid, Point
from specactor.rollout.planning.plans import (
    NO_BRANCHES,
    Branches,
    Cluster,
    DrafterEngine,
    DrafterOption,
    VerifierOption,
)
from specactor.rollout.planning.rounds import survival_of
from specactor.rollout.planning.search import search

BATCHES = (1, 4, 8, 16)
ACCEPTANCES = (0.6, 0.8, 0.9)
SHARES = (0.1, 0.3)
"""Of a plain step, what a dialled drafter's step takes."""
PROFILED = (0, 1, 2, 3, 4, 6, 8)
"""Windows."""
BRANCHES = (1, 2, 4)
"""Per request, of which the planner's best counts."""
START_S = 12.0
"""Of the two drafter processes of a cell, about; for the time left."""
QUICK_BATCHES = (1, 16)
QUICK_DIALS = ((0.3, 0.8),)
"""(share, acceptance)"""
FILLER = "specactor.rollout.draft.filler:Filler"
# ------------------------------------------------------------------------------------------------------------- profile


def profile(bench: Bench, note: Callable[[str], None]) -> CostTable:
    """Rounds of every batch and window on one core, with drafts that are wrong; and the trained model's drafting."""
    plain: list[Point] = []
    verifies: list[Point] = []
    drafts: list[Point] = []
    sizes = sorted({size for batch in bench.requests for size in (batch, -(-batch // 2))})
    for size in sizes:
        batch = min(b for b in bench.requests if b >= size)
        some = [replace(r, request_id=f"{r.request_id}.profile", seed=r.seed + 1) for r in bench.requests[batch][:size]]
        for window in PROFILED:
            bench.configure(speculation("coupled", FILLER, window), bench.engines[:1])
            bench.expected.clear()
            bench.decode(some, bench.engines[:1])
            found = [point for point in bench.rounds().verifies if point[0] == size]
            verifies += found
            plain += found if window == 0 else []
        for window in (1, 2, 4, 8):
            bench.configure(speculation("coupled", "model", window), bench.engines[:1])
            bench.decode(some, bench.engines[:1])
            drafts += [p for p in bench.rounds().drafts.get("model", []) if p[0] == size]
        note(f"profiled: {size} requests")
    bench.expected.clear()
    return CostTable.fit(verifies, plain=plain, drafters={"model": drafts})


def predicted(table: CostTable, way: Way, survival: tuple[float, ...], hit_rate: float, batch: int) -> dict[str, float]:
    """Tokens per second of the best plan of every mode, by the planner's search; 0 where there is none. Of auto: the
    best of the plans with one engine. `hit_rate`: P(a second choice is right | the draft token is the first wrong one).
    """
    if way.share is None:
        grid = table.drafters["model"]
    else:
        axis = table.plain.requests
        each = [way.share * table.plain_s(round(n)) for n in axis]
        windows = tuple(float(w) for w in range(1, MAX_WINDOW + 2))
        grid = Grid(requests=axis, per_request=windows, seconds=tuple(tuple(w * s for w in windows) for s in each))

    def best(devices: int, branches: Branches = NO_BRANCHES) -> dict[str, float]:
        plans = search(
            Cluster(devices=devices, requests=batch),
            [VerifierOption(devices=1, costs=replace(table, drafters={way.name: grid}))],
            [DrafterOption(name=way.name, survival=survival, engines=(DrafterEngine(devices=1, seconds=grid),))],
            max_window=MAX_WINDOW,
            branches=branches,
        )
        speeds: dict[str, float] = {}
        for plan in plans:
            speeds[plan.mode] = max(speeds.get(plan.mode, 0.0), plan.tokens_per_s)
        return speeds

    two, one = best(2), best(1)
    ended = 1.0 - survival[-1]
    ahead = [
        Branches(count=count, hit_rate=hit_rate * (1.0 - survival[count - 1]) / ended)
        for count in BRANCHES
        if ended > 0
    ]
    elsewhere = two.get("decoupled", 0.0)
    return {
        "off": two["off"],
        "coupled": two.get("coupled", 0.0),
        "decoupled": elsewhere,
        "pre-drafting": max((best(2, branches).get("decoupled", 0.0) for branches in ahead), default=elsewhere),
        "auto": max(*one.values(), elsewhere),
    }


# ------------------------------------------------------------------------------------------------------------- measure


def measure(bench: Bench, way: Way, batch: int, repetitions: int) -> tuple[dict[str, float], tuple[float, ...], float]:
    """(tokens per second by mode, survivals as they were seen, hit rate of branches as it was seen)."""
    tokens = bench.requests[batch]
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    seen, ahead, branched = Counts(), Counts(), 0.0
    with drafters(bench, way):
        for repetition in range(repetitions):
            for mode in MODES if repetition % 2 else MODES[::-1]:
                engines = bench.of(mode)
                bench.configure(speculation(mode, way.in_engine), engines)
                if mode != "off" or repetition == 0:  # the others learn what things cost, and how good drafts are
                    bench.decode(tokens, engines)
                seconds[mode].append(bench.seconds(tokens, engines))
                if mode == "coupled":
                    seen += bench.counts()
                if mode == "pre-drafting":
                    ahead, branched = ahead + bench.counts(), branched + bench.branched()
    emitted = batch * (NEW_TOKENS - 1)
    survival = survival_seen(seen)
    chained = (1.0, *survival)
    rejections = sum(n * (a - b) for n, a, b in zip(ahead.drafted_at, chained, survival, strict=False))
    hit_rate = min(1.0, branched / rejections) if rejections else 0.0
    return {mode: emitted / median(values) for mode, values in seconds.items()}, survival, hit_rate


def survival_seen(counts: Counts) -> tuple[float, ...]:
    """P(the first j draft tokens are accepted), j = 1 .. MAX_WINDOW; 0 where none was drafted."""
    survival, alive = [], 1.0
    for accepted, drafted in list(zip(counts.accepted_at, counts.drafted_at, strict=True))[:MAX_WINDOW]:
        alive = min(alive, accepted / drafted if drafted else 0.0)
        survival.append(alive)
    return tuple(survival)


def ways(
    bench: Bench, models: Models, table: CostTable, batch: int, dials: Sequence[tuple[float, float]]
) -> Iterator[Way]:
    """The trained model, then dialled drafters; the script is there when a dialled one is given out."""
    yield Way(name="trained model", in_engine="model", continuer="model", model_dir=str(models.draft))
    for share, acceptance in dials:
        path = bench.folder / "script.json"
        script = Script(
            acceptance=acceptance,
            step_s=[share * table.plain_s(n) for n in range(1, batch + 1)],
            outputs={str(r.seed): list(bench.expected[r.request_id]) for r in bench.requests[batch]},
        )
        path.write_bytes(msgspec.json.encode(script))
        yield Way(
            name=f"dialled, {share:g} of a plain step",
            in_engine="benchmarks.dialled:InEngine",
            continuer="benchmarks.dialled:Elsewhere",
            model_dir=str(path),
            acceptance=acceptance,
            share=share,
        )


def run(
    batches: Sequence[int], repetitions: int, dials: Sequence[tuple[float, float]], note: Callable[[str], None]
) -> Result:
    """Args: (share of a plain step, acceptance) of every dialled drafter."""
    models = task_models("B")
    cells: list[Cell] = []
    with (
        tempfile.TemporaryDirectory(prefix="decoupled-speed-") as folder,
        bench(models, batches, Path(folder)) as found,
    ):
        note("engines are started")
        table = profile(found, note)
        weights = [START_S + 9 * repetitions * NEW_TOKENS * table.plain_s(b) for b in batches]
        costs = [weight for weight in weights for _ in range(1 + len(dials))]
        progress = Progress(costs, time.monotonic())
        for batch in batches:
            for way in ways(found, models, table, batch, dials):
                measured, seen, hit_rate = measure(found, way, batch, repetitions)
                survival, branches_right = seen, f"branches right: {hit_rate:.2f}"
                if way.acceptance is not None:
                    survival, hit_rate = survival_of(way.acceptance, MAX_WINDOW), HIT_RATE
                foreseen = predicted(table, way, survival, hit_rate, batch)
                cells.append(
                    Cell(drafter=way.name, acceptance=survival[0], batch=batch, measured=measured, foreseen=foreseen)
                )
                done = f"{len(cells)}/{len(costs)} {progress.over(time.monotonic())}"
                note(f"{done}: {' '.join(cells[-1].row())} ({branches_right})")
    for line in aims(cells):
        note(line)
    return Result(
        title="Coupled and decoupled drafting on two cores",
        intro=INTRO.format(tokens=NEW_TOKENS, repetitions=repetitions, hit_rate=HIT_RATE),
        columns=COLUMNS,
        rows=[cell.row() for cell in cells],
        notes="\n".join(f"- {line}" for line in aims(cells)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few batches and dials: about 4 minutes, for all 15")
    parser.add_argument("--batches", nargs="+", type=int, help=f"default: {BATCHES}")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    batches = options.batches or (QUICK_BATCHES if options.quick else BATCHES)
    dials = QUICK_DIALS if options.quick else tuple(product(SHARES, ACCEPTANCES))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that engines are stopped
    began_s = time.monotonic()

    def note(text: str) -> None:
        print(f"[{time.monotonic() - began_s:.0f} s] {text}", flush=True)

    result = run(batches, options.repetitions, dials, note)
    publish("decoupled_speed", result)


if __name__ == "__main__":
    main()
