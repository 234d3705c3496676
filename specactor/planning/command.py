"""``specactor plan``: which devices of a cluster verify, which draft, and with what window. Needs no GPU.

Costs are predicted from published figures of devices and models, or read from a table that ``specactor profile``
measured. The search itself is `planning.search`.

Invariants: what is wrong on the command line is one ConfigError or PlanError of one line; nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

# A private name of tyro, whose version is pinned: its public interface can only print a box.
from tyro import _errors as tyro_errors

from specactor.config import MAX_WINDOW
from specactor.errors import ConfigError
from specactor.planning.gpu_specs import DEVICES, device
from specactor.planning.model_shapes import DRAFTERS, SHAPES, TransformerShape
from specactor.planning.plans import Candidates, Cluster, RolloutPlan, from_table
from specactor.planning.rooflines import from_figures
from specactor.planning.search import search
from specactor.rollout import cost_file
from specactor.rollout.speculation.acceptance import survival_of

PROG = "specactor plan"
NUMBERS = ("x off", "tok/s/device", "verifiers", "drafters", "idle", "requests")
"""Columns."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Ranks plans of a rollout: plain decoding, coupled and decoupled speculation."""

    model: str = "Qwen2.5-32B"
    """The target: a built-in shape, or a folder with a Hugging Face config.json."""
    drafters: tuple[str, ...] = ()
    """Draft models, named like the target; none: those that are built in for it. With --cost-table: names in the
    table; none: all."""
    device: str = "H100"
    """Published figures to predict from."""
    devices: int = 256
    """Of the cluster, all of them: idle ones are charged."""
    requests: int = 8192
    """That are there to run at once, in the whole cluster."""
    context: int = 4096
    """Tokens of a request in the KV cache, on average over the rollout."""
    acceptance: tuple[str, ...] = ("0.8",)
    """P(a draft token is accepted): one number, or TEMPERATURE:NUMBER several times, interpolated. With several
    drafters it holds for all; NAME=NUMBER gives one of them its own."""
    temperature: float = 1.0
    """At which the policy is sampled. Only chooses among the TEMPERATURE:NUMBER of --acceptance."""
    max_window: int = MAX_WINDOW
    """Largest window to consider."""
    engine_devices: tuple[int, ...] = ()
    """Devices of one verifier to consider; none: of 1, 2, 4, 8 those that divide the heads and hold the model. With
    --cost-table: of the engine that was measured (default 1)."""
    drafter_devices: tuple[int, ...] = ()
    """Devices of one decoupled drafter to consider; none: 1, 2. With --cost-table: 1 of the drafter process that was
    measured, or as many as of the engine, if none was."""
    message_us: float = 100.0
    """Microseconds from a commit's departure to the arrival of what it changes, without drafting."""
    margin: float = 0.0
    """Share by which a plan must be faster than plain decoding, to be ranked before it: what predictions err by."""
    cost_table: str = ""
    """File that ``specactor profile`` wrote; in place of --model, --device and --context. Where it has a drafter
    process, that is what drafts elsewhere (decoupled), at its measured pace; nobody waits for it."""
    top: int = 10
    """Plans to show."""
    json: bool = False
    """Print the plans as JSON."""


def parse(argv: Sequence[str]) -> PlanOptions:
    """Raises ConfigError for what is wrong with the command line; prints and raises SystemExit(0) for ``--help``."""

    def reject(event: tyro_errors.ParseErrorEvent) -> NoReturn:
        raise ConfigError(one_line(event, argv))

    with tyro_errors.on_parse_error(reject):
        options = tyro.cli(PlanOptions, prog=PROG, args=list(argv))
    for name in ("devices", "requests", "context", "top"):
        if getattr(options, name) < 1:
            raise ConfigError.at(name, getattr(options, name), ">= 1", f"Its meaning: {PROG} --help")
    if not 1 <= options.max_window <= MAX_WINDOW:
        raise ConfigError.at("max_window", options.max_window, f"1..{MAX_WINDOW}", "No engine verifies a larger one.")
    if options.device.lower() not in map(str.lower, DEVICES):
        raise ConfigError.at(
            "device", options.device, f"one of {', '.join(DEVICES)}", "For others measure: specactor profile RECIPE."
        )
    for name in ("temperature", "message_us", "margin"):
        if not getattr(options, name) >= 0:
            raise ConfigError.at(name, getattr(options, name), ">= 0", f"Its meaning: {PROG} --help")
    _check_sizes(options)
    return options


def _check_sizes(options: PlanOptions) -> None:
    """Of engines. Raises ConfigError."""
    if options.cost_table and options.drafter_devices:
        raise ConfigError.at(
            "drafter_devices",
            options.drafter_devices,
            "none with --cost-table, whose drafters have the devices that they were measured on",
            "Leave it out, or give the measured engine's devices as --engine-devices.",
        )
    of = device(options.device)
    most, node = (
        (options.devices, "of the cluster") if options.cost_table else (of.node_devices, f"a node of {of.name}")
    )
    for name in ("engine_devices", "drafter_devices"):
        for size in getattr(options, name):
            if not 1 <= size <= most:
                raise ConfigError.at(name, size, f"1..{most} ({node})", f"Its meaning: {PROG} --help")


def plans(options: PlanOptions) -> list[RolloutPlan]:
    """Ranked. Raises ConfigError, DataError and PlanError for what cannot be planned."""
    return search(
        Cluster(devices=options.devices, requests=options.requests, message_s=options.message_us * 1e-6),
        *_candidates(options),
        max_window=options.max_window,
        margin=options.margin,
    )


