"""``specactor profile``: measures rounds of a recipe's engine and drafter process, and writes a cost table.

Invariants: what cannot be profiled is refused before an engine starts; the table appears under its name only when it is
whole; after an error or an interrupt neither a file nor a process is left.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from specactor.config import Config, SpeculationConfig
from specactor.data.tiny_model import make_tiny_model
from specactor.errors import ConfigError
from specactor.parallel.devices import gpus, numbers
from specactor.parallel.layout import ModelShape
from specactor.planning.profile_engine import PASSES, Sizes, measure, measure_process
from specactor.planning.profile_grid import Check, cells, checks, cost_table
from specactor.rollout import cost_file
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.decoupled.transport import Address, DrafterAccess
from specactor.rollout.drafter_start import Host, make_specs
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.speculation.costs import METHOD, CostTable
from specactor.rollout.speculation.registry import make_drafters

PROCESS_SHARE = 0.5  # of the time for the engine, how much a drafter process may have


def run(config: Config, *, out: Path | None, limit_s: float, console: Console) -> Path:
    """Measure, and write the table. Returns its file, by default costs.json in the folder of the run.

    Measuring takes about `limit_s`, and half as long again with a drafter process; starts come on top. Raises
    SpecActorError for what cannot be profiled, and when an engine fails.
    """
    _check(config)
    file = out or Path(config.output_dir) / config.name / "costs.json"
    with tempfile.TemporaryDirectory(prefix="specactor-profile-") as folder:
        model_dir = Path(config.model.path)
        if config.model.tiny is not None:
            console.print("making the tiny model; its weights are random, which changes no speed")
            model_dir = Path(folder) / "model"
            make_tiny_model(config.model.tiny, config.seed, model_dir)
        shape = ModelShape.read(model_dir)
        sizes = Sizes.of(config.rollout, vocab=shape.vocab_size, context=shape.max_position - 2)
        drafter = _drafter_spec(config, shape.max_position, Path(folder))
        console.print("starting the engine" + (", and a drafter process" if drafter else ""))
        spec = _spec(config, model_dir, shape.max_position, Path(folder), drafter)
        with running(spec) as engine:
            table, errors = _profile(config, engine, sizes, limit_s, console)
            if drafter is not None:
                table = _with_process(table, config, engine, drafter, sizes, limit_s * PROCESS_SHARE, console)
    cost_file.write(file, table)
    _show(errors, console)
    console.print(f"Use it with --rollout.speculation.cost-table {file}", soft_wrap=True, highlight=False)
    return file


def _check(config: Config) -> None:
    """Refuse what has no model yet, and what this machine cannot hold."""
    if config.model.tiny is None and not (Path(config.model.path) / "config.json").is_file():
        raise ConfigError.at(
            "model.path",
            config.model.path,
            "a folder with config.json",
            "Give the folder of a Hugging Face model. A run writes its own to RUN/export: "
            f"torchrun --nproc-per-node N launch/train_moe.py {config.name}",
        )
    speculation = _profiled(config.rollout.speculation)
    if "model" in speculation.drafters and not (Path(speculation.draft_model) / "config.json").is_file():
        raise ConfigError.at(
            "rollout.speculation.draft_model",
            speculation.draft_model,
            "a folder with config.json",
            "Give the folder of a Hugging Face model, or take model out of rollout.speculation.drafters.",
        )
    found = len(gpus())
    if 0 < found < config.parallel.engine_tensor:
        raise ConfigError.at(
            "parallel.engine_tensor",
            config.parallel.engine_tensor,
            f"at most the {found} GPUs of this machine",
            "Profile on a machine with more.",
        )
    make_drafters(speculation)


def _profiled(speculation: SpeculationConfig) -> SpeculationConfig:
    """Return the settings for the engine alone; drafter processes are measured afterwards."""
    drafters = tuple(name for name in speculation.drafters if name != METHOD) or ("suffix",)
    return replace(speculation, mode="coupled", drafters=drafters, fastest_of=1, cost_table="")


def _drafter_spec(config: Config, context: int, folder: Path) -> DrafterSpec | None:
    """Return the drafter process of a run with one engine, on the device after the engine's; None where it has none."""
    rollout, methods = config.rollout, config.rollout.speculation.draft_methods
    if METHOD not in methods:
        return None
    auto = replace(rollout.speculation, mode="auto", drafters=methods)
    alone = replace(
        config,
        rollout=replace(rollout, speculation=auto),
        parallel=replace(
            config.parallel,
            drafters=1,
            drafter_hosts=(),
            drafter_network="",
        ),
    )
    host = Host(ranks=config.parallel.engine_tensor, engines=1, devices=numbers(), has_gpus=bool(gpus()))
    [spec] = make_specs(alone, host, max_position=context, log_dir=folder)
    return spec


