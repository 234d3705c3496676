"""How fast a draft model recovers from an event: the second part of benchmarks.drafter_refresh.

The policy jumps: a run of three legs, each continued from the checkpoint of the one before, so draft model, optimizer
and buffer go on; some steps as usual, one with a learning rate that is many times as large, and four as usual. Or its
problems switch to longer numbers, in a run of as many steps. The draft model has learned the policy's law at its start,
so there is something to lose. Rollout by rollout accept_length is then: before the event, just after it, after one
refresh on what the policy says now, after two, after three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import drafter_refresh_curriculum as curriculum
from benchmarks.drafter_refresh_runs import LENGTH, Run, differences, drafting, refreshing, start
from examples import quickstart

STEPS_BEFORE = 4
ROLLOUTS_AFTER = 4
"""The first is just after the jump, before any refresh on responses of the policy that jumped."""
AIM = 0.9
"""Of the former accept_length, within three refreshes."""
COLUMNS = (
    "draft model",
    "before",
    "just after",
    "1 refresh later",
    "2 later",
    "3 later",
    "of before",
    "updates per refresh",
    "share of the steps' time",
)


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happens to the policy after its steps STEPS_BEFORE + 1."""

    title: str
    said: str
    """What happened, in words."""
    legs: Sequence[tuple[int, Sequence[str]]]
    """(steps at the end, settings) of the run's parts."""
    learning_rate: float
    """Of the draft model."""
    recipe: str = "quickstart"


def jump(times: float) -> Event:
    """Of the policy's weights. Args: its usual learning rate, in one step."""
    usual = quickstart.recipe().train.learning_rate
    rates = [(STEPS_BEFORE, usual), (STEPS_BEFORE + 1, times * usual), (STEPS_BEFORE + 1 + ROLLOUTS_AFTER, usual)]
    return Event(
        title="Recovery after a jump of the policy",
        said=f"In step {STEPS_BEFORE + 1} the learning rate is {times:g} times the usual one; before and after it is as"
        " usual (legs of one run, each resumed from the checkpoint of the one before).",
        legs=[(steps, ["--train.learning-rate", str(rate)]) for steps, rate in rates],
        # at the default the usual drift of a draft model that is good costs more than it learns from a step's tokens
        learning_rate=3e-4,
    )


def switch(base: Path) -> Event:
    """Of its problems. Args: where they are written to."""
    largest = curriculum.switched(STEPS_BEFORE + 1, ROLLOUTS_AFTER)
    problems = curriculum.write_problems(base / "switch.jsonl", largest)
    return Event(
        title="Recovery after a switch to harder problems",
        said=f"Numbers have up to {len(str(curriculum.FIRST))} digits until step {STEPS_BEFORE + 1}, and up to"
        f" {len(str(curriculum.LAST))} from then on.",
        legs=[(len(largest), ["--data.train.path", str(problems)])],
        learning_rate=1e-3,
        recipe=curriculum.__file__,
    )


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What the rollouts around the event accepted."""

    run: Run
    learns: bool

    def lengths(self) -> list[float]:
        """Of the rollout before it and of those after."""
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
    event: Event,
    *,
    window: int,
    shares: Sequence[float],
    after: float,
    settings: Sequence[str],
) -> tuple[list[Recovery], list[str]]:
    """Run with a frozen draft model, and with one refreshed after every step, per share of the time.

    Returns them, and what differs between them and must not. Args: share of the time while accept_length is lost, 0:
    the usual one.
    """
    kinds = {"frozen": refreshing("off", shares[0])}
    more = f", {100 * after:g} % while it is lost" if after else ""
    kinds |= {f"every step, {100 * share:g} %{more}": refreshing("every_step", share, after) for share in shares}
    found = []
    for name, refresh in kinds.items():
        root = folder_of(base, name)
        rate = ["--distillation.learning-rate", str(event.learning_rate)]
        _legs(root, name, event, [*drafting(draft, window), *refresh, *rate, *settings])
        found.append(Recovery(run=Run.read(name, root), learns=name != "frozen"))
    return found, differences([recovery.run for recovery in found])


def folder_of(base: Path, name: str) -> Path:
    """Of the run with such a draft model."""
    return base / f"jump-{name.replace(' ', '-').replace(',', '').replace('%', 'percent')}"


def _legs(root: Path, name: str, event: Event, settings: Sequence[str]) -> None:
    for number, (steps, own) in enumerate(event.legs):
        print(f"-- recovery, {name}: to step {steps}, {' '.join(own)}", flush=True)
        resume = ["--resume", "auto"] if number else []
        resume += ["--checkpoint.export", "True"] if number == len(event.legs) - 1 else []
        start(root, [*settings, "--train.steps", str(steps), *own, *resume], event.recipe)


def section(found: Sequence[Recovery], different: Sequence[str], event: Event, more: str = "") -> str:
    """Of the page. Args: a paragraph that follows."""
    lines = found[0].run.lines
    before, after = (float(line["accuracy/train"]) for line in lines[STEPS_BEFORE : STEPS_BEFORE + 2])
    entropies = [float(line["policy/entropy"]) for line in lines[STEPS_BEFORE : STEPS_BEFORE + 2]]
    equal = "Responses, rewards and metrics of the policy are identical in these runs, too."
    if different:
        equal = "**These runs differ, which they must not:** " + "; ".join(different[:10]) + "."
    return "\n".join(
        [
            f"## {event.title}",
            "",
            f"The draft model was distilled on the policy at its start. {event.said} The share of right responses goes "
            f"from {before:.2f} to {after:.2f}, the policy's entropy from {entropies[0]:.2f} to {entropies[1]:.2f} "
            "nats per token. accept_length by rollout; *of before*: the best after one to three refreshes over that "
            f"before. The draft model's learning rate is {event.learning_rate:g}.",
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
