"""``specactor plan``: which devices verify, which draft, with what window. It writes nothing; what is wrong on the
command line is one error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from specactor.config import MAX_WINDOW
from specactor.config.rules import rules_of
from specactor.errors import ConfigError
from specactor.planning.memory import ESTIMATED, PHASES, Memory, host_memory_of, memory_of, named_shape
from specactor.planning.model_shapes import DRAFTERS
from specactor.planning.plans import Candidates, Cluster, RolloutPlan, from_table
from specactor.planning.rooflines import DEVICES, device, from_figures
from specactor.planning.search import search
from specactor.recipes import load, one_line_errors
from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.costs import CostTable

PROG = "specactor plan"
NUMBERS = ("x off", "tok/s/device", "verifiers", "drafters", "idle", "requests")  # columns


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Plans and simulations begin with a model, its drafters, devices, and what is believed of them."""

    model: str = "Qwen2.5-32B"
    """The target: a built-in shape, or a folder with a Hugging Face config.json."""
    drafters: tuple[str, ...] = ()
    """Draft models, named like the target; none: those that are built in for it. With --cost-table: names in the
    table; none: all."""
    device: str = "H100"
    """Published figures to predict from."""
    devices: int = 64
    """Of the cluster, all of them: idle ones are charged."""
    engine_devices: tuple[int, ...] = ()
    """Devices of one verifier to consider; none: of 1, 2, 4, 8 those that divide the heads and hold the model. With
    --cost-table: of the engine that was measured (default 1)."""
    cost_table: str = ""
    """File that ``specactor profile`` wrote; in place of --model, --device and --context."""
    context: int = 4096
    """Tokens of a request in the KV cache, on average over the rollout."""
    acceptance: tuple[str, ...] = ("0.8",)
    """P(a draft token is accepted), as it is believed. With several drafters a number holds for all; NAME=NUMBER gives
    one of them its own."""
    max_window: int = 8
    """Largest window to consider."""
    host_ms: tuple[float, float] = (0.0, 0.0)
    """Milliseconds in which a verifier's device waits for the host, in a plain round and in one with drafts. Draft
    steps have none. With --cost-table it was measured."""
    json: bool = False
    """Print results as JSON."""

    @property
    def subject(self) -> str:
        return self.cost_table or f"{self.model} on {self.device}, published figures"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Inputs):
    """Ranks plans of a rollout: plain decoding, coupled and decoupled speculation. What a recipe takes of each device's
    memory: specactor plan RECIPE [--devices N] [--device D] [--key.path value ...]"""

    requests: int = 2048
    """That are there to run at once, in the whole cluster."""
    top: int = 10
    """Plans to show."""


OptionsT = TypeVar("OptionsT", bound=Inputs)


def parse(kind: type[OptionsT], prog: str, argv: Sequence[str], *, positive: Sequence[str]) -> OptionsT:
    """Read a command line. Raises ConfigError; options in `positive` are 1 at least. ``--help`` prints and exits."""
    with one_line_errors(argv, lambda token: f"unknown setting {token}. Those there are: {prog} --help"):
        options = tyro.cli(kind, prog=prog, args=list(argv))
    rule, known = rules_of(options), options.device.lower() in map(str.lower, DEVICES)
    for name in ("devices", "context", *positive):
        rule(name, getattr(options, name) >= 1, ">= 1", f"Its meaning: {prog} --help")
    rule("host_ms", all(0.0 <= ms < float("inf") for ms in options.host_ms), ">= 0", f"Its meaning: {prog} --help")
    measured = options.cost_table and any(options.host_ms)
    rule("host_ms", not measured, "0 0 with --cost-table", "The table has it already: leave it out.")
    rule("max_window", 1 <= options.max_window <= MAX_WINDOW, f"1..{MAX_WINDOW}", "No engine verifies a larger one.")
    rule("device", known, f"one of {', '.join(DEVICES)}", "For others measure: specactor profile RECIPE.")
    most = options.devices if options.cost_table else device(options.device).node_devices
    for size in options.engine_devices:
        if not 1 <= size <= most:
            what = "of the cluster" if options.cost_table else f"a node of {device(options.device).name}"
            raise ConfigError.at("engine_devices", size, f"1..{most} ({what})", f"Its meaning: {prog} --help")
    return options


