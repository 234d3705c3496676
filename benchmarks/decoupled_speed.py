"""Coupled and decoupled drafting on the same two cores, and whether the planner knew which would win.

    python -m benchmarks.decoupled_speed [--quick] [--batches 1 4 ...] [--repetitions 3]

Plain and coupled decoding use two engines of one core each, with half of the requests each; decoupled decoding, one
engine with all requests on a core, and one drafter process on the other. Auto is
measured in both layouts, and counts in the one that is planned for the cell: in every round it chooses for each
request off, drafting in the engine, or what the drafter process has drafted. Drafters are a trained
draft model, and `dialled` ones of known cost and acceptance. What is predicted comes from rounds that were timed
before, on other requests.

Invariants: every response is what plain decoding emits, which is checked; contestants take turns, each between two
decodings without drafts, which it is compared with, and each has decoded a group of these requests when it is timed, so
that costs and acceptance are known to it; prefills are left out of all times (the median of decoding a single token).
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.decoupled_speed_bench import GROUPS, MAX_WINDOW, NEW_TOKENS, Bench, Way, bench, drafter
from benchmarks.decoupled_speed_profile import Profile, profile
from benchmarks.decoupled_speed_table import (
    AUTO_APART,
    AUTO_TOGETHER,
    COLUMNS,
    CONTESTANTS,
    INTRO,
    MARGIN,
    Cell,
    Progress,
    aims,
    drafts_elsewhere,
    means,
    planned,
    summary,
    verdict,
)
from benchmarks.decoupled_speed_turns import DRAFTING, Turns, as_dialled, pace_of
from benchmarks.dialled import Script
from benchmarks.results import Result, publish
from benchmarks.trained_models import Models, task_models
from specactor.planning.plans import (
    Cluster,
    DrafterEngine,
    DrafterOption,
    RolloutPlan,
    VerifierOption,
)
from specactor.planning.search import search
from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.costs import CostTable
from specactor.rollout.speculation.counters import Counts

BATCHES = (1, 4, 8, 16)
ACCEPTANCES = (0.6, 0.8, 0.9)
SHARES = (0.1, 0.3)  # of a plain step, what a dialled drafter's step takes
START_S = 12.0  # of the drafter process of a cell, about; for the time left
WORK = 4 * (1 + 2 * GROUPS)  # groups that a repetition decodes, of all contestants; for the same
QUICK_BATCHES = (1, 16)
QUICK_DIALS = ((0.3, 0.8),)  # (share, acceptance)
# ------------------------------------------------------------------------------------------------------------- predict


def predicted(
    found: Profile, way: Way, survival: tuple[float, ...], batch: int
) -> tuple[dict[str, float], RolloutPlan | None]:
    """(tokens per second of the best plan of every mode, by the planner's search, 0 where there is none; the decoupled
    plan). Of auto: the best in the layout that is planned."""
    grid = found.drafting(way)
    costs = replace(found.table, drafters={way.name: grid})
    engine = DrafterEngine(devices=1, seconds=grid, token_s=found.token_s(way))

    def best(devices: int) -> dict[str, RolloutPlan]:
        """By mode."""
        plans = search(
            Cluster(devices=devices, requests=batch),
            [VerifierOption(devices=1, costs=costs, ahead_s=found.ahead_s)],
            [DrafterOption(name=way.name, survival=survival, engines=(engine,))],
            max_window=MAX_WINDOW,
        )
        return {plan.mode: plan for plan in reversed(plans)}

    def speed(plan: RolloutPlan | None) -> float:
        return found.of_endless(plan, way, survival[0]) * plan.tokens_per_s if plan else 0.0

    one, two = best(1), best(2)
    elsewhere = speed(two.get("decoupled"))
    speeds = {
        "off": two["off"].tokens_per_s,
        "coupled": speed(two.get("coupled")),
        "decoupled": elsewhere,
    }
    together = max(speeds["off"], speeds["coupled"])
    apart = max(*map(speed, one.values()), elsewhere)
    speeds["auto"] = apart if drafts_elsewhere(planned(speeds)) else together
    return speeds, two.get("decoupled")


# ------------------------------------------------------------------------------------------------------------- measure


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of a cell."""

    off: float  # tokens per second without drafts
    ratios: dict[str, float]  # times as fast as that, by contestant
    survival: tuple[float, ...]  # in mode coupled
    rounds: Rounds  # in mode decoupled


