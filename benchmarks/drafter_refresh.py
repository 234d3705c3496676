"""What keeping the draft model fresh is worth: three runs of the quickstart with the same seeds.

    python -m benchmarks.drafter_refresh [--steps 30] [--window 4] [--share 0.03]
        [--start cut|distilled|curriculum|brief] [--key.path value ...]

Without a drafter, with one that stays as it was (cut out of the policy with `specactor drafter init`, or distilled on
it), and with one that learns after every step. Tokens, rewards and losses must be identical in all three;
accept_length by step and the seconds of refreshing are what differs. From `curriculum` and `brief`, a draft model that
was distilled for long or shortly, problems get harder meanwhile (`drafter_refresh_curriculum`). Settings by path go to
all runs. Writes docs/results/drafter_refresh.md and .png, from another start than `cut` drafter_refresh_START.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks import drafter_refresh_curriculum as curriculum
from benchmarks.curves import smoothed
from benchmarks.drafter_refresh_runs import Run, differences, drafting, refreshing, start
from benchmarks.results import RESULTS, Result, Table, publish
from benchmarks.trained_models import CACHE, ROOT, DraftShape, task_models, task_target
from specactor.cpu import sglang as cpu

NAME = "drafter_refresh"
KINDS = {
    "no drafter": "off",
    "frozen": "off",
    "every step": "every_step",
}
"""Run -> distillation.refresh."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where the draft model comes from, and what the runs' problems are."""

    page: str
    title: str
    draft: str  # in words
    updates: int = 0
    """For which it was distilled on problems as the first step has; those of the runs get harder. 0: the usual ones."""

    @property
    def problems(self) -> str:
        """In words, of the runs."""
        if not self.updates:
            return ""
        return (
            f" Problems come in their order (`data.order source`): numbers up to {curriculum.FIRST} in the first "
            f"step, up to {curriculum.LAST} from {100 * curriculum.RISE:g} % of the run on; 32 responses to each."
        )

    @property
    def recipe(self) -> str:
        return curriculum.__file__ if self.updates else "quickstart_plain"


def harder(page: str, title: str, updates: int) -> Start:
    """Problems that get harder."""
    return Start(
        page=f"{NAME}_{page}",
        title=title,
        draft=f"one layer that was distilled on the policy at its start, for {updates} updates, on problems as the "
        "first step has",
        updates=updates,
    )


STARTS = {
    "cut": Start(
        page=NAME,
        title="A draft model that stays fresh",
        draft="one layer cut out of the policy at its start (`specactor drafter init`)",
    ),
    "distilled": Start(
        page=f"{NAME}_distilled",
        title="A draft model that was distilled before the run",
        draft="one layer that was distilled on the policy at its start, for 400 updates",
    ),
    "curriculum": harder("curriculum", "A draft model, and problems that get harder", DraftShape().steps),
    "brief": harder("brief", "A draft model that was distilled shortly, and problems that get harder", 50),
}
AHEAD, COST = 0.15, 0.03
"""Aims: accept_length over that of a frozen draft model at the end, and refreshing over the steps' time."""
STEP_PHASES = ("rollout", "reward", "train", "sync", "refresh")


def launch(name: str, draft: Path, base: Path, options: argparse.Namespace, settings: Sequence[str]) -> Run:
    root = base / name.replace(" ", "-")
    chosen = ["--train.steps", str(options.steps), *refreshing(KINDS[name], options.share)]
    print(f"-- {name}", flush=True)
    chosen += drafting(draft, options.window) if name != "no drafter" else []
    start(root, [*chosen, *settings], STARTS[options.start].recipe)
    return Run.read(name, root)


def make_draft(target: Path, folder: Path) -> None:
    """As a user does."""
    command = ["-m", "specactor.cli", "drafter", "init", "--target", str(target), "--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | cpu.environment()
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)


def row(run: Run) -> list[str]:
    lengths, means = [length for _, length in run.lengths()], fifths(run)
    refreshes = run.total("drafter/refreshed")
    learned = KINDS[run.name] != "off"
    return [
        run.name,
        f"{means[0]:.2f}" if lengths else "-",
        f"{means[-1]:.2f}" if lengths else "-",
        f"{mean(lengths):.2f}" if lengths else "-",
        f"{run.total('rollout/tokens') / run.total('time/rollout_s'):.0f}",
        f"{run.total('time/rollout_s') / len(run.lines):.2f}",
        f"{refreshes:.0f}" if learned else "-",
        f"{run.total('drafter/updates'):.0f}" if learned else "-",
        f"{100 * shares_of_the_time(run):.1f} %" if learned else "-",
        run.tokens[:8],
    ]


COLUMNS = (
    "draft model",
    "accept_length, first fifth",
    "last fifth",
    "mean",
    "rollout tokens/s",
    "rollout s per step",
    "refreshes",
    "updates",
    "share of the steps' time",
    "digest of tokens and rewards",
)


def shares_of_the_time(run: Run) -> float:
    """What refreshing took of the steps."""
    return run.total("time/refresh_s") / run.total(*(f"time/{phase}_s" for phase in STEP_PHASES))


