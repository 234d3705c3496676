"""What rounds and drafters cost, timed before anything is predicted, on requests that no cell decodes.

Every kind of work is timed where a cell does it: plain steps on both engines at once, on the plain path; verifies in
mode coupled, there too, and decoupled, with drafts that are right as often as DIAL says, so that several tokens are
handed out; choosing windows, in the engine; hearing a drafter process, there too; and from token to token in a drafter
process, its loop included.

Invariants: nothing here is taken from the cells; all seconds are at one pace of the machine, since each kind of work is
timed between plain steps, and counted in these; no single decoding decides what a round costs, since a machine that is
slow for a part of one, and not for the plain steps around it, makes it cost twice as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from statistics import median

import msgspec

from benchmarks.decoupled_speed_bench import MAX_WINDOW, NEW_TOKENS, Bench, Way, drafter, speculation
from benchmarks.decoupled_speed_clock import coupled_of_endless, decoupled_of_endless
from benchmarks.dialled import Script
from specactor.planning.plans import Pace, RolloutPlan
from specactor.planning.profile_grid import beside, by_requests, column
from specactor.rollout.decoupled.protocol import AHEAD
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.sglang.engine_client import Engine
from specactor.rollout.sglang.speculation_calls import Rounds
from specactor.rollout.speculation.costs import CostTable, Grid, Point
from specactor.types import RolloutRequest

WINDOWS = (1, 2, 4, 8)  # in mode coupled
DRAFTED = (1, 2, 4, 8)  # by the trained model in the engine, per round
DIAL = 0.8
SHARE = 0.2  # of a plain step, what a step of the dialled drafter process takes
PASSES = 5  # times that all work is timed, one after the other: medians count
PACES = 4  # times that plain steps are timed at first
MESSAGE_S = 1e-4  # the planner's own
FILLER = "specactor.rollout.speculation.registry:Filler"
IN_ENGINE = "benchmarks.dialled:InEngine"
ELSEWHERE = "benchmarks.dialled:Elsewhere"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Grids are over (requests, 1), if nothing else is said."""

    table: CostTable
    """With verifies on the path of speculative rounds alone, and the trained model's drafting in the engine."""
    choosing_s: Grid
    """Of a coupled round, beside verifying and drafting: choosing windows, and what a median leaves out."""
    ahead_s: Grid
    """The same of a decoupled round, which hears a drafter process, with that process on the other core; without waits
    for drafts."""
    loop_s: Grid  # of a drafter process per token, beside drafting it
    trained_s: Grid  # the trained model's process from token to token

    def drafting(self, way: Way) -> Grid:
        """In the engine, over (requests, window), with the choice of windows."""
        axis = self.choosing_s.requests
        windows = tuple(float(w) for w in range(1, MAX_WINDOW + 2))
        return Grid(
            requests=axis,
            per_request=windows,
            seconds=tuple(tuple(self._step_s(way, n, w) + self.choosing_s.at(n, 1.0) for w in windows) for n in axis),
        )

    def _step_s(self, way: Way, requests: float, window: float) -> float:
        if way.share is None:
            return self.table.drafters["model"].at(requests, window)
        return window * way.share * self.table.plain.at(requests, 1.0)

    def token_s(self, way: Way) -> Grid:
        """Of its drafter process."""
        if way.share is None:
            return self.trained_s
        axis = self.loop_s.requests
        return column({n: way.share * self.table.plain.at(n, 1.0) + self.loop_s.at(n, 1.0) for n in axis})

    def of_endless(self, plan: RolloutPlan, way: Way, p: float) -> float:
        """What a plan keeps of its speed where requests end: the planner knows of no end. `p`: acceptance."""
        n, window, verify = plan.requests_per_engine, plan.window, self.table.verify
        if plan.mode == "off":
            return 1.0
        if plan.mode == "coupled":
            draft = self.drafting(way)
            each = [(verify.at(k, 1.0 + window) + draft.at(k, window),) for k in verify.requests]
            rounds = Grid(requests=verify.requests, per_request=(1.0 + window,), seconds=tuple(each))
        else:
            added = [self.ahead_s.at(k, 1.0) for k in verify.requests]
            rows = zip(verify.seconds, added, strict=True)
            rounds = replace(verify, seconds=tuple(tuple(s + more for s in row) for row, more in rows))
        pace = Pace(
            requests=n,
            round_s=rounds,
            token_s=self.token_s(way).at(n, 1.0),
            message_s=MESSAGE_S,
            most=AHEAD * MAX_WINDOW,
        )
        if plan.mode == "coupled":
            return coupled_of_endless(p, window, pace, tokens=NEW_TOKENS - 1, engines=plan.verifiers.engines)
        return decoupled_of_endless(p, window, pace, tokens=NEW_TOKENS - 1)

    def lines(self) -> list[str]:
        """For the log, milliseconds."""
        named = {
            "plain": self.table.plain,
            "choosing": self.choosing_s,
            "ahead": self.ahead_s,
            "loop": self.loop_s,
            "trained": self.trained_s,
        }
        said = {name: [f"{n:g}: {1e3 * grid.at(n, 1.0):.2f}" for n in grid.requests] for name, grid in named.items()}
        rows = [
            f"{n:g}: " + " ".join(f"{k:.2f}={1e3 * self.table.verify.at(n, k):.2f}" for k in (1.0, 1.5, 2, 3, 5, 9))
            for n in self.table.verify.requests
        ]
        return [f"{name} ms by requests: {', '.join(at)}" for name, at in said.items()] + [
            f"verify ms by requests and rows per request: {'; '.join(rows)}"
        ]


