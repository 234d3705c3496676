"""Recycled noise: what a sample's noise, kept for several visits of its problem, buys in speed and costs in learning.

    python -m benchmarks.recycled_noise [--limit-s 300]

Runs of two tasks, from one warm-up each, over the same 64 problems epoch after epoch, with noise that is renewed at
every visit of a problem, at every second and at every fourth; and an engine one epoch after its drafts were sampled.
What is whole is kept: a call that was ended is followed by another. Writes docs/results/recycled_noise.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.disturbed_run import compared
from benchmarks.recycled_noise_runs import (
    EPOCH,
    GROUP_SIZE,
    LEARNING_RATES,
    PROBLEMS,
    STEPS,
    VISITS,
    WINDOW,
    Run,
    all_runs,
    perform,
)
from benchmarks.recycled_noise_speed import ALONE, PLAIN, TURNS, Found, measure, measured
from benchmarks.results import RESULTS, Result, likely, markdown, publish
from benchmarks.trained_models import CACHE
from specactor.metrics import Value
from specactor.run_folder import RunFolder

NAME = "recycled_noise"
BASE = CACHE / NAME
COLUMNS = ("task", "visits", "seed", "step", "held-out", "training", "entropy", "accept rate", "accept_length")
PRICE = (
    *("task", "visits with equal noise", "seeds", "held-out before", "mean over the run", "after"),
    *("mean over the run, less that of 1", "training samples, likewise", "right drafts in later visits"),
)
SPEED = (
    "learning rate",
    "temperature",
    "entropy",
    "right",
    "right with fresh noise",
    "drafter",
    "accept_length",
    "64 requests",
    "1",
)
Lines = Sequence[Mapping[str, Value]]


def rows(runs: Mapping[Run, Lines]) -> list[tuple[str, ...]]:
    """A row per step of each run."""
    names = ("accuracy/eval", "accuracy/train", "policy/entropy")
    drafts = ("speculation/previous/accept_rate", "speculation/previous/accept_length")
    return [
        (
            *(run.task, str(run.visits), str(run.seed), str(line["step"])),
            *(f"{float(line[name]):.4g}" if name in line else "-" for name in (*names, *drafts)),
        )
        for run, lines in runs.items()
        if run.drafts
        for line in lines
    ]


def held_out(lines: Lines) -> list[float]:
    """Before the first step, and after every second epoch."""
    return [float(line["accuracy/eval"]) for line in lines if int(line["step"]) % (2 * EPOCH) == 0]


def right_drafts(runs: Sequence[Lines]) -> str:
    """Share of accepted draft tokens, over all runs and steps."""
    found = [line for lines in runs for line in lines if "speculation/previous/drafted" in line]
    drafted = sum(float(line["speculation/previous/drafted"]) for line in found)
    accepted = sum(float(line["speculation/previous/accepted"]) for line in found)
    return f"{accepted / drafted:.2f}" if drafted else "-"


def pm(values: Sequence[float]) -> str:
    """mean (smallest to largest)."""
    if len(values) == 1:
        return f"{values[0]:+.3f}"
    return f"{fmean(values):+.3f} ({min(values):+.3f} to {max(values):+.3f})"


def price(runs: Mapping[Run, Lines]) -> list[list[str]]:
    """By task and visits; a seed counts where it has run with all numbers of visits."""
    found = []
    for task in dict.fromkeys(run.task for run in runs):
        own = {(run.visits, run.seed): lines for run, lines in runs.items() if run.task == task and run.drafts}
        seeds = [seed for visits, seed in own if visits == 1 and all((v, seed) in own for v in VISITS)]
        if not seeds:
            continue
        curves = {key: held_out(lines) for key, lines in own.items()}
        means = {key: fmean(curve[1:]) for key, curve in curves.items()}
        sampled = {key: fmean(float(line["accuracy/train"]) for line in lines[1:]) for key, lines in own.items()}
        for visits in VISITS:
            less = [[of[visits, seed] - of[1, seed] for seed in seeds] for of in (means, sampled)]
            found.append(
                [
                    *(task, str(visits), str(len(seeds)), f"{fmean(curves[visits, seed][0] for seed in seeds):.3f}"),
                    f"{fmean(means[visits, seed] for seed in seeds):.3f}",
                    f"{fmean(curves[visits, seed][-1] for seed in seeds):.3f}",
                    *("-" if visits == 1 else pm(values) for values in less),
                    right_drafts([own[visits, seed] for seed in seeds]),
                ]
            )
    return found


def faster(found: Found, way: str, place: str) -> str:
    """Speed over that of plain decoding in the same turn."""
    ours, plain = found.tokens_per_s[way][place], found.tokens_per_s[PLAIN][place]
    return likely([a / b for a, b in zip(ours, plain, strict=True)])


def speeds(cells: Sequence[Found]) -> list[list[str]]:
    return [
        [
            *(
                f"{found.rate:g}",
                f"{found.temperature:g}",
                f"{found.entropy:.2f}",
                f"{found.right:.2f}",
                f"{found.fresh:.2f}",
                way,
            ),
            f"{found.accept_length[way]['together']:.2f}",
            *(faster(found, way, place) for place in ("together", "alone")),
        ]
        for found in cells
        for way in found.tokens_per_s
        if way != PLAIN
    ]


def page(runs: Mapping[Run, Lines], cells: Sequence[Found], pairs: int) -> Result:
    costs = price(runs)
    return Result(
        title="Recycled noise",
        verdict=verdict(costs, cells),
        intro=(
            f"Price: GRPO over {PROBLEMS} problems (less those that are held out) for {STEPS} steps of "
            f"{PROBLEMS // EPOCH} problems with {GROUP_SIZE} samples, from the same warm-up, with "
            f"`rollout.noise_visits` of {', '.join(map(str, VISITS))}; the drafter `previous` drafts {WINDOW} tokens. "
            f"*bits*: the quickstart's task; *calculator*: that recipe's, in two turns; two layers; learning rates "
            f"{', '.join(f'{rate:g}' for rate in LEARNING_RATES.values())}. Held-out accuracy is greedy, of 256 "
            "problems, after every second epoch; differences are those of equal seeds, mean (smallest to largest). "
            f"*Right drafts*: accepted of all that were drafted. {pairs} run{'s' * (pairs > 1)} made again without "
            "drafts had the same rewards, losses, accuracies and entropies in every step. Whole so far: "
            f"{sum(run.drafts for run in runs)} of {sum(run.drafts for run in all_runs())} curves; `python -m "
            f"benchmarks.{NAME}` goes on with what is missing."
        ),
        columns=COLUMNS,
        rows=rows(runs),
        summary=(PRICE, costs),
        notes=notes(cells),
    )


def verdict(costs: Sequence[Sequence[str]], cells: Sequence[Found]) -> str:
    def span(values: Sequence[float]) -> str:
        return f"{min(values):.2f}-{max(values):.2f}"

    def speed(way: str, place: str) -> str:
        return span(
            [float(faster(found, way, place).partition(" ")[0]) for found in cells if way in found.tokens_per_s]
        )

    least = min(costs, key=lambda row: float(row[6].partition(" ")[0]) if row[6] != "-" else 0.0)
    return (
        f"One epoch later the last response has the right token at {span([found.right for found in cells])} of "
        f"positions, with fresh noise at {span([found.fresh for found in cells])}; `previous` then rolls out at "
        f"{speed('previous', 'together')} of plain speed with 64 requests and {speed('previous', 'alone')} with one, "
        f"`suffix` at {speed('suffix', 'together')} and {speed('suffix', 'alone')}. Held-out accuracy, mean over a "
        f"run, differs from that with fresh noise by {least[6]} at worst ({least[0]}, noise of {least[1]} visits, "
        f"seeds: {least[2]}{'' if int(least[2]) > 2 else ', too few to tell'})."
    )


def notes(cells: Sequence[Found]) -> str:
    return "\n\n".join(
        [
            "## Speed",
            f"One engine on one core, policy of *sums* one epoch after the warm-up; the drafters know the responses of "
            f"the policy before. 64 requests of a step at once, or {ALONE} of them one after the other; tokens per "
            f"second of processor time over plain decoding in the same turn, {TURNS} turns, median (95 % interval). "
            "*Right*: tokens that stood at their positions an epoch ago; `suffix` has the same responses, and those of "
            "the group as they come. All drafters give the same tokens, which is checked. The machine was busy with "
            "other work, so intervals are wide.",
            markdown(SPEED, speeds(cells)),
            "## When to use it",
            "**Samples of a later visit depend on noise that the weights have already seen.** The weights have learned "
            "from what the same noise gave at the visit before, so only the first of the visits that share it samples, "
            "given the weights, from the policy. The gradient of the others is biased, and the noise is one more "
            "thing that can be learned by heart. Importance sampling does not correct that: it corrects another "
            "policy, not noise that was seen. So it is off (`rollout.noise_visits` 1), and with it on no claim of "
            "this project about the law of samples holds beyond a first visit.",
            "Try it in runs of several epochs whose rollouts take most of the time, with few requests per engine, and "
            "compare with a curve of fresh noise. With many requests a verification of wrong drafts costs more than "
            "it saves (mode `auto` then decodes plainly), and `suffix`, which knows the last responses too, gains "
            "nearly as much from kept noise wherever texts stay equal for long. Without any price `previous` drafts "
            "evaluations, whose seeds are the same every time, and requests that are begun again.",
            "An engine drafts from what it generated itself: with N engines and shuffled data that is one response "
            "in N.",
        ]
    )


def equal_without_drafts(runs: Mapping[Run, Lines], base: Path) -> int:
    """How many runs were made with and without drafts. Raises AssertionError where they differ."""
    pairs = [(run, replace(run, drafts=True)) for run in runs if not run.drafts]
    for plain, drafting in pairs:
        a, b = (compared(RunFolder(root=run.folder(base))) for run in (plain, drafting))
        assert a == b, f"{plain.name}: drafts changed a metric"
    return len(pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no run after so many seconds")
    parser.add_argument("--only", default="", help="runs whose names begin so, and no page")
    parser.add_argument("--page", action="store_true", help="write the page of the runs that are whole")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the page")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    runs: dict[Run, Lines] = {}
    for run in all_runs():
        if not run.lines(BASE) and not options.page and run.name.startswith(options.only):
            if time.monotonic() - began > options.limit_s:
                print("call again: it goes on with what is missing", flush=True)
                return
            perform(run, BASE)
        if lines := run.lines(BASE):
            runs[run] = lines
    if options.only:
        return
    if not options.page:
        measure(BASE)
    publish(NAME, page(runs, measured(BASE), equal_without_drafts(runs, BASE)), options.results)


if __name__ == "__main__":
    main()