def _spec(config: Config, model_dir: Path, context: int, folder: Path, drafter: DrafterSpec | None) -> EngineSpec:
    """Return an engine like one of the run, but that it speculates in any case."""
    ranks = config.parallel.engine_tensor
    return EngineSpec(
        index=0,
        model_dir=str(model_dir.resolve()),
        dtype=config.model.dtype,
        tensor_parallel=ranks,
        devices=tuple(range(ranks)),
        config=config.rollout.engine,
        speculation=_profiled(config.rollout.speculation),
        drafters=DrafterAccess(drafters=(Address(endpoint=drafter.endpoint),) if drafter else ()),
        context_length=context,
        log_file=str(folder / "engine.log"),
        random_seed=config.seed,
    )


def _profile(
    config: Config, engine: Engine, sizes: Sizes, limit_s: float, console: Console
) -> tuple[CostTable, list[Check]]:
    assert engine.ready is not None
    speculation = _profiled(config.rollout.speculation)
    chosen = cells(
        max_requests=sizes.most_requests(config.rollout, engine.ready.kv_tokens),
        max_window=speculation.max_window,
        drafters=speculation.drafters,
    )
    console.print(
        f"measuring {len(chosen)} kinds of rounds, {PASSES} times if that takes less than {limit_s:g} s",
        highlight=False,
    )
    with _bar(console, PASSES * len(chosen)) as advance:
        measured = measure(engine, config.rollout, chosen, sizes, limit_s=limit_s, on_cell=advance)
    table = cost_table(
        measured,
        model=config.model.path or f"tiny model of {config.name}",
        device=f"{config.parallel.engine_tensor} x {gpus()[0].name if gpus() else f'core of {os.cpu_count()}'}",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return table, checks(measured, table)


def _with_process(
    table: CostTable,
    config: Config,
    engine: Engine,
    spec: DrafterSpec,
    sizes: Sizes,
    limit_s: float,
    console: Console,
) -> CostTable:
    process = DrafterProcess(spec)
    try:
        process.wait_ready()
        console.print(f"measuring the drafter process on {'GPU' if gpus() else 'core'} {spec.device}", highlight=False)
        with _bar(console, len(table.verify.requests)) as advance:
            costs = measure_process(engine, process, config.rollout, table, sizes, limit_s=limit_s, on_size=advance)
    finally:
        process.stop()
    return replace(table, process=costs)


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.completed}/{task.total}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.update(task, completed=done)


def _show(errors: list[Check], console: Console) -> None:
    """Print by how much the table is off where it was not measured."""
    if not errors:
        return
    worst = max(errors, key=lambda check: check.error)
    who, where = worst.cell.drafter or "verification", worst.cell
    console.print(
        f"{len(errors)} kinds of rounds that the table does not have: median error "
        f"{median(check.error for check in errors):.1%}, largest {worst.error:.1%} ({who}, {where.requests} requests, "
        f"window {where.window}: predicted {1e3 * worst.predicted_s:.2f} ms, measured {1e3 * worst.measured_s:.2f} ms)",
        soft_wrap=True,
        highlight=False,
    )