class _Pace:
    """What a plain step takes, of every number of requests; and seconds of other work at the same pace."""

    def __init__(self, bench: Bench, work: Mapping[int, list[RolloutRequest]]) -> None:
        self._bench, self._work = bench, work
        seen = [{size: self._now_s(size) for size in work} for _ in range(PACES)]
        self.plain_s = {size: median(at[size] for at in seen) for size in work}
        self._before = dict(seen[-1])

    def share(self, size: int) -> float:
        """What seconds of `size` requests since the last call, or the one before, are to be multiplied with."""
        before, now = self._before[size], self._now_s(size)
        self._before[size] = now
        return self.plain_s[size] / ((before + now) / 2)

    def begin(self, size: int) -> None:
        """Another kind of work comes first."""
        self._before[size] = self._now_s(size)

    def engines(self, size: int) -> Sequence[Engine]:
        """A single request has one of the two."""
        return self._bench.engines if size > 1 else self._bench.engines[:1]

    def decode(self, size: int) -> None:
        """So many requests on each of its engines, which are `configure`d."""
        engines, some = self.engines(size), self._work[size]
        twins = [replace(r, request_id=f"{r.request_id}.beside") for r in some][: size * (len(engines) - 1)]
        pairs = [r for pair in zip(some, twins, strict=True) for r in pair] if twins else some
        self._bench.decode(pairs, engines)

    def _now_s(self, size: int) -> float:
        self._bench.configure(speculation("coupled", FILLER, 0), self.engines(size))
        self.decode(size)
        return by_requests(_points(self._bench.rounds().plain, size)).at(size, 1.0)


def profile(bench: Bench, trained: Way, note: Callable[[str], None]) -> Profile:
    """Of every number of requests that an engine has in any cell."""
    work = _works(bench)
    bench.expected.clear()
    pace = _Pace(bench, work)
    note("profiled: plain steps")
    here, drafts = _coupled(bench, pace, note)
    elsewhere, loop = _decoupled(bench, pace)
    note("profiled: decoupled")
    own: list[Point] = []
    with drafter(bench, trained) as process:
        for size, some in PASSES * [*work.items()]:
            pace.begin(size)
            bench.configure(speculation("decoupled"), bench.engines[:1])
            bench.decode(some, bench.engines[:1])
            own += _at(pace.share(size), _turns(process))
    bench.expected.clear()
    plain = [(size, size, seconds) for size, seconds in pace.plain_s.items()]
    verifies = [point for timed in (*here, *elsewhere) for point in timed.verifies]
    table = CostTable.fit(verifies, plain=plain, drafters={"model": drafts})
    return Profile(
        table=table,
        choosing_s=median_beside(here, table),
        ahead_s=median_beside(elsewhere, table),
        loop_s=by_requests(loop),
        trained_s=by_requests(own),
    )


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """Of a mode, in one pass."""

    verifies: list[Point] = field(default_factory=list)  # with windows that were given
    chosen: list[Point] = field(default_factory=list)  # verifies with windows that were chosen, as in the cells
    drafts: list[Point] = field(default_factory=list)
    """What came before those: choosing, hearing without waits, and drafts that took no time."""


