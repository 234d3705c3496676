"""Measures a drafter process that drafts for a running engine: its pace, and what it costs the engine.

Requests are real ones, as in `profile`; the engine verifies what the process has drafted ahead, in windows of the
largest size. How often drafts are right is not asked: it changes neither, and rounds for which none was there count as
well, since the process is at work in them, too. Before each number of requests a round of the
table is timed again, with the process at rest, and all that follows is counted at the pace that the table has.

Invariants: every number of requests is measured until its turns were seen `SEEN` times, at most `REPEATS` times and in
the given time; the engine is as before afterwards, but for its prefix cache and its drafters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import msgspec

from specactor.config import RolloutConfig, SpeculationConfig
from specactor.errors import PlanError
from specactor.planning.process_costs import SEEN, beside, by_requests, without_waits
from specactor.planning.profile_engine import CALL_S, Sizes, measure_once, requests_of
from specactor.planning.profile_grid import Cell
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.sglang.engine_client import Engine
from specactor.rollout.sglang.speculation_calls import CONFIGURE, FIGURES, ROUNDS, Rounds
from specactor.rollout.speculation.costs import METHOD, CostTable, Point, ProcessCosts
from specactor.rollout.speculation.counters import Figures

REPEATS = 8
"""Times that requests are generated, at most, for each number of them."""
TOKENS = 64
"""Of a response, at most. Its first ones are generated before the process has read the prompt."""


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
    """Over the numbers of requests of `table`, which is of the same engine; `on_size` is told how many of them are
    done. Those for which there is no time are left out. Raises PlanError when nothing was drafted in time."""
    deadline = clock() + limit_s
    found = _Timed(turns=[], drafts=[], verifies=[])
    process.work(trace=False)
    for done, size in enumerate(map(int, table.verify.requests), start=1):
        if clock() > deadline:
            break
        pace = _pace(engine, config, table, sizes, size)
        found += _timed(engine, process, config, sizes, size, lambda: clock() > deadline).at(pace)
        on_size(done)
    if not found.turns or not found.drafts:
        raise PlanError(
            f"profile: drafter {process.spec.index} drafted {len(found.turns)} times and the engine verified its "
            f"drafts {len(found.drafts)} times in {limit_s:g} s, expected both. See whether the drafter has a core or "
            "a GPU of its own, or allow more with --limit."
        )
    return ProcessCosts(token_s=by_requests(found.turns), ahead_s=beside(table, found.drafts, found.verifies))


@dataclass(frozen=True, kw_only=True)
class _Timed:
    turns: list[Point]
    drafts: list[Point]
    verifies: list[Point]

    def __add__(self, other: _Timed) -> _Timed:
        return _Timed(
            turns=self.turns + other.turns,
            drafts=self.drafts + other.drafts,
            verifies=self.verifies + other.verifies,
        )

    def at(self, pace: float) -> _Timed:
        """With all seconds multiplied."""

        def scaled(points: list[Point]) -> list[Point]:
            return [(n, total, pace * seconds) for n, total, seconds in points]

        return _Timed(turns=scaled(self.turns), drafts=scaled(self.drafts), verifies=scaled(self.verifies))


def _pace(engine: Engine, config: RolloutConfig, table: CostTable, sizes: Sizes, size: int) -> float:
    """Seconds of the table over those that the same rounds take now."""
    cell = Cell(requests=size, window=config.speculation.max_window)
    measured = measure_once(engine, config, [cell], sizes)
    assert measured is not None
    return cell.predicted_s(table) / median(measured[cell])


def _timed(
    engine: Engine,
    process: DrafterProcess,
    config: RolloutConfig,
    sizes: Sizes,
    size: int,
    is_late: Callable[[], bool],
) -> _Timed:
    """Of so many requests."""
    assert engine.ready is not None
    engine.rank_call(CONFIGURE, msgspec.json.encode(_drafting(config.speculation)), timeout_s=CALL_S)
    tokens = min(TOKENS, sizes.longest_response(size, engine.ready.kv_tokens, config.speculation))
    turns: list[Point] = []
    for _ in range(REPEATS):
        engine.generate(requests_of(config, size, sizes, tokens))
        turns += _turns(process)
        if is_late() or sum(n == size for n, _, _ in turns) >= SEEN:
            break
    rounds = msgspec.json.decode(engine.rank_call(ROUNDS, b"", timeout_s=CALL_S)[0], type=Rounds)
    figures = msgspec.json.decode(engine.rank_call(FIGURES, b"", timeout_s=CALL_S)[0], type=Figures)
    drafts = without_waits(rounds.drafts.get(METHOD, ()), figures.get(METHOD, {}).get("waited_s", 0.0))
    return _Timed(
        turns=turns,
        drafts=[point for point in drafts if point[0] == size],
        verifies=[point for point in rounds.verifies if point[0] == size],
    )


def _drafting(config: SpeculationConfig) -> SpeculationConfig:
    """Only the process, only the largest window."""
    return replace(
        config,
        mode="decoupled",
        drafters=(METHOD,),
        window=config.max_window,
        fastest_of=1,
        cost_table="",
    )


def _turns(process: DrafterProcess) -> list[Point]:
    told = process.work(trace=False)
    return told.turns if told is not None else []