def run(argv: Sequence[str], console: Console) -> None:
    """Print the plans. Raises SpecActorError."""
    options = parse(argv)
    ranked = plans(options)[: options.top]
    if options.json:
        print(json.dumps([msgspec.to_builtins(plan) for plan in ranked], indent=2))
    else:
        _show(options, ranked, console)


def acceptance_at(words: Sequence[str], drafter: str, temperature: float) -> float:
    """P(a draft token is accepted) of a drafter, from the words of --acceptance.

    The drafter's own NAME=NUMBER comes before plain numbers; between TEMPERATURE:NUMBER values it is linear, and
    constant beyond them. Raises ConfigError.
    """
    points: dict[float, float] = {}
    own: float | None = None
    for word in words:
        name, equals, value = word.rpartition("=")
        at, colon, number = value.rpartition(":")
        try:
            rate, where = float(number), float(at) if colon else 0.0
        except ValueError:
            rate = -1.0
        if not 0 <= rate <= 1 or (equals and colon):
            raise ConfigError.at(
                "acceptance", word, "NUMBER, TEMPERATURE:NUMBER or NAME=NUMBER with numbers in 0..1", "Correct it."
            )
        if equals:
            own = rate if name == drafter else own
        else:
            points[where] = rate
    if own is not None:
        return own
    if not points:
        raise ConfigError.at("acceptance", " ".join(words), f"a number for {drafter}", f"Add {drafter}=NUMBER.")
    known = sorted(points)
    right = next((t for t in known if t >= temperature), known[-1])
    left = next((t for t in reversed(known) if t <= temperature), known[0])
    share = (temperature - left) / (right - left) if left < right else 0.0
    return points[left] + share * (points[right] - points[left])


def _candidates(options: PlanOptions) -> tuple[Sequence[Any], Sequence[Any]]:
    found = _measured(options) if options.cost_table else _predicted(options)
    return found.verifiers, found.drafters


def _predicted(options: PlanOptions) -> Candidates:
    target = named_shape(options.model)
    names = options.drafters or DRAFTERS.get(target.name, ())
    shapes = [named_shape(name, "drafters") for name in names]
    return from_figures(
        target,
        shapes,
        device(options.device),
        survivals=_survivals(options, [shape.name for shape in shapes]),
        context=options.context,
        max_requests=max(options.requests, 1),
        sizes=options.engine_devices,
        drafter_sizes=options.drafter_devices or (1, 2),
    )


def _measured(options: PlanOptions) -> Candidates:
    table = cost_file.read(options.cost_table)
    names = options.drafters or table.methods
    if unknown := sorted(set(names) - set(table.methods)):
        raise ConfigError.at(
            "drafters", unknown, f"names in the table: {sorted(table.methods)}", "Leave them out, or measure them."
        )
    if len(options.engine_devices) > 1:
        raise ConfigError.at(
            "engine_devices",
            options.engine_devices,
            "one number with --cost-table",
            "Give the measured engine's.",
        )
    survivals = _survivals(options, names)
    return from_table(table.only(names), devices=(options.engine_devices or (1,))[0], survivals=survivals)


def _survivals(options: PlanOptions, names: Sequence[str]) -> Mapping[str, tuple[float, ...]]:
    return {
        name: survival_of(acceptance_at(options.acceptance, name, options.temperature), options.max_window)
        for name in names
    }


def named_shape(name: str, setting: str = "model") -> TransformerShape:
    """Built in, or of a folder."""
    if name in SHAPES:
        return SHAPES[name]
    file = Path(name) / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        raise ConfigError.at(
            setting, name, f"a folder with config.json or one of {', '.join(SHAPES)}", "Check the name or the path."
        ) from None
    return TransformerShape.of_config(config, Path(name).name)


def _show(options: PlanOptions, ranked: Sequence[RolloutPlan], console: Console) -> None:
    """A table that fits 80 columns, and a line for each plan."""
    what = options.cost_table or f"{options.model} on {options.device}, published figures"
    table = Table(
        title=f"{what}: {options.devices} devices, {options.requests} requests",
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
        drafter = "" if plan.mode == "off" else f"{plan.draft.drafter}: "
        console.print(f"{number}  {drafter}{plan.reason}{_bytes(plan)}", highlight=False, soft_wrap=True)


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


def _bytes(plan: RolloutPlan) -> str:
    """Per device, where known; and of messages."""
    said = ""
    for name, of in (("verifier", plan.verifiers), ("drafter", plan.drafters)):
        if of.engines and of.weights_bytes:
            said += f"; per {name} device {of.weights_bytes / 1e9:.1f} GB weights, {of.kv_bytes / 1e9:.1f} GB KV"
    return said + (f"; {plan.message_bytes_per_s / 1e6:.1f} MB/s messages" if plan.drafters.engines else "")


def one_line(event: tyro_errors.ParseErrorEvent, argv: Sequence[str]) -> str:
    """What tyro objects to, in the house form."""
    if isinstance(event, tyro_errors.UnrecognizedArgs):
        return f"unknown setting {event.tokens[0]}. Those there are: {PROG} --help"
    argument = getattr(event, "argument", None)
    if argument is None:
        return str(event)
    flag = argument.lowered.name_or_flags[-1]
    after = next((argv[i + 1 : i + 2] for i, word in enumerate(argv) if word.replace("_", "-") == flag), [])
    got = repr(after[0]) if after else "no value"
    key = flag.removeprefix("--").replace("-", "_")
    return f"{key}: got {got}, expected {argument.lowered.metavar}. Its meaning: {PROG} --help"
