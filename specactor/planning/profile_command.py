"""``specactor profile``: measures rounds of a recipe's engine and drafter process.

Invariants: what cannot be profiled is refused before an engine starts; rounds have exactly their cell's requests and
draft tokens; a slow minute falls on all.
"""

from __future__ import annotations

import datetime
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from specactor.config import Config, RolloutConfig, SpeculationConfig
from specactor.config.rollout import check_attention
from specactor.config.speculation import kind_of
from specactor.data.tiny_model import make_tiny_model
from specactor.errors import ConfigError, PlanError
from specactor.parallel.devices import gpus, numbers
from specactor.parallel.layout import ModelShape
from specactor.planning.profile_grid import SEEN, Cell, beside, by_requests, cells, cost_table
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.decoupled.transport import Address, DrafterAccess
from specactor.rollout.drafter_start import Host, draft_shape, make_specs
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.sglang.speculation_calls import CONFIGURE, ROUNDS, Rounds
from specactor.rollout.speculation.costs import METHOD, MIN_ROUNDS, CostTable, Point, ProcessCosts
from specactor.rollout.speculation.registry import check_drafters
from specactor.types import RolloutRequest, SamplingParams

# Its drafts fill their windows and are nearly always wrong, so that requests stay together in a timed verification.
FILLER = "specactor.rollout.speculation.registry:Filler"
PASSES = 3
ROUNDS_PER_PASS = 1 + MIN_ROUNDS
"""Full rounds of every cell, at least, where drafts are wrong. The first is not counted: a draft model sees the prompts
in it, and all else is done for the first time."""


def run(config: Config, *, out: Path | None, limit_s: float, console: Console) -> Path:
    """Measure, write the table, and return its file, by default costs.json in the run's folder. Raises SpecActorError
    for what cannot be profiled, and when an engine fails."""
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
            table = _profile(config, engine, sizes, limit_s, console)
            if drafter is not None:
                table = _with_process(table, config, engine, drafter, sizes, limit_s / 2, console)
    table.write(file)
    console.print(f"Use it with --rollout.speculation.cost-table {file}", soft_wrap=True, highlight=False)
    return file


def _check(config: Config) -> None:
    if config.model.tiny is None:
        ModelShape.read(Path(config.model.path))
    speculation = _profiled(config.rollout.speculation)
    for folder in speculation.in_engines.values():
        draft_shape(folder)
    found = len(gpus())
    check_attention(config.rollout.engine, gpu=found > 0)
    if 0 < found < config.parallel.engine_tensor:
        raise ConfigError.at(
            "parallel.engine_tensor",
            config.parallel.engine_tensor,
            f"at most the {found} GPUs of this machine",
            "Profile on a machine with more.",
        )
    check_drafters(speculation)


def _profiled(speculation: SpeculationConfig) -> SpeculationConfig:
    drafters = tuple(name for name in speculation.drafters if kind_of(name) != METHOD) or ("suffix",)
    return replace(speculation, mode="coupled", drafters=drafters, fastest_of=1, cost_table="")


def _drafter_spec(config: Config, context: int, folder: Path) -> DrafterSpec | None:
    """Place it on the device after the engine's; None where the recipe has none."""
    rollout, methods = config.rollout, config.rollout.speculation.draft_methods
    if METHOD not in methods:
        return None
    drafters = tuple(name for name in methods if name == METHOD or kind_of(name) != METHOD)
    auto = replace(rollout.speculation, mode="auto", drafters=drafters)
    alone = replace(
        config,
        rollout=replace(rollout, speculation=auto),
        parallel=replace(config.parallel, drafters=1, drafter_hosts=()),
    )
    host = Host(ranks=config.parallel.engine_tensor, engines=1, devices=numbers(), has_gpus=bool(gpus()))
    [spec] = make_specs(alone, host, max_position=context, log_dir=folder)
    return spec


def _spec(config: Config, model_dir: Path, context: int, folder: Path, drafter: DrafterSpec | None) -> EngineSpec:
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