def candidates(inputs: Inputs, *, max_requests: int, processes: bool) -> Candidates:
    """Return options by the cost table or by figures. Raises ConfigError, DataError and PlanError.

    Args:
        max_requests: of one engine.
        processes: whether a drafter process in the table counts.
    """
    width = inputs.max_window + 1  # one more than windows have: whether a decoupled drafter goes on
    if not inputs.cost_table:
        target = named_shape(inputs.model)
        shapes = [named_shape(name, "drafters") for name in inputs.drafters or DRAFTERS.get(target.name, ())]
        return from_figures(
            target,
            shapes,
            device(inputs.device),
            survivals={s.name: survival_of(acceptance_at(inputs.acceptance, s.name), width) for s in shapes},
            context=inputs.context,
            max_requests=max_requests,
            sizes=inputs.engine_devices,
            host_s=(inputs.host_ms[0] / 1e3, inputs.host_ms[1] / 1e3),
        )
    table = CostTable.read(inputs.cost_table)
    known = table.methods if processes else tuple(table.drafters)
    names = inputs.drafters or known
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError.at(
            "drafters", unknown, f"names in the table: {sorted(known)}", "Leave them out, or measure them."
        )
    if len(inputs.engine_devices) > 1:
        raise ConfigError.at(
            "engine_devices", inputs.engine_devices, "one number with --cost-table", "Give the measured engine's."
        )
    survivals = {name: survival_of(acceptance_at(inputs.acceptance, name), width) for name in names}
    return from_table(table.only(names), devices=(inputs.engine_devices or (1,))[0], survivals=survivals)


def plans(argv: Sequence[str]) -> tuple[PlanOptions, list[RolloutPlan]]:
    options = parse(PlanOptions, PROG, argv, positive=("requests", "top"))
    found = candidates(options, max_requests=options.requests, processes=True)
    cluster = Cluster(devices=options.devices, requests=options.requests)
    return options, search(cluster, found.verifiers, found.drafters, max_window=options.max_window)


def run(argv: Sequence[str], console: Console) -> None:
    if argv and not argv[0].startswith("-"):
        show_memory(argv, console)
        return
    options, ranked = plans(argv)
    ranked = ranked[: options.top]
    if options.json:
        print(json.dumps([msgspec.to_builtins(plan) for plan in ranked], indent=2))
    else:
        _show(options, ranked, console)


def show_memory(argv: Sequence[str], console: Console) -> None:
    parser = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=PlanOptions.devices)
    parser.add_argument("--device", default=PlanOptions.device)
    options, rest = parser.parse_known_args(argv)
    config, gpu = load(rest, prog=PROG), device(options.device)
    found = memory_of(config, options.devices, gpu.memory_bytes, gpu.node_devices)
    of_host = host_memory_of(config, options.devices, gpu.node_devices)
    console.print(_memory_table(f"{config.name}: GB on each of {options.devices} {gpu.name}", found))
    console.print(_memory_table(f"GB in the memory of a host with {min(options.devices, gpu.node_devices)}", of_host))
    console.print("What a host's processes take themselves comes on top.")
    verdict = "It fits" if found.fits else "It does not fit"
    console.print(
        f"{verdict} in {gpu.memory_bytes / 1e9:.0f} GB; {', '.join(ESTIMATED)} are estimates.", highlight=False
    )
    found.check()


def _memory_table(title: str, memory: Memory) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for column in ("", *PHASES):
        table.add_column(column, justify="right" if column else "left")
    for name, row in memory.rows.items():
        table.add_row(name, *(f"{row[phase] / 1e9:.1f}" if phase in row else "-" for phase in PHASES))
    table.add_section()
    table.add_row("in all", *(f"{memory.of(phase) / 1e9:.1f}" for phase in PHASES))
    return table


def acceptance_at(words: Sequence[str], drafter: str) -> float:
    """Return P(a draft token is accepted) of a drafter. Raises ConfigError for what is none."""
    found: dict[str, float] = {}
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = -1.0
        if not 0 <= found[name] <= 1:
            raise ConfigError.at("acceptance", word, "NUMBER or NAME=NUMBER with numbers in 0..1", "Correct it.")
    rate = found.get(drafter, found.get(""))
    if rate is None:
        raise ConfigError.at("acceptance", " ".join(words), f"a number for {drafter}", f"Add {drafter}=NUMBER.")
    return rate


def _show(options: PlanOptions, ranked: Sequence[RolloutPlan], console: Console) -> None:
    table = Table(
        title=f"{options.subject}: {options.devices} devices, {options.requests} requests",
        title_justify="left",
        caption="x off: speed over the fastest plain decoding. tok/s/device: of all devices, idle ones too. verifiers, "
        "drafters: number x devices each. requests: at once on a verifier.",
        caption_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for column in ("", "plan", *NUMBERS):
        table.add_column(column, justify="left" if column == "plan" else "right", no_wrap=True)
    for number, plan in enumerate(ranked, 1):
        table.add_row(str(number), *_row(plan))
    console.print(table)
    for number, plan in enumerate(ranked, 1):
        drafter = "" if plan.mode == "off" else f"{plan.drafter}: "
        console.print(f"{number}  {drafter}{plan.reason}", highlight=False, soft_wrap=True)


def _row(plan: RolloutPlan) -> tuple[str, ...]:
    drafting = plan.drafters.engines > 0
    return (
        "off" if plan.mode == "off" else f"{plan.mode} w={plan.window}",
        f"{plan.speedup:.2f}",
        f"{plan.tokens_per_s_per_device:.0f}",
        f"{plan.verifiers.engines} x {plan.verifiers.devices_each}",
        f"{plan.drafters.engines} x {plan.drafters.devices_each}" if drafting else "-",
        str(plan.idle_devices),
        str(plan.requests_per_engine),
    )
