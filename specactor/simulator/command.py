"""``specactor simulate``: RL steps of a cluster in virtual time, with the planner that engines call. Needs no GPU.

Seconds come from published figures of devices and models, or from a table that ``specactor profile`` measured; lengths
and acceptance from distributions, or from a run's own metrics. What the planner believes and what is true may differ.
The simulator is `simulator`.

Invariants: equal settings give equal results; what is wrong on the command line is one error of one line; nothing is
written but the page that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import tyro
from rich.console import Console
from rich.table import Table

# A private name of tyro, whose version is pinned: its public interface can only print a box.
from tyro import _errors as tyro_errors

from specactor.errors import ConfigError, DataError
from specactor.metrics import read_metrics
from specactor.planning.command import acceptance_at, named_shape, one_line
from specactor.planning.gpu_specs import Device, device
from specactor.planning.model_shapes import DRAFTERS, TransformerShape
from specactor.planning.plans import Candidates, from_table
from specactor.planning.rooflines import from_figures
from specactor.rollout import cost_file
from specactor.rollout.speculation.acceptance import survival_of
from specactor.simulator.page import page
from specactor.simulator.replay import Replay, of_metrics
from specactor.simulator.requests import Lengths, Method
from specactor.simulator.steps import Job, Phases, Refresh, Run, Schedule, run
from specactor.simulator.world import Delays, Policy, SimulatedMode, Truth, slower

PROG = "specactor simulate"
TRAIN_FLOPS = 6.0
"""Operations per parameter and token of a forward and a backward."""
HEADING = ("mode", "step s", "x", "rollout s", "x", "accept rate", "idle", "plan")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Simulates RL steps of a cluster, in several modes, on the same requests."""

    model: str = "Qwen2.5-32B"
    """The target: a built-in shape, or a folder with a Hugging Face config.json."""
    drafters: tuple[str, ...] = ()
    """Draft models, named like the target; none: those that are built in for it, or in the cost table."""
    device: str = "H100"
    """Published figures to predict from."""
    devices: int = 64
    engine_devices: tuple[int, ...] = ()
    """Devices of one verifier to consider; none: all that fit. With --cost-table: of the measured engine (1)."""
    cost_table: str = ""
    """File that ``specactor profile`` wrote, in place of --device and --context: what the planner believes."""
    true_cost_table: str = ""
    """The same, of what happens; none: what the planner believes."""
    true_round_ms: float = 0.0
    """What a verifier's round truly takes beyond its table: an engine's host."""
    true_draft_step_ms: float = 0.0
    """The same of each draft token."""
    prompts: int = 256
    """Of a step."""
    group_size: int = 16
    """Responses to each prompt."""
    length_median: float = 4000.0
    length_sigma: float = 1.0
    """Of the logarithm of lengths: how heavy the tail is."""
    length_longest: int = 20000
    replay: str = ""
    """Folder of a run whose lengths and acceptance are drawn instead, where it logged them; with --cost-table also its
    training speed."""
    context: int = 8192
    """Tokens of a request in the KV cache, on average over the rollout."""
    acceptance: tuple[str, ...] = ("0.75",)
    """P(a draft token is accepted), as the planner believes: a number, or NAME=NUMBER for one drafter."""
    true_acceptance: tuple[str, ...] = ()
    """The same, of the first draft token, as it is; none: as believed."""
    decay: float = 0.98
    """Of the true acceptance, from one position of a draft to the next."""
    spread: float = 0.5
    """Standard deviation of log-odds of acceptance among requests."""
    drift: float = 0.01
    """Share of acceptance that is lost per 1,000 tokens of a response."""
    staleness: float = 0.05
    """Share of acceptance that is lost per further step without --refresh."""
    jitter: float = 0.02
    """Standard deviation of the logarithm of engines' slowness."""
    modes: tuple[SimulatedMode, ...] = ("off", "coupled", "decoupled", "auto")
    window: int = 0
    """Of mode coupled; 0: the best plan's."""
    max_window: int = 8
    reconfigure: bool = True
    """Mode auto: windows follow what is seen."""
    fastest: bool = True
    """Mode auto: engines that ran dry draft for the others."""
    steps: int = 1
    schedule: Schedule = "synchronous"
    train_devices: int = 0
    """One-step-off: devices of the cluster that only train."""
    train_tokens_per_s: float = 0.0
    """Of a device; 0: from figures, at --mfu."""
    mfu: float = 0.35
    """Share of a device's operations per second that training attains."""
    sync_s: float = 2.0
    reward_s: float = 0.05
    """Of one response."""
    refresh: Refresh = "never"
    """When the drafter is distilled: never, idle (on devices idle in the tail), after."""
    refresh_device_s: float = 512.0
    """Device-seconds of that, per step."""
    seed: int = 0
    json: bool = False
    """Print results as JSON."""
    out: str = ""
    """Write an HTML page."""


