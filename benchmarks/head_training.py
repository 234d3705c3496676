"""An EAGLE-3 head that learns with the policy, beside a frozen one: accept_length over a run, and what it costs.

    python -m benchmarks.head_training [--steps N] [--only TASK ...]

A run of each task with a frozen head, one that learns from KL(policy, head), as runs do, and one that learns from the
total variation of the two. Runs that have ended are kept under .cache/benchmarks: a second call goes on with the
others. The page keeps the rows of tasks that are not asked for.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from benchmarks import drafter_refresh_curriculum as curriculum
from benchmarks.drafter_refresh import fifths, shares_of_the_time
from benchmarks.drafter_refresh_runs import Run, differences, refreshing, start
from benchmarks.quickstart_speed import HEAD, POLICY
from benchmarks.results import Result, publish, stored
from benchmarks.trained_models import CACHE, task_recipe
from examples import quickstart
from specactor.config import Config, WarmupConfig
from specactor.metrics import read_metrics
from specactor.run_folder import WARM_UPS
from specactor.trainer.drafter import losses

NAME = "head_training"
BITS, HARDER, SUMS = "count_bits", "count_bits, longer", "sums"
TASKS = {BITS: "bits", HARDER: "longer", SUMS: "sums"}
FROZEN, KL, TOTAL_VARIATION = "frozen", "KL", "total variation"
HEADS = (FROZEN, KL, TOTAL_VARIATION)
SHARE = 0.03  # of the steps' time, for learning
RATE = 1e-4
"""A tenth of the default, which is for draft models that have much to learn."""
NOTES = (
    "At the default rate of 0.001 the noise of updates on one response each, all that fits the time here, unlearned "
    "what the warm-up had taught: in count_bits accept_length went from 4.60 to 4.50 (KL) and to 4.41 (total "
    "variation), measured before the rate fell with the tokens of an update. Rows of count_bits are of 2026-11-26, "
    "when an update that did not fit its share had half of its tokens. In sums all heads end lower, the frozen one "
    "lowest: the policy moved away from them."
)
TASK, LOSS = "HEAD_TRAINING_TASK", "HEAD_TRAINING_LOSS"  # variables of the runs' environment
FIFTHS = tuple(f"{name} fifth" for name in ("1st", "2nd", "3rd", "4th", "5th"))


def total_variation(logq_NV: Tensor, top_tokens_NK: Tensor, top_logp_NK: Tensor) -> Tensor:
    """[N] 1 - sum of min(p, q): the share of drafts that would be rejected."""
    return 1 - losses.overlap(logq_NV, top_tokens_NK, top_logp_NK)


def recipe() -> Config:
    """Of a run of this benchmark, in its own processes."""
    if os.environ[LOSS] == TOTAL_VARIATION:
        losses.forward_kl = total_variation
    task = os.environ[TASK]
    if task != HARDER:
        return quickstart.plain() if task == BITS else task_recipe("B")
    usual, [policy] = quickstart.plain(), (place_of(task) / WARM_UPS).glob("warmup-*")
    return replace(
        usual,
        model=replace(usual.model, path=str(policy)),
        warmup=WarmupConfig(),
        data=replace(usual.data, train="problems.jsonl", eval=(usual.data.train,), order="source"),
    )


def place_of(task: str) -> Path:
    """Return the folder of its runs, and of the warm-up that they begin with."""
    return CACHE / NAME / (SUMS if task == SUMS else BITS)


def has_ended(root: Path, steps: int) -> bool:
    lines = read_metrics(root) if root.exists() else []
    return bool(lines) and int(lines[-1]["step"]) >= steps


def run_of(task: str, head: str, steps: int) -> Run:
    """Return the run, made where it has not ended yet."""
    base = place_of(task)
    root = base / f"{TASKS[task]}-{head.replace(' ', '-')}-{steps}"
    if not has_ended(root, steps):
        shutil.rmtree(root, ignore_errors=True)
        settings = [*HEAD, "--train.steps", str(steps), "--eval.problems", "0"]
        if task == HARDER:
            [draft] = (base / WARM_UPS).glob("draft-*")
            problems = curriculum.write_problems(base / "problems.jsonl", curriculum.rising(steps))
            settings += ["--data.train", str(problems), "--rollout.speculation.draft-model", str(draft)]
        os.environ.update({TASK: task, LOSS: head})
        learning = [*refreshing("every_step", SHARE), "--distillation.learning-rate", str(RATE)]
        start(root, [*settings, *(learning if head != FROZEN else [])], __file__)
    return Run.read(head, root)


def rows_of(task: str, runs: Sequence[Run]) -> list[list[str]]:
    """Return the page's rows of a task. Args: its runs, in the order of `HEADS`."""
    rows = []
    for run in runs:
        learns = run.name != FROZEN
        rows.append(
            [
                task,
                run.name,
                *(f"{length:.2f}" for length in fifths(run)[:5]),
                f"{run.total('drafter/updates') / len(run.lines):.1f}" if learns else "-",
                f"{100 * shares_of_the_time(run):.1f} %" if learns else "-",
            ]
        )
    return rows


def table(rows: Sequence[Sequence[str]], *, steps: int, wrong: Sequence[str] = ()) -> Result:
    """Return the page. Args: of tasks and heads; in what runs of a task differ."""
    told, missed = dict[str, list[str]](), []
    for task, head, first, *_, last, _, share in rows:
        gain = float(last) - float(first)
        told.setdefault(task, []).append(f"{gain:+.2f}")
        if head != FROZEN and (gain < 0 or float(share.removesuffix(" %")) > 100 * SHARE):
            missed.append(f"{head} in {task}")
    longer = (
        f"*{HARDER}*: numbers up to {curriculum.FIRST} in the first step, up to {curriculum.LAST} from "
        f"{curriculum.RISE:.0%} of the run on. "
        if HARDER in told
        else ""
    )
    same = "Runs of a task have the same responses, rewards and losses." if not wrong else f"DIFFERENT: {wrong}."
    return Result(
        title="A head that learns with the policy",
        verdict=f"accept_length of a run's last fifth less that of its first ({', '.join(HEADS)}): "
        f"{'; '.join(' '.join([task, ', '.join(gains)]) for task, gains in told.items())}. Aim of heads that learn, "
        f"no less at the end for at most {SHARE:.0%} of the time: "
        + (f"missed by {', '.join(missed)}." if missed else "met by all."),
        intro=f"{steps} RL steps, one run each, mode coupled, window 4; all heads of a task begin as the warm-up made "
        f"them. *{KL}* and *{TOTAL_VARIATION}* are the losses of heads that learn after every step, for at most "
        f"{SHARE:.0%} of its time, at a learning rate of {RATE:g}. {longer}{same}",
        columns=("task", "head", *FIFTHS, "updates per step", "share of the steps' time"),
        rows=rows,
        notes=NOTES,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    options = parser.parse_args()
    if not (place_of(BITS) / WARM_UPS).exists() and POLICY.exists():
        shutil.copytree(POLICY, place_of(BITS) / WARM_UPS)
    rows = [[*row.values()] for row in stored(NAME) if row["task"] not in options.only]
    wrong = list[str]()
    for task in options.only:
        runs = [run_of(task, head, options.steps) for head in options.heads]
        rows += rows_of(task, runs)
        wrong += [f"{task}: {text}" for text in differences(runs)]
    order = list(TASKS)
    publish(NAME, table(sorted(rows, key=lambda row: order.index(row[0])), steps=options.steps, wrong=wrong))


if __name__ == "__main__":
    main()