def fifths(run: Run) -> list[float]:
    """Mean accept_length of each."""
    lengths = [length for _, length in run.lengths()]
    size = max(1, len(lengths) // 5)
    return [mean(lengths[i : i + size]) for i in range(0, len(lengths) - size + 1, size)]


def aims(runs: Mapping[str, Run]) -> list[str]:
    """Of these runs, whether they were met."""
    frozen, fresh = (fifths(runs[name]) for name in ("frozen", "every step"))
    share, ahead = shares_of_the_time(runs["every step"]), fresh[-1] / frozen[-1] - 1

    def line(aim: str, met: bool, found: str) -> str:
        return f"- {'Met' if met else 'MISSED'}: {aim} {found}."

    return [
        line("a frozen draft model falls.", frozen[-1] < frozen[0], f"{frozen[0]:.2f} to {frozen[-1]:.2f}"),
        line(
            "*every step* stays at or above the first fifth.",
            min(fresh) >= fresh[0],
            f"{fresh[0]:.2f}, at least {min(fresh):.2f}, at the end {fresh[-1]:.2f}",
        ),
        line(f"*every step* is at least {AHEAD:.0%} above frozen at the end.", ahead >= AHEAD, f"{ahead:.0%}"),
        line(f"*every step* takes at most {COST:.0%} of the steps' time.", share <= COST, f"{share:.1%}"),
    ]


def draw(runs: Sequence[Run], file: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for run, colour in zip(runs, ("#9a9a9a", "#4c6a92", "#c0504d"), strict=True):
        points = run.lengths()
        if points:
            steps, lengths = [step for step, _ in points], [length for _, length in points]
            left.plot(steps, lengths, color=colour, alpha=0.25, linewidth=1)
            left.plot(steps, smoothed(lengths), color=colour, linewidth=1.6, label=run.name)
        seconds = [float(line["time/rollout_s"]) for line in run.lines]
        right.plot([int(line["step"]) for line in run.lines], seconds, color=colour, linewidth=1.2, label=run.name)
        spent = [float(line.get("time/refresh_s", 0.0)) for line in run.lines]
        if any(spent):
            right.plot([int(line["step"]) for line in run.lines], spent, ":", color=colour, linewidth=1.2)
    left.set(title="accept_length of the draft model", xlabel="RL step", ylabel="tokens per verify")
    right.set(title="Seconds of rollout (lines) and refresh (dots)", xlabel="RL step", ylabel="s")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def verdict(rows: Sequence[Sequence[str]]) -> str:
    """Speed over rollouts without a drafter, and accept_length at both ends."""
    plain, *others = rows
    speed, first, last = (COLUMNS.index(name) for name in ("rollout tokens/s", COLUMNS[1], COLUMNS[2]))
    over = {row[0]: f"{float(row[speed]) / float(plain[speed]):.2f}" for row in others}
    lengths = "; ".join(f"{row[0]} {row[first]} to {row[last]}" for row in others)
    return (
        f"Rollout tokens/s over no drafter: {', '.join(f'{name} {ratio}' for name, ratio in over.items())} (one run "
        f"each). accept_length from the first to the last fifth of the run: {lengths}."
    )


def summary(rows: Sequence[Sequence[str]]) -> Table:
    """What the page shows; the file has the rest."""
    names = (*COLUMNS[:5], COLUMNS[8])
    return names, [[row[COLUMNS.index(name)] for name in names] for row in rows]


def page(runs: Sequence[Run], found: Sequence[str], options: argparse.Namespace) -> Result:
    """The page of these runs. `found` is what differs and must not."""
    equal = "Responses, rewards and all metrics of the policy are identical in the three runs, bit for bit."
    begun, rows = STARTS[options.start], [row(run) for run in runs]
    picture = f"![accept_length and seconds by step]({begun.page}.png)"
    notes = equal if not found else "**The runs differ, which they must not:** " + "; ".join(found[:10]) + "."
    return Result(
        title=begun.title,
        verdict=verdict(rows),
        picture=picture,
        intro=(
            f"The quickstart, {options.steps} RL steps, the same seeds, mode coupled with a fixed window of "
            f"{options.window}.{begun.problems} The draft model is {begun.draft}. *every step* distils it after "
            f"each step for at most {100 * options.share:g} % of the step's time (learning and pushing)."
        ),
        columns=COLUMNS,
        rows=rows,
        summary=summary(rows),
        notes="\n".join(aims({run.name: run for run in runs})) + f"\n\n{notes}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 1 when runs differ that must not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=30, help="RL steps of each run")
    parser.add_argument("--window", type=int, default=4, help="draft tokens per request and round")
    parser.add_argument("--share", type=float, default=0.03, help="distillation.refresh")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the page and the picture")
    parser.add_argument("--start", choices=tuple(STARTS), default="cut", help="where the draft model comes from")
    parser.add_argument("--target", type=Path, help="the draft model is cut out of it; by default the warmed-up policy")
    options, settings = parser.parse_known_args(arguments)
    name, base = STARTS[options.start].page, CACHE / NAME
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    draft = first_draft(options, base)
    if STARTS[options.start].updates:
        problems = curriculum.write_problems(base / "problems.jsonl", curriculum.rising(options.steps))
        settings = ["--data.train", str(problems), *settings]
    runs = [launch(kind, draft, base, options, settings) for kind in KINDS]
    found = differences(runs)
    draw(runs, options.results / f"{name}.png")
    publish(name, page(runs, found, options), options.results)
    return 1 if found else 0


def first_draft(options: argparse.Namespace, base: Path) -> Path:
    """The draft model that the runs begin with."""
    if options.start == "distilled":
        return task_models("A").draft
    if options.start == "cut":
        make_draft(options.target or task_target("A"), base / "draft")
    else:
        curriculum.make_draft(base / "draft", STARTS[options.start].updates)
    return base / "draft"


if __name__ == "__main__":
    sys.exit(main())
