"""Measures a drafter process that drafts for a running engine: its pace, and what it costs the engine.

Requests are real ones, as in `profile`; the engine verifies what the process has drafted ahead, in windows of the
largest size. How often drafts are right is not asked: it changes neither.

Invariants: every number of requests is measured until its turns were seen `SEEN` times, at most `REPEATS` times and in
the given time; the engine is as before afterwards, but for its prefix cache and its drafters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from specactor.config import RolloutConfig, SpeculationConfig
from specactor.errors import PlanError
from specactor.rollout.decoupled.host import DrafterProcess
from specactor.rollout.draft.counts import Figures
from specactor.rollout.planning.costs import METHOD, CostTable, Point, ProcessCosts
from specactor.rollout.planning.process_costs import SEEN, beside, by_requests, without_waits
from specactor.rollout.profile import CALL_S, Sizes, requests_of
from specactor.rollout.sglang.engine import Engine
from specactor.rollout.sglang.speculation_calls import CONFIGURE, FIGURES, ROUNDS, Rounds

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
    assert engine.ready is not None
    deadline = clock() + limit_s
    turns: list[Point] = []
    drafts: list[Point] = []
    verifies: list[Point] = []
    process.work(trace=False)
    for done, size in enumerate(map(int, table.verify.requests), start=1):
        asked = msgspec.json.encode(_drafting(config.speculation))
        engine.rank_call(CONFIGURE, asked, timeout_s=CALL_S)
        of_size: list[Point] = []
        tokens = min(TOKENS, sizes.longest_response(size, engine.ready.kv_tokens, config.speculation))
        for _ in range(REPEATS):
            if clock() > deadline or sum(n == size for n, _, _ in of_size) >= SEEN:
                break
            engine.flush()
            engine.generate(requests_of(config, size, sizes, tokens))
            of_size += _turns(process)
        rounds = msgspec.json.decode(engine.rank_call(ROUNDS, b"", timeout_s=CALL_S)[0], type=Rounds)
        turns += of_size
        figures = msgspec.json.decode(engine.rank_call(FIGURES, b"", timeout_s=CALL_S)[0], type=Figures)
        heard = without_waits(rounds.drafts.get(METHOD, ()), figures.get(METHOD, {}).get("waited_s", 0.0))
        drafts += [point for point in heard if point[0] == size]
        verifies += [point for point in rounds.verifies if point[0] == size]
        on_size(done)
    if not turns or not drafts:
        raise PlanError(
            f"profile: drafter {process.spec.index} drafted {len(turns)} times and the engine verified its drafts "
            f"{len(drafts)} times in {limit_s:g} s, expected both. See whether the drafter has a core or a GPU of its "
            "own, or allow more with --limit."
        )
    return ProcessCosts(token_s=by_requests(turns), ahead_s=beside(table, drafts, verifies))


def _drafting(config: SpeculationConfig) -> SpeculationConfig:
    """Only the process, only the largest window."""
    return replace(
        config,
        mode="decoupled",
        drafters=(METHOD,),
        window=config.max_window,
        merge=False,
        fastest_of=1,
        cost_table="",
    )


def _turns(process: DrafterProcess) -> list[Point]:
    told = process.work(trace=False)
    return told.turns if told is not None else []