def measure(bench: Bench, way: Way, batch: int, repetitions: int) -> Seen:
    counts = {mode: Counts() for mode in CONTESTANTS}
    with drafter(bench, way):
        turns = Turns(bench, way, bench.groups(batch))
        for repetition in range(repetitions):
            for mode in DRAFTING if repetition % 2 else DRAFTING[::-1]:
                turns.begin(mode)
                turns.teach(mode)
                bench.counts()  # of rounds that teach: windows are tried in them
                turns.timed(mode)
                counts[mode] += bench.counts()
                turns.off()
    emitted = len(bench.requests[batch]) * (NEW_TOKENS - 1)
    return Seen(
        off=emitted / median(turns.off_s()),
        ratios={"off": 1.0} | {mode: median(ratios) for mode, ratios in turns.ratios().items()},
        survival=survival_seen(counts["coupled"]),
        rounds=Rounds.of(counts["decoupled"], repetitions * emitted),
    )


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """On average; seconds and tokens of all requests together."""

    requests: float
    verify_s: float
    ahead_s: float  # the engine's own time for it
    drafted: float  # draft tokens there that were verified
    accepted: float

    @classmethod
    def of(cls, counts: Counts, emitted: int) -> Rounds:
        """Args: tokens of all rounds."""
        rounds = max(1, counts.rounds)
        return cls(
            requests=(emitted - counts.accepted) / rounds,
            verify_s=counts.verify_s / rounds,
            ahead_s=counts.draft_s / rounds,
            drafted=counts.drafted / rounds,
            accepted=counts.accepted / rounds,
        )

    def __str__(self) -> str:
        return (
            f"{self.requests:.1f} requests, {1e3 * self.verify_s:.2f} ms verify + {1e3 * self.ahead_s:.2f} ms ahead of "
            f"it, {self.drafted:.2f} draft tokens verified, {self.accepted:.2f} accepted"
        )


def survival_seen(counts: Counts) -> tuple[float, ...]:
    """P(the first j draft tokens are accepted), j = 1 .. MAX_WINDOW; 0 where none was drafted."""
    survival, alive = [], 1.0
    for accepted, drafted in list(zip(counts.accepted_at, counts.drafted_at, strict=True))[:MAX_WINDOW]:
        alive = min(alive, accepted / drafted if drafted else 0.0)
        survival.append(alive)
    return tuple(survival)


def trained(models: Models) -> Way:
    return Way(name="trained model", in_engine="model", continuer="model", model_dir=str(models.draft))


def _rate(way: Way) -> float:
    """How often a dialled drafter is right on these outputs: there are few coins in a small batch."""
    return Script.read(way.model_dir).rate()


def ways(
    bench: Bench, models: Models, table: CostTable, batch: int, dials: Sequence[tuple[float, float]]
) -> Iterator[Way]:
    """The trained model, then dialled drafters; the script is there when a dialled one is given out."""
    yield trained(models)
    for share, acceptance in dials:
        path = bench.folder / "script.json"
        pace = pace_of(bench, table, batch)
        script = Script(
            acceptance=acceptance,
            step_s=[share * pace * table.plain_s(n) for n in range(1, batch + 1)],
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
        profiled = profile(found, trained(models), note)
        for line in profiled.lines():
            note(line)
        weights = [START_S + WORK * repetitions * NEW_TOKENS * profiled.table.plain_s(b) for b in batches]
        costs = [weight for weight in weights for _ in range(1 + len(dials))]
        progress = Progress(costs, time.monotonic())
        for batch in batches:
            for way in ways(found, models, profiled.table, batch, dials):
                seen = measure(found, way, batch, repetitions)
                survival = seen.survival
                if way.acceptance is not None:
                    survival = survival_of(_rate(way), MAX_WINDOW)
                dialled = as_dialled(way, profiled.table, batch, seen.off)
                foreseen, plan = predicted(profiled, dialled, survival, batch)
                first = survival[0] if way.acceptance is None else way.acceptance
                auto = AUTO_APART if drafts_elsewhere(planned(foreseen)) else AUTO_TOGETHER
                cells.append(
                    Cell(
                        drafter=way.name,
                        acceptance=first,
                        batch=batch,
                        off=(seen.off, foreseen["off"]),
                        measured=seen.ratios | {"auto": seen.ratios[auto]},
                        foreseen={mode: speed / foreseen["off"] for mode, speed in foreseen.items()},
                    )
                )
                note(f"decoupled, a round: {seen.rounds}")
                share = "" if dialled.share is None else f"; {dialled.share:.2f} of a plain step"
                note(f"predicted decoupled: {plan.reason if plan else 'none'}; {survival[0]:.2f} right{share}")
                done = f"{len(cells)}/{len(costs)} {progress.over(time.monotonic())}"
                note(f"{done}: {' '.join(cells[-1].row())}")
    for line in [means(cells), *aims(cells)]:
        note(line)
    return Result(
        title="Coupled and decoupled drafting on two cores",
        verdict=verdict(cells),
        intro=INTRO.format(tokens=NEW_TOKENS, groups=GROUPS, repetitions=repetitions, margin=MARGIN, cells=len(cells)),
        columns=COLUMNS,
        rows=[cell.row() for cell in cells],
        summary=summary(cells),
        notes="\n".join(f"- {line}" for line in aims(cells)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few batches and dials; all take half an hour")
    parser.add_argument("--batches", nargs="+", type=int, help=f"default: {BATCHES}")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    if {2, 3} & set(options.batches or ()):
        parser.error(
            "--batches: got 2 or 3, expected others. A single request per engine is timed on one engine alone."
        )
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