def parse(argv: Sequence[str]) -> SimulateOptions:
    """Raises ConfigError for what is wrong with the command line; prints and raises SystemExit(0) for ``--help``."""

    def reject(event: tyro_errors.ParseErrorEvent) -> NoReturn:
        raise ConfigError(one_line(event, argv).replace("specactor plan", PROG))

    with tyro_errors.on_parse_error(reject):
        options = tyro.cli(SimulateOptions, prog=PROG, args=list(argv))
    for name in ("devices", "prompts", "group_size", "length_longest", "max_window", "steps", "context"):
        if getattr(options, name) < 1:
            raise ConfigError.at(name, getattr(options, name), ">= 1", f"Its meaning: {PROG} --help")
    for name in ("true_round_ms", "true_draft_step_ms", "train_tokens_per_s"):
        if getattr(options, name) < 0:
            raise ConfigError.at(name, getattr(options, name), ">= 0", f"Its meaning: {PROG} --help")
    if not options.modes:
        raise ConfigError.at("modes", "none", "at least one of off, coupled, decoupled, auto", "Name one.")
    if not 0 < options.mfu <= 1:
        raise ConfigError.at("mfu", options.mfu, "a share, > 0 and <= 1", f"Its meaning: {PROG} --help")
    return options


def jobs(options: SimulateOptions) -> dict[str, Job]:
    """By mode, on the same requests. Raises ConfigError, DataError and PlanError for what cannot be."""
    replay = _replay(options) if options.replay else None
    belief = _candidates(options, options.cost_table, replay)
    true = _candidates(options, options.true_cost_table, replay) if options.true_cost_table else belief
    true = slower(true, round_s=options.true_round_ms * 1e-3, draft_step_s=options.true_draft_step_ms * 1e-3)
    names = [option.name for option in true.drafters]
    truth = Truth(
        candidates=true,
        methods={name: _method(options, name, replay) for name in names},
        delays=Delays(),
        jitter=options.jitter,
    )
    lengths = Lengths(median=options.length_median, sigma=options.length_sigma, longest=options.length_longest)
    phases = Phases(
        train_tokens_per_s_per_device=_train_tokens_per_s(options, replay),
        reward_s=options.reward_s,
        sync_s=options.sync_s,
        refresh=options.refresh,
        refresh_device_s=options.refresh_device_s,
    )
    job = Job(
        devices=options.devices,
        prompts=options.prompts,
        group_size=options.group_size,
        lengths=replay.lengths if replay else lengths,
        belief=belief,
        truth=truth,
        policy=Policy(),
        phases=phases,
        steps=options.steps,
        schedule=options.schedule,
        train_devices=options.train_devices,
        seed=options.seed,
    )
    return {mode: _in_mode(options, job, mode) for mode in options.modes}


def command(argv: Sequence[str], console: Console) -> None:
    """Simulate and show. Raises SpecActorError."""
    options = parse(argv)
    runs = {mode: run(job) for mode, job in jobs(options).items()}
    if options.json:
        print(json.dumps({mode: figures(of) for mode, of in runs.items()}, indent=2))
    else:
        _show(options, runs, console)
    if options.out:
        facts = [(name.replace("_", " "), str(value)) for name, value in vars(options).items() if value != ""]
        text = page(f"{_subject(options)}, {options.devices} devices", runs, facts, [HEADING, *_rows(runs)])
        file = Path(options.out)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
        console.print(str(file), highlight=False, soft_wrap=True) if not options.json else None


def figures(of: Run) -> dict[str, Any]:
    """Of one run, for programs. Seconds, tokens and shares of all steps."""
    plan = of.plan
    return {
        "plan": {
            "mode": plan.mode,
            "drafter": plan.draft.drafter,
            "window": plan.window,
            "verifiers": [plan.verifiers.engines, plan.verifiers.devices_each],
            "drafters": [plan.drafters.engines, plan.drafters.devices_each],
            "predicted_tokens_per_s": plan.tokens_per_s,
        },
        "seconds": of.seconds,
        "tokens": of.tokens,
        "rollout_tokens_per_s": of.tokens / of.rollout_s,
        "device_shares": dict(of.shares),
        "steps": [
            {
                "rollout_s": step.rollout_s,
                "reward_s": step.reward_s,
                "train_s": step.train_s,
                "sync_s": step.sync_s,
                "refresh_s": step.refresh_s,
                "seconds": step.seconds,
                "tokens": step.outcome.tokens,
                "drafted": step.outcome.drafted,
                "accepted": step.outcome.accepted,
                "rounds": step.outcome.rounds,
                "events": step.outcome.events,
                "decisions": step.outcome.decisions,
                "dry_engines_drafting": step.outcome.lent,
                "further_methods": step.outcome.pairs,
            }
            for step in of.steps
        ],
    }


