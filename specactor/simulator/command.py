"""``specactor simulate``: RL steps of a cluster in virtual time. Equal settings give equal results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from specactor.errors import ConfigError
from specactor.planning.command import Inputs, acceptance_at, candidates, parse
from specactor.planning.memory import named_shape
from specactor.planning.model_shapes import TransformerShape
from specactor.planning.rooflines import Device, device
from specactor.simulator.engine import Policy, SimulatedMode
from specactor.simulator.requests import Lengths, Method, World
from specactor.simulator.rollout import Job, Run, run

PROG = "specactor simulate"
MFU = 0.35  # share of a device's operations per second that training attains. Assumed
TRUTH = Method(rate=0.0, decay=0.98, spread=0.5, drift=0.01, staleness=0.05)
"""It says how acceptance is taken to differ by position, request, length and age."""
PHASES = ("rollout_s", "train_s", "sync_s", "refresh_s", "seconds")
COUNTS = ("tokens", "drafted", "accepted", "rounds", "events", "decisions")
HEADING = ("mode", "step s", "x", "rollout s", "x", "accept rate", "idle", "plan")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Inputs):
    """Simulates RL steps of a cluster, in several modes, on the same requests."""

    true_acceptance: tuple[str, ...] = ()
    """P(the first draft token is accepted) as it is, in the form of --acceptance; none: as believed."""
    prompts: int = 256
    """Of a step."""
    group_size: int = 16
    """Responses to each prompt."""
    length_median: float = 4000.0
    length_sigma: float = 1.0
    """Of the logarithm of lengths: how heavy the tail is."""
    length_longest: int = 20000
    modes: tuple[SimulatedMode, ...] = ("off", "coupled", "decoupled", "auto")
    steps: int = 1
    train_tokens_per_s: float = 0.0
    """Of a device; 0: from figures."""
    refresh: bool = False
    """Distil the drafter after each step."""
    seed: int = 0


def parsed(argv: Sequence[str]) -> SimulateOptions:
    positive = ("prompts", "group_size", "length_longest", "steps")
    options = parse(SimulateOptions, PROG, argv, positive=positive)
    if options.train_tokens_per_s < 0:
        raise ConfigError.at("train_tokens_per_s", options.train_tokens_per_s, ">= 0", f"Its meaning: {PROG} --help")
    if not options.modes:
        raise ConfigError.at("modes", "none", "at least one of off, coupled, decoupled, auto", "Name one.")
    return options


def jobs(options: SimulateOptions) -> dict[str, Job]:
    """Return a job per mode, on the same requests. Raises ConfigError, DataError and PlanError."""
    found = candidates(options, max_requests=2048, processes=False)  # of one engine
    if options.cost_table and not options.train_tokens_per_s:
        raise ConfigError.at("train_tokens_per_s", 0, "> 0 with --cost-table", "Give what a device trains.")
    words = options.true_acceptance or options.acceptance
    methods = {d.name: replace(TRUTH, rate=acceptance_at(words, d.name)) for d in found.drafters}
    job = Job(
        devices=options.devices,
        prompts=options.prompts,
        group_size=options.group_size,
        lengths=Lengths(median=options.length_median, sigma=options.length_sigma, longest=options.length_longest),
        options=found,
        world=World(methods=methods, jitter=0.02),
        policy=Policy(),
        train_tokens_per_s=options.train_tokens_per_s
        or trained_per_s(named_shape(options.model), device(options.device)),
        steps=options.steps,
        seed=options.seed,
    )
    return {
        mode: replace(
            job,
            policy=Policy(mode=mode, max_window=options.max_window),
            refresh=options.refresh and mode != "off",
        )
        for mode in options.modes
    }


def command(argv: Sequence[str], console: Console) -> None:
    options = parsed(argv)
    runs = {mode: run(job) for mode, job in jobs(options).items()}
    if options.json:
        print(json.dumps({mode: figures(of) for mode, of in runs.items()}, indent=2))
    else:
        _show(options, runs, console)


def figures(of: Run) -> dict[str, Any]:
    plan = of.plan
    return {
        "plan": {
            "mode": plan.mode,
            "drafter": plan.drafter,
            "window": plan.window,
            "verifiers": [plan.verifiers.engines, plan.verifiers.devices_each],
            "drafters": [plan.drafters.engines, plan.drafters.devices_each],
            "predicted_tokens_per_s": plan.tokens_per_s,
        },
        "seconds": of.seconds,
        "tokens": of.tokens,
        "rollout_tokens_per_s": of.tokens / of.rollout_s,
        "idle": of.idle,
        "steps": [
            {name: getattr(step, name) for name in PHASES} | {name: getattr(step.outcome, name) for name in COUNTS}
            for step in of.steps
        ],
    }


def trained_per_s(shape: TransformerShape, hardware: Device) -> float:
    return hardware.flops * MFU / (6.0 * shape.active_params)  # operations of a forward and a backward


def _row(of: Run, first: Run) -> tuple[str, ...]:
    plan, steps = of.plan, len(of.steps)
    drafted = sum(step.outcome.drafted for step in of.steps)
    accepted = sum(step.outcome.accepted for step in of.steps)
    counts = f"{plan.verifiers.engines}x{plan.verifiers.devices_each}"
    if plan.drafters.engines:
        counts += f" + {plan.drafters.engines}x{plan.drafters.devices_each}"
    return (
        f"{of.seconds / steps:.1f}",
        f"{first.seconds / of.seconds:.2f}",
        f"{of.rollout_s / steps:.1f}",
        f"{first.rollout_s / of.rollout_s:.2f}",
        f"{accepted / drafted:.2f}" if drafted else "-",
        f"{of.idle:.0%}",
        f"{plan.mode} w={plan.window}, {counts}" if plan.window else f"off, {counts}",
    )


def _show(options: SimulateOptions, runs: Mapping[str, Run], console: Console) -> None:
    table = Table(
        title=f"{options.subject}: {options.devices} devices, {options.steps} steps of {options.prompts} x "
        f"{options.group_size} requests; simulated",
        title_justify="left",
        caption="x: speed over the first row. idle: share of device-seconds. plan: verifiers (+ drafters), engines x "
        "devices.",
        caption_justify="left",
    )
    for column in HEADING:
        table.add_column(column, justify="left" if column in ("mode", "plan") else "right", no_wrap=column != "plan")
    first = next(iter(runs.values()))
    for mode, of in runs.items():
        table.add_row(mode, *_row(of, first))
    console.print(table)
