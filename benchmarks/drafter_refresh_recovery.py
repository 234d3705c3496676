"""How fast a draft model recovers when the policy jumps: the second part of benchmarks.drafter_refresh.

A run of three legs, each continued from the checkpoint of the one before, so draft model, optimizer and buffer go on:
some steps as usual, one with a learning rate that is many times as large, and four as usual. The draft model has
learned the policy's law at its start, so there is something to lose. Rollout by rollout accept_length is then: before
the jump, just after it, after one refresh on what the policy says now, after two, after three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.drafter_refresh_runs import LENGTH, Run, differences, drafting, refreshing, start
from examples import quickstart

STEPS_BEFORE = 4
ROLLOUTS_AFTER = 4
"""The first is just after the jump, before any refresh on responses of the policy that jumped."""
LEARNING_RATE = 3e-4
"""Of the draft model, which is good at the start: at distillation's default, its usual drift costs more than it learns
from a few thousand tokens."""
AIM = 0.9
"""Of the former accept_length, within three refreshes."""
COLUMNS = (
    "draft model",
    "before the jump",
    "just after",
    "1 refresh later",
    "2 later",
    "3 later",
    "of before",
    "updates per refresh",
    "share of the steps' time",
)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What the rollouts around the jump accepted."""

    run: Run
    learns: bool

    def lengths(self) -> list[float]:
        """Of the rollout before the jump and of those after."""
        return [float(line[LENGTH]) for line in self.run.lines[STEPS_BEFORE:]]

    def best_share(self) -> float:
        """accept_length after up to three refreshes, the best of them, over that before."""
        before, _, *later = self.lengths()
        return max(later) / before

    def row(self) -> list[str]:
        refreshes = self.run.total("drafter/refreshed")
        spent_s = self.run.total(*(f"time/{phase}_s" for phase in ("rollout", "reward", "train", "sync", "refresh")))
        learned = [
            f"{self.run.total('drafter/updates') / refreshes:.1f}" if refreshes else "0",
            f"{100 * self.run.total('time/refresh_s') / spent_s:.1f} %",
        ]
        lengths = [f"{length:.2f}" for length in self.lengths()]
        return [self.run.name, *lengths, f"{100 * self.best_share():.0f} %", *(learned if self.learns else ["-", "-"])]


def recovered(
    base: Path,
    draft: Path,
    *,
    window: int,
    jump: float,
    shares: Sequence[float],
    after: float,
    settings: Sequence[str],
) -> tuple[list[Recovery], list[str]]:
    """Run with a frozen draft model, and with one refreshed after every step, per share of the time.

    Returns them, and what differs between them and must not. Args: times the usual learning rate, in one step; share of
    the time while accept_length is lost, 0: the usual one.
    """
    kinds = {"frozen": refreshing("off", shares[0])}
    more = f", {100 * after:g} % while it is lost" if after else ""
    kinds |= {f"every step, {100 * share:g} %{more}": refreshing("every_step", share, after) for share in shares}
    found = []
    for name, refresh in kinds.items():
        root = folder_of(base, name)
        rate = ["--distillation.learning-rate", str(LEARNING_RATE)]
        _legs(root, name, jump, [*drafting(draft, window), *refresh, *rate, *settings])
        found.append(Recovery(run=Run.read(name, root), learns=name != "frozen"))
    return found, differences([recovery.run for recovery in found])


def folder_of(base: Path, name: str) -> Path:
    """Of the run with such a draft model."""
    return base / f"jump-{name.replace(' ', '-').replace(',', '').replace('%', 'percent')}"


def _legs(root: Path, name: str, jump: float, settings: Sequence[str]) -> None:
    usual = quickstart.recipe().train.learning_rate
    legs = [(STEPS_BEFORE, usual), (STEPS_BEFORE + 1, jump * usual), (STEPS_BEFORE + 1 + ROLLOUTS_AFTER, usual)]
    for number, (steps, rate) in enumerate(legs):
        print(f"-- jump, {name}: to step {steps} at learning rate {rate:g}", flush=True)
        resume = ["--resume", "auto"] if number else []
        resume += ["--checkpoint.export", "True"] if number == len(legs) - 1 else []
        start(root, [*settings, "--train.steps", str(steps), "--train.learning-rate", str(rate), *resume])


def section(found: Sequence[Recovery], different: Sequence[str], jump: float, more: str = "") -> str:
    """Of the page. Args: a paragraph that follows."""
    lines = found[0].run.lines
    before, after = (float(line["accuracy/train"]) for line in lines[STEPS_BEFORE : STEPS_BEFORE + 2])
    entropies = [float(line["policy/entropy"]) for line in lines[STEPS_BEFORE : STEPS_BEFORE + 2]]
    equal = "Responses, rewards and metrics of the policy are identical in these runs, too."
    if different:
        equal = "**These runs differ, which they must not:** " + "; ".join(different[:10]) + "."
    return "\n".join(
        [
            "## Recovery after a jump of the policy",
            "",
            f"The draft model was distilled on the policy at its start. In step {STEPS_BEFORE + 1} the learning rate "
            f"is {jump:g} times the usual one; before and after it is as usual (legs of one run, each resumed from the "
            f"checkpoint of the one before). The share of right responses goes from {before:.2f} to {after:.2f}, the "
            f"policy's entropy from {entropies[0]:.2f} to {entropies[1]:.2f} nats per token. accept_length by rollout; "
            f"*of before*: the best after one to three refreshes over that before. The draft model's learning rate is "
            f"{LEARNING_RATE:g}.",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|" + " --- |" * len(COLUMNS),
            *("| " + " | ".join(recovery.row()) + " |" for recovery in found),
            "",
            f"Aim: {100 * AIM:g} % of the former accept_length within three refreshes. "
            + "; ".join(
                f"{one.run.name}: {'met' if one.best_share() >= AIM else 'missed'}" for one in found if one.learns
            )
            + f". {equal}",
            *(["", more] if more else []),
        ]
    )