def _in_mode(options: SimulateOptions, job: Job, mode: SimulatedMode) -> Job:
    policy = Policy(
        mode=mode,
        window=options.window if mode == "coupled" else 0,
        max_window=options.max_window,
        reconfigure=options.reconfigure,
        fastest=options.fastest,
    )
    refreshed = job.phases if mode != "off" else replace(job.phases, refresh="never")
    return replace(job, policy=policy, phases=refreshed)


def _replay(options: SimulateOptions) -> Replay:
    folder = Path(options.replay)
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(f"replay: got {options.replay!r}, expected the folder of a run, with metrics.jsonl.")
    try:
        return of_metrics(read_metrics(folder), max_window=options.max_window, seed=options.seed)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"replay: got a metrics.jsonl that no run writes ({error!r}). Name another run.") from None


def _candidates(options: SimulateOptions, file: str, replay: Replay | None) -> Candidates:
    """By a measured table, or by figures; with the acceptance that is believed."""
    if file:
        table = cost_file.read(file)
        names = options.drafters or tuple(table.drafters)
        if unknown := sorted(set(names) - set(table.drafters)):
            raise ConfigError.at("drafters", unknown, f"some of {sorted(table.drafters)}", "Measure them.")
        return from_table(
            table.only(names), devices=(options.engine_devices or (1,))[0], survivals=_survivals(options, names, replay)
        )
    target, hardware = named_shape(options.model), device(options.device)
    names = options.drafters or DRAFTERS.get(target.name, ())
    shapes = [named_shape(name, "drafters") for name in names]
    return from_figures(
        target,
        shapes,
        hardware,
        survivals=_survivals(options, [shape.name for shape in shapes], replay),
        context=options.context,
        max_requests=2048,
        sizes=options.engine_devices,
    )


def _survivals(
    options: SimulateOptions, names: Sequence[str], replay: Replay | None
) -> Mapping[str, tuple[float, ...]]:
    """One position more than windows have: whether a decoupled drafter goes on."""
    width = options.max_window + 1
    logged = replay.methods if replay else {}
    return {
        name: logged[name].survival(width)
        if name in logged
        else survival_of(acceptance_at(options.acceptance, name, 1.0), width)
        for name in names
    }


def _method(options: SimulateOptions, name: str, replay: Replay | None) -> Method:
    logged = replay.methods.get(name) if replay else None
    rate = acceptance_at(options.true_acceptance or options.acceptance, name, 1.0)
    return Method(
        rate=rate,
        decay=options.decay,
        by_position=logged.by_position if logged else (),
        spread=options.spread,
        drift=options.drift,
        staleness=options.staleness,
    )


def _train_tokens_per_s(options: SimulateOptions, replay: Replay | None) -> float:
    if options.train_tokens_per_s:
        return options.train_tokens_per_s
    if replay and replay.train_tokens_per_s and options.cost_table:  # of the same devices as the rounds
        return replay.train_tokens_per_s / options.devices
    if options.cost_table:
        raise ConfigError.at(
            "train_tokens_per_s",
            0,
            "> 0 with --cost-table",
            "Give what a device trains, or --replay a run that logged it.",
        )
    return trained_per_s(named_shape(options.model), device(options.device), options.mfu)


def trained_per_s(shape: TransformerShape, hardware: Device, mfu: float) -> float:
    """Tokens per second of a device, forward and backward."""
    return hardware.flops * mfu / (TRAIN_FLOPS * shape.active_params)


def _subject(options: SimulateOptions) -> str:
    return options.cost_table or f"{options.model} on {options.device}"


def _rows(runs: Mapping[str, Run]) -> list[tuple[str, ...]]:
    first = next(iter(runs.values()))
    return [(mode, *_row(of, first)) for mode, of in runs.items()]


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
        f"{of.shares['idle']:.0%}",
        f"{plan.mode} w={plan.window}, {counts}" if plan.window else f"off, {counts}",
    )


def _show(options: SimulateOptions, runs: Mapping[str, Run], console: Console) -> None:
    table = Table(
        title=f"{_subject(options)}: {options.devices} devices, {options.steps} steps of {options.prompts} x "
        f"{options.group_size} requests, {options.schedule}; simulated",
        title_justify="left",
        caption="x: speed over the first row. idle: share of device-seconds. plan: verifiers (+ drafters), engines x "
        "devices.",
        caption_justify="left",
    )
    for column in HEADING:
        table.add_column(column, justify="left" if column in ("mode", "plan") else "right", no_wrap=column != "plan")
    for row in _rows(runs):
        table.add_row(*row)
    console.print(table)
