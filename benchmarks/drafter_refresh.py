"""What keeping the draft model fresh is worth: four runs of the quickstart with the same seeds.

    python -m benchmarks.drafter_refresh [--steps 30] [--window 4] [--share 0.03] [--key.path value ...]

Without a drafter, with one that stays as it was cut out of the policy (`specactor drafter init`), with one that learns
after every step, and with one that learns when that is predicted to pay. Tokens, rewards and losses must be identical
in all four; accept_length by step and the seconds of refreshing are what differs. Settings by path
go to all four. Writes docs/results/drafter_refresh.md and .png.
"""

from __future__ import annotations

import argparse
import hashlib
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

from benchmarks.curves import smoothed
from benchmarks.disturbed_run import compared
from benchmarks.results import RESULTS, Result, publish
from benchmarks.trained_models import CACHE, ROOT, task_target
from specactor.cpu import sglang as cpu
from specactor.metrics import Value, read_metrics
from specactor.run_folder import RunFolder

NAME = "drafter_refresh"
KINDS = {
    "no drafter": "off",
    "frozen": "off",
    "every step": "every_step",
    "auto": "auto",
}
"""Run -> distillation.refresh."""
STEP_PHASES = ("rollout", "reward", "train", "sync", "refresh")
LENGTH = "speculation/model/accept_length"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run."""

    name: str
    lines: Sequence[Mapping[str, Value]]
    """Of its RL steps."""
    tokens: str
    """Digest of all its responses and their rewards."""
    facts: Sequence[Mapping[str, Value]]
    """Of every step, what must not differ."""

    @classmethod
    def read(cls, name: str, root: Path) -> Run:
        folder = RunFolder(root=root)
        digest = hashlib.blake2b(digest_size=16)
        for file in sorted((root / "rollouts").glob("*.jsonl")):
            digest.update(file.read_bytes())
        facts = [{k: v for k, v in line.items() if not k.startswith("drafter/")} for line in compared(folder)]
        lines = [line for line in read_metrics(root) if int(line["step"]) > 0]
        return cls(name=name, lines=lines, tokens=digest.hexdigest(), facts=facts)

    def total(self, *metrics: str) -> float:
        return sum(float(line.get(metric, 0.0)) for line in self.lines for metric in metrics)

    def lengths(self) -> list[tuple[int, float]]:
        """(step, accept_length)"""
        return [(int(line["step"]), float(line[LENGTH])) for line in self.lines if LENGTH in line]


def differences(runs: Sequence[Run]) -> list[str]:
    """What differs from the first run, and must not."""
    first, found = runs[0], []
    for run in runs[1:]:
        if run.tokens != first.tokens:
            found.append(f"{run.name}: responses or rewards differ from those of {first.name}")
        for here, there in zip(run.facts, first.facts, strict=True):
            names = sorted(name for name in {*here, *there} if repr(here.get(name)) != repr(there.get(name)))
            found += [f"{run.name}, step {here['step']}: {name}" for name in names]
    return found


def launch(name: str, draft: Path, base: Path, options: argparse.Namespace, settings: Sequence[str]) -> Run:
    root = base / name.replace(" ", "-")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(ROOT / "launch" / "train_moe.py"), "quickstart", "--name", root.name, "--output-dir", str(base)),
        *("--train.steps", str(options.steps), "--eval.problems", "0", "--tracking.wandb", "off"),
        *("--checkpoint.every", "0", "--checkpoint.export", "False", "--distillation.keep-rollouts", "True"),
        *("--distillation.refresh", KINDS[name], "--distillation.max-time-share", str(options.share)),
        *("--distillation.tokens-per-update", "1024", "--distillation.tokens-per-microbatch", "1024"),
    ]
    if name != "no drafter":
        command += ["--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "model"]
        command += ["--rollout.speculation.draft-model", str(draft)]
        command += ["--rollout.speculation.window", str(options.window)]
    print(f"-- {name}", flush=True)
    subprocess.run([*command, *settings], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    return Run.read(name, root)


def make_draft(target: Path, folder: Path) -> None:
    """As a user does."""
    command = ["-m", "specactor.cli", "drafter", "init", "--target", str(target), "--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | cpu.environment()
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)


def row(run: Run) -> list[str]:
    lengths = [length for _, length in run.lengths()]
    fifth = max(1, len(lengths) // 5)
    refreshes, steps_s = run.total("drafter/refreshed"), run.total(*(f"time/{phase}_s" for phase in STEP_PHASES))
    learned = KINDS[run.name] != "off"
    return [
        run.name,
        f"{mean(lengths[:fifth]):.2f}" if lengths else "-",
        f"{mean(lengths[-fifth:]):.2f}" if lengths else "-",
        f"{mean(lengths):.2f}" if lengths else "-",
        f"{run.total('rollout/tokens') / run.total('time/rollout_s'):.0f}",
        f"{run.total('time/rollout_s') / len(run.lines):.2f}",
        f"{refreshes:.0f}" if learned else "-",
        f"{run.total('drafter/updates'):.0f}" if learned else "-",
        f"{100 * run.total('time/refresh_s') / steps_s:.1f} %" if learned else "-",
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


def draw(runs: Sequence[Run], file: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for run, colour in zip(runs, ("#9a9a9a", "#4c6a92", "#c0504d", "#d9a441"), strict=True):
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


def page(runs: Sequence[Run], found: Sequence[str], options: argparse.Namespace) -> Result:
    equal = "Responses, rewards and all metrics of the policy are identical in the four runs, bit for bit."
    notes = equal if not found else "**The runs differ, which they must not:** " + "; ".join(found[:10]) + "."
    return Result(
        title="A draft model that stays fresh",
        intro=(
            f"The quickstart, {options.steps} RL steps, the same seeds, mode coupled with a fixed window of "
            f"{options.window}. The draft model is one layer cut out of the policy at its start (`specactor drafter "
            "init`). *frozen* leaves it so; *every step* distils it after each step for at most "
            f"{100 * options.share:g} % of the step's time; *auto* where that is predicted to pay. The share in the "
            "table holds deciding, learning and pushing."
        ),
        columns=COLUMNS,
        rows=[row(run) for run in runs],
        notes=f"{notes}\n\n![accept_length and seconds by step]({NAME}.png)",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 1 when runs differ that must not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=30, help="RL steps of each run")
    parser.add_argument("--window", type=int, default=4, help="draft tokens per request and round")
    parser.add_argument("--share", type=float, default=0.03, help="distillation.max_time_share")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the page and the picture")
    parser.add_argument("--target", type=Path, help="the draft model is cut out of it; by default the warmed-up policy")
    options, settings = parser.parse_known_args(arguments)
    base = CACHE / NAME
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    make_draft(options.target or task_target("A"), base / "draft")
    runs = [launch(name, base / "draft", base, options, settings) for name in KINDS]
    found = differences(runs)
    draw(runs, options.results / f"{NAME}.png")
    publish(NAME, page(runs, found, options), options.results)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
