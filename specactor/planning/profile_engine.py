"""Measures the seconds of rounds in a running engine, cell by cell (`profile_grid`), and of a drafter process.

Invariants: a cell holds seconds of rounds with exactly its number of requests and draft tokens; a pass goes over all
cells, so that a slow minute does not fall on some alone; the engine is left as it was, but for its prefix cache.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median

import msgspec

from specactor.config import RolloutConfig, SpeculationConfig
from specactor.errors import PlanError
from specactor.planning.profile_grid import SEEN, Cell, beside, by_requests, without_waits
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.sglang.engine_client import Engine
from specactor.rollout.sglang.speculation_calls import CONFIGURE, FIGURES, ROUNDS, Rounds
from specactor.rollout.speculation.costs import METHOD, CostTable, Point, ProcessCosts
from specactor.rollout.speculation.counters import Figures
from specactor.types import RolloutRequest, SamplingParams

FILLER = "specactor.rollout.speculation.registry:Filler"
PASSES = 3
ROUNDS_PER_PASS = 6
"""Full rounds of every cell, at least, where drafts are wrong. The first one is not counted: a draft model sees the
prompts in it, and all else is done for the first time."""
CALL_S = 60.0
REPEATS = 8  # times that requests are generated for a drafter process, at most, for each number of them
TOKENS = 64  # of a response then, at most. Its first ones are generated before the process has read the prompt


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the requests that are measured, in tokens."""

    prompt: int
    response: int  # at most
    vocab: int
    context: int  # of prompt and response together

    @classmethod
    def of(cls, config: RolloutConfig, *, vocab: int, context: int) -> Sizes:
        """Make prompts as long as a half-done sequence. Raises PlanError where the model's context is too short."""
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
        """Return the longest response for which so many requests have room."""
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
    """Return the seconds of rounds per cell, of up to PASSES passes; `on_cell` gets how many cells are done. After
    `limit_s` no pass begins, and a running one is dropped. Raises PlanError when that is the first one."""
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
    """Measure in one pass; None when it is too late to finish."""
    found: dict[Cell, list[float]] = {}
    for (drafter, window), group in groupby(
        sorted(cells, key=lambda cell: (cell.drafter, cell.window, cell.requests)),
        key=lambda cell: (cell.drafter, cell.window),
    ):
        of_window = list(group)
        engine.rank_call(CONFIGURE, msgspec.json.encode(_drafting(config, drafter, window)), timeout_s=CALL_S)
        for cell in of_window:
            if is_late():
                return None
            engine.generate(requests_of(config, cell.requests, sizes, _response(cell.drafter, cell.window)))
            on_cell(number * len(cells) + len(found) + of_window.index(cell) + 1)
        rounds = msgspec.json.decode(engine.rank_call(ROUNDS, b"", timeout_s=CALL_S)[0], type=Rounds)
        for cell in of_window:
            found[cell] = _seconds(cell, rounds)
    return found


def _drafting(config: RolloutConfig, drafter: str, window: int) -> SpeculationConfig:
    drafters = (drafter or FILLER,)
    return replace(config.speculation, mode="coupled", drafters=drafters, window=window, fastest_of=1, cost_table="")


def _seconds(cell: Cell, rounds: Rounds) -> list[float]:
    if not cell.drafter:
        points = rounds.verifies if cell.window else rounds.plain
        return _of(points, cell.requests, cell.requests * (1 + cell.window))
    return _of(
        (point for points in rounds.drafts.values() for point in points), cell.requests, cell.requests * cell.window
    )


def _of(points: Iterable[Point], requests: int, total: int) -> list[float]:
    """Return the seconds of all but the first such round, which is the cell's own first: smaller cells came before."""
    return [seconds for n, of_round, seconds in points if (n, of_round) == (requests, total)][1:]


def _response(drafter: str, window: int) -> int:
    """Return the tokens for ROUNDS_PER_PASS full rounds if drafts are wrong, or for two if all are right."""
    return 1 + window + (2 * (1 + window) if drafter else ROUNDS_PER_PASS)


def requests_of(config: RolloutConfig, number: int, sizes: Sizes, tokens: int) -> list[RolloutRequest]:
    sampling = SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=tokens,
        ignore_eos=True,
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
    """Measure a drafter process over the numbers of requests of `table`, as far as there is time. `on_size` gets how
    many of them are done. Raises PlanError when nothing was drafted in time."""
    deadline = clock() + limit_s
    turns: list[Point] = []
    drafts: list[Point] = []
    verifies: list[Point] = []
    process.work(trace=False)
    for done, size in enumerate(map(int, table.verify.requests), start=1):
        if clock() > deadline:
            break
        pace = _pace(engine, config, table, sizes, size)
        own, rounds, waited_s = _drafted(engine, process, config, sizes, size, lambda: clock() > deadline)
        turns += _at(pace, own)
        # Smaller batches ran before, and their rounds are counted with them.
        drafts += [p for p in _at(pace, without_waits(rounds.drafts.get(METHOD, ()), waited_s)) if p[0] == size]
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
) -> tuple[list[Point], Rounds, float]:
    """Return (turns of the process, rounds of the engine, seconds in which it waited for drafts)."""
    assert engine.ready is not None
    ahead = replace(
        config.speculation,
        mode="decoupled",
        drafters=(METHOD,),
        window=config.speculation.max_window,
        fastest_of=1,
        cost_table="",
    )
    engine.rank_call(CONFIGURE, msgspec.json.encode(ahead), timeout_s=CALL_S)
    tokens = min(TOKENS, sizes.longest_response(size, engine.ready.kv_tokens, config.speculation))
    turns: list[Point] = []
    for _ in range(REPEATS):
        engine.generate(requests_of(config, size, sizes, tokens))
        work = process.work(trace=False)
        turns += work.turns if work is not None else []
        if is_late() or sum(n == size for n, _, _ in turns) >= SEEN:
            break
    rounds = msgspec.json.decode(engine.rank_call(ROUNDS, b"", timeout_s=CALL_S)[0], type=Rounds)
    figures = msgspec.json.decode(engine.rank_call(FIGURES, b"", timeout_s=CALL_S)[0], type=Figures)
    return turns, rounds, figures.get(METHOD, {}).get("waited_s", 0.0)