def _profile(config: Config, engine: Engine, sizes: Sizes, limit_s: float, console: Console) -> CostTable:
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
    return cost_table(
        measured,
        model=config.model.path,
        device=f"{config.parallel.engine_tensor} x {gpus()[0].name if gpus() else f'core of {os.cpu_count()}'}",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


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


@dataclass(frozen=True, kw_only=True)
class Sizes:
    prompt: int
    response: int  # at most
    vocab: int
    context: int  # of prompt and response together

    @classmethod
    def of(cls, config: RolloutConfig, *, vocab: int, context: int) -> Sizes:
        """Make prompts as long as a half-done sequence. Raises PlanError for too short a context."""
        response = max(_response(drafter, config.speculation.max_window) for drafter in ("", "any"))
        room = context - response
        if room < 1:
            raise PlanError(
                f"profile: got a context of {context} tokens, expected more than {response}, which the rounds of one "
                "measurement emit. Lower rollout.speculation.max_window."
            )
        return cls(prompt=min(room, 16 + config.max_new_tokens // 2), response=response, vocab=vocab, context=context)

    def most_requests(self, config: RolloutConfig, kv_tokens: int) -> int:
        """Return how many requests a step has, the engine runs together, and its KV pool holds with two windows."""
        of_one = self.prompt + self.response + 2 * (config.speculation.max_window + 1)
        of_step = config.prompts_per_step * config.group_size
        most = min(config.engine.max_running_requests, of_step, kv_tokens // of_one)
        if most < 1:
            raise PlanError(
                f"profile: got a KV pool of {kv_tokens} tokens, expected room for a request of {of_one}. Raise "
                "rollout.engine.max_total_tokens or rollout.engine.memory_fraction."
            )
        return most

    def longest_response(self, requests: int, kv_tokens: int, config: SpeculationConfig) -> int:
        return min(self.context, kv_tokens // requests - 2 * (config.max_window + 1)) - self.prompt


def measure(
    engine: Engine,
    config: RolloutConfig,
    cells: Sequence[Cell],
    sizes: Sizes,
    *,
    limit_s: float,
    on_cell: Callable[[int], None] = lambda done: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[Cell, list[float]]:
    """Return the seconds of rounds per cell, of up to PASSES passes; `on_cell` counts cells. After `limit_s` no pass
    begins, and a running one is dropped: PlanError if it is the first."""
    deadline = clock() + limit_s
    measured: dict[Cell, list[float]] = {cell: [] for cell in cells}
    for number in range(PASSES):
        found = measure_once(engine, config, cells, sizes, number, lambda: clock() > deadline, on_cell)
        if found is None:
            break
        for cell, seconds in found.items():
            measured[cell] += seconds
    else:
        number = PASSES
    if number == 0:
        raise PlanError(
            f"profile: got no pass over all {len(cells)} cells within {limit_s:g} s, expected at least one. Allow more "
            "with --limit, or lower rollout.engine.max_running_requests or rollout.speculation.max_window."
        )
    return measured


def measure_once(
    engine: Engine,
    config: RolloutConfig,
    cells: Sequence[Cell],
    sizes: Sizes,
    number: int = 0,
    is_late: Callable[[], bool] = lambda: False,
    on_cell: Callable[[int], None] = lambda done: None,
) -> dict[Cell, list[float]] | None:
    """Return one pass's seconds by cell; None when too late to finish."""
    found: dict[Cell, list[float]] = {}
    for (drafter, window), group in groupby(
        sorted(cells, key=lambda cell: (cell.drafter, cell.window, cell.requests)),
        key=lambda cell: (cell.drafter, cell.window),
    ):
        of_window = list(group)
        _configure(engine, config, mode="coupled", drafter=drafter or FILLER, window=window)
        if drafter == "previous":  # it knows nothing but what the same seeds gave before
            engine.generate(requests_of(config, of_window[-1].requests, sizes, _response(drafter, window)))
        for cell in of_window:
            if is_late():
                return None
            engine.generate(requests_of(config, cell.requests, sizes, _response(cell.drafter, cell.window)))
            on_cell(number * len(cells) + len(found) + of_window.index(cell) + 1)
        rounds = _rounds_of(engine)
        for cell in of_window:
            found[cell] = _seconds(cell, rounds)
    return found


def _configure(
    engine: Engine, config: RolloutConfig, *, mode: Literal["coupled", "decoupled"], drafter: str, window: int
) -> None:
    alone = replace(config.speculation, mode=mode, drafters=(drafter,), window=window, fastest_of=1, cost_table="")
    engine.rank_call(CONFIGURE, msgspec.json.encode(alone), timeout_s=60.0)


def _rounds_of(engine: Engine) -> Rounds:
    """Return the engine's rounds since it was configured."""
    return msgspec.json.decode(engine.rank_call(ROUNDS, b"", timeout_s=60.0)[0], type=Rounds)


def _seconds(cell: Cell, rounds: Rounds) -> list[float]:
    if not cell.drafter:
        points = rounds.verifies if cell.window else rounds.plain
        return _of(points, cell.requests, cell.requests * (1 + cell.window))
    return _of(
        (point for points in rounds.drafts.values() for point in points), cell.requests, cell.requests * cell.window
    )


def _of(points: Iterable[Point], requests: int, total: int) -> list[float]:
    """Leave out the first such round, the cell's own first: smaller cells came before."""
    return [seconds for n, of_round, seconds in points if (n, of_round) == (requests, total)][1:]


def _response(drafter: str, window: int) -> int:
    """Return tokens for ROUNDS_PER_PASS full rounds if drafts are wrong, or two if all are right."""
    return 1 + window + (2 * (1 + window) if drafter else ROUNDS_PER_PASS)


def requests_of(config: RolloutConfig, number: int, sizes: Sizes, tokens: int) -> list[RolloutRequest]:
    sampling = SamplingParams(
        temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, max_new_tokens=tokens, ignore_eos=True
    )
    return [
        RolloutRequest(
            request_id=f"{i}",
            prompt_ids=_prompt(i // config.group_size, sizes),
            sampling=sampling,
            seed=i,
            group_id=i // config.group_size,
        )
        for i in range(number)
    ]


def _prompt(group: int, sizes: Sizes) -> tuple[int, ...]:
    return tuple(random.Random(group).choices(range(sizes.vocab), k=sizes.prompt))


def measure_process(
    engine: Engine,
    process: DrafterProcess,
    config: RolloutConfig,
    table: CostTable,
    sizes: Sizes,
    *,
    limit_s: float,
    on_size: Callable[[int], None] = lambda done: None,
    clock: Callable[[], float] = time.monotonic,
) -> ProcessCosts:
    """Measure a drafter process. Raises PlanError when nothing was drafted in time."""
    deadline = clock() + limit_s
    turns: list[Point] = []
    drafts: list[Point] = []
    verifies: list[Point] = []
    process.work(trace=False)
    for done, size in enumerate(map(int, table.verify.requests), start=1):
        if clock() > deadline:
            break
        pace = _pace(engine, config, table, sizes, size)
        own, rounds = _drafted(engine, process, config, sizes, size, lambda: clock() > deadline)
        turns += _at(pace, own)
        # Smaller batches ran before, and their rounds are counted with them.
        drafts += [p for p in _at(pace, rounds.drafts.get(METHOD, ())) if p[0] == size]
        verifies += [p for p in _at(pace, rounds.verifies) if p[0] == size]
        on_size(done)
    if not turns or not drafts:
        raise PlanError(
            f"profile: drafter {process.spec.index} drafted {len(turns)} times and the engine verified its "
            f"drafts {len(drafts)} times in {limit_s:g} s, expected both. See whether the drafter has a core or "
            "a GPU of its own, or allow more with --limit."
        )
    return ProcessCosts(token_s=by_requests(turns), ahead_s=beside(table, drafts, verifies))


def _pace(engine: Engine, config: RolloutConfig, table: CostTable, sizes: Sizes, size: int) -> float:
    """Return the table's seconds over those that the same rounds take now."""
    cell = Cell(requests=size, window=config.speculation.max_window)
    measured = measure_once(engine, config, [cell], sizes)
    assert measured is not None
    return cell.predicted_s(table) / median(measured[cell])


def _at(pace: float, points: Iterable[Point]) -> list[Point]:
    return [(n, total, pace * seconds) for n, total, seconds in points]


def _drafted(
    engine: Engine,
    process: DrafterProcess,
    config: RolloutConfig,
    sizes: Sizes,
    size: int,
    is_late: Callable[[], bool],
) -> tuple[list[Point], Rounds]:
    """Return (turns of the process, rounds of the engine)."""
    assert engine.ready is not None
    _configure(engine, config, mode="decoupled", drafter=METHOD, window=config.speculation.max_window)
    # The first tokens are generated before the process has read the prompt.
    tokens = min(64, sizes.longest_response(size, engine.ready.kv_tokens, config.speculation))
    turns: list[Point] = []
    for _ in range(8):  # at most: mostly fewer are enough
        engine.generate(requests_of(config, size, sizes, tokens))
        work = process.work(trace=False)
        turns += work.turns if work is not None else []
        if is_late() or sum(n == size for n, _, _ in turns) >= SEEN:
            break
    return turns, _rounds_of(engine)