def median_beside(passes: Sequence[_Timed], table: CostTable) -> Grid:
    """The median of all passes."""
    found = [beside(table, timed.drafts, [point for point in timed.chosen if point[1] > point[0]]) for timed in passes]
    return column({n: median(grid.at(n, 1.0) for grid in found) for n in found[0].requests})


def _works(bench: Bench) -> Mapping[int, list[RolloutRequest]]:
    """Requests by their number; like those of the cells, with other noise."""
    sizes = sorted({size for batch in bench.requests for size in (batch, -(-batch // 2))})
    return {
        size: [
            replace(r, request_id=f"{r.request_id}.profile", seed=r.seed + 1)
            for r in bench.requests[min(b for b in bench.requests if b >= size)][:size]
        ]
        for size in sizes
    }


def _dial(bench: Bench, step_s: list[float]) -> str:
    """The script for what `expected` holds now; its path."""
    path = bench.folder / "script.json"
    seeds = {r.request_id: r.seed for some in _works(bench).values() for r in some}
    outputs = {str(seed): list(bench.expected[name]) for name, seed in seeds.items()}
    path.write_bytes(msgspec.json.encode(Script(acceptance=DIAL, step_s=step_s, outputs=outputs)))
    return str(path)


def _coupled(bench: Bench, pace: _Pace, note: Callable[[str], None]) -> tuple[list[_Timed], list[Point]]:
    """(rounds with drafts that take no time, in every pass, the trained model's drafting)."""
    passes = [_Timed() for _ in range(PASSES)]
    drafts: list[Point] = []
    _dial(bench, [0.0])
    for timed, size in product(passes, pace.plain_s):

        def rounds(drafter: str, window: int | None, size: int = size) -> Rounds:
            bench.configure(speculation("coupled", drafter, window), pace.engines(size))
            for _ in range(2 if window is None else 1):
                pace.decode(size)
            return bench.rounds()

        pace.begin(size)
        given = [rounds(IN_ENGINE, window).verifies for window in WINDOWS]
        timed.verifies.extend(_at(pace.share(size), _points(chain(*given), size)))
        found, share = rounds(IN_ENGINE, None), pace.share(size)
        timed.chosen.extend(_at(share, _points(found.verifies, size)))
        timed.drafts.extend(_at(share, _points(found.drafts.get("dialled", ()), size)))
        modelled = [rounds("model", window).drafts.get("model", ()) for window in DRAFTED]
        drafts += _at(pace.share(size), _points(chain(*modelled), size))
        note(f"profiled: {size} requests")
    return passes, drafts


def _decoupled(bench: Bench, pace: _Pace) -> tuple[list[_Timed], list[Point]]:
    """(rounds in every pass, turns of the drafter process beside drafting)."""
    passes = [_Timed() for _ in range(PASSES)]
    plain, engine = column({float(n): s for n, s in pace.plain_s.items()}), bench.engines[:1]
    step_s = [SHARE * plain.at(n, 1.0) for n in range(1, max(pace.plain_s) + 1)]
    script = _dial(bench, step_s)
    way = Way(name="profile", in_engine=IN_ENGINE, continuer=ELSEWHERE, model_dir=script)
    loop: list[Point] = []
    with drafter(bench, way) as process:
        for timed, (size, some) in product(passes, _works(bench).items()):
            pace.begin(size)
            for window in (1, None):
                bench.configure(speculation("decoupled", window=window), engine)
                bench.decode(some, engine)
                bench.decode(some, engine)
                found, share = bench.rounds(), pace.share(size)
                timed.verifies.extend(_at(share, _points(found.verifies, size)))
            timed.chosen.extend(_at(share, _points(found.verifies, size)))
            drafts = found.drafts.get("decoupled", ())
            timed.drafts.extend(_at(share, _points(drafts, size)))
            over = [(n, total, seconds - step_s[int(n) - 1]) for n, total, seconds in _turns(process)]
            loop += _at(share, [turn for turn in over if turn[2] > 0])
    return passes, loop


def _at(share: float, points: Iterable[Point]) -> list[Point]:
    """With seconds multiplied."""
    return [(n, total, share * seconds) for n, total, seconds in points]


def _turns(process: DrafterProcess) -> list[Point]:
    """Of the first, since it was asked last."""
    told = process.work(trace=False)
    return told.turns if told else []


def _points(points: Iterable[Point], size: int) -> list[Point]:
    return [point for point in points if point[0] == size]
