"""Seconds of a round: tables that are fitted and corrected online. PURE, but for a table's file.

Invariants: a `Grid` gives back what was measured at its points; it is bilinear between them, goes on with the last
slope beyond but never falls, and is constant below the first; `from_json(to_json(table)) == table`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations, islice, pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from specactor.errors import DataError, PlanError
from specactor.rollout.speculation.windows import OFF

VERSION = 1  # version of the file; a table of another one is refused: it may mean something else
Number = TypeVar("Number", float, NDArray[np.float64])
Point = tuple[int, int, float]
"""A measured round: (requests, total, seconds). `total` is rows of a verify, or requests * window of a draft."""
MAX_NODES = 12  # most points of a fitted axis: ragged rounds have a different number of tokens per request each
BOUNDS = (0.25, 4.0)  # bounds of a correction: what is further off is a stall, or a table of another machine
MIN_ROUNDS = 5  # fewest of a kind for a median of what it takes: one of fewer follows single stalls
MAX_POINTS = 1024  # rounds of each kind that are remembered
TRIED = (0, 2, 4, 1)  # windows to try, in turns, while there is no table; those beyond the largest are cut to it
FIRST_FIT = 3 * len(TRIED)  # rounds before the first fit: of each window a median that one stall does not move
METHOD = "decoupled"  # name of the draft method of drafter processes
REMEASURE = "Measure the table again."


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Seconds over (requests, tokens or window per request)."""

    # No line would do: kernels jump between 1 and 2 tokens, and a MoE touches more experts as tokens grow.

    requests: tuple[float, ...]
    per_request: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]  # [requests][per_request]

    def __post_init__(self) -> None:
        for name, axis in (("requests", self.requests), ("per_request", self.per_request)):
            if not axis or axis[0] <= 0 or not all(map(isfinite, axis)) or any(a >= b for a, b in pairwise(axis)):
                raise PlanError(f"grid.{name}: got {axis}, expected rising positive numbers. {REMEASURE}")
        shape = (len(self.requests), len(self.per_request))
        if len(self.seconds) != shape[0] or any(len(row) != shape[1] for row in self.seconds):
            lengths = [len(row) for row in self.seconds]
            raise PlanError(f"grid.seconds: got rows of {lengths}, expected {shape[0]} of {shape[1]}. {REMEASURE}")
        wrong = [x for row in self.seconds for x in row if not (isfinite(x) and x > 0)]
        if wrong:
            raise PlanError(f"grid.seconds: got {wrong[0]}, expected positive seconds. {REMEASURE}")

    def at(self, requests: float, per_request: float) -> float:
        return float(self.along(requests, np.array([per_request]))[0])

    def along(self, requests: float, per_request_N: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [N]: `at`, of many tokens or windows per request."""
        axis = np.array(self.per_request)
        last = len(axis) - 1
        left_N = np.searchsorted(axis, per_request_N, side="right").clip(1, max(last, 1)) - 1
        right_N = np.minimum(left_N + 1, last)
        width_N = np.where(right_N > left_N, axis[right_N] - axis[left_N], 1.0)
        u_N = np.where((per_request_N <= axis[0]) | (last == 0), 0.0, (per_request_N - axis[left_N]) / width_N)
        low, high, t = _bracket(self.requests, requests)
        first, second = np.array(self.seconds[low]), np.array(self.seconds[high])
        a_N = _lines(first[left_N], first[right_N], u_N)
        b_N = _lines(second[left_N], second[right_N], u_N)
        if t <= 1.0:
            return a_N * (1.0 - t) + b_N * t
        rise_N = np.maximum(b_N - a_N, 0.0)
        rise_N = np.where(u_N > 1.0, np.maximum(rise_N, second[right_N] - first[right_N]), rise_N)
        return b_N + rise_N * (t - 1.0)

    @classmethod
    def fit(cls, points: Iterable[Point]) -> Grid:
        """Return a grid over 1 and the measured values, thinned to MAX_NODES. A cell is the median of the nearest
        points, carried there by the model of `_fit_line`, or the model's value. Raises PlanError for fewer than two
        distinct (requests, total), or impossible points."""
        points = list(points)
        wrong = [p for p in points if p[0] < 1 or p[1] < 1 or not (isfinite(p[2]) and p[2] > 0)]
        if wrong:
            raise PlanError(f"fit: got the point {wrong[0]}, expected (requests >= 1, total >= 1, seconds > 0).")
        distinct = {p[:2] for p in points}
        if len(distinct) < 2:
            raise PlanError(
                f"fit: got {len(distinct)} distinct (requests, total), expected at least 2. Measure more rounds."
            )
        model = _fit_line(points)
        requests = _axis(p[0] for p in points)
        per_request = _axis(p[1] / p[0] for p in points)
        points_P3 = np.array(points)
        n_P, each_P = points_P3[:, 0], points_P3[:, 1] / points_P3[:, 0]
        i_P, j_P = _nearest(requests, n_P), _nearest(per_request, each_P)
        there_P = _value(model, np.array(requests)[i_P], np.array(per_request)[j_P])
        carried_P = points_P3[:, 2] * there_P / _value(model, n_P, each_P)
        cells: dict[tuple[int, int], list[float]] = {}
        for i, j, carried in zip(i_P.tolist(), j_P.tolist(), carried_P.tolist(), strict=True):
            cells.setdefault((i, j), []).append(carried)
        return cls(
            requests=requests,
            per_request=per_request,
            seconds=tuple(
                tuple(median(cells.get((i, j)) or [_value(model, n, k)]) for j, k in enumerate(per_request))
                for i, n in enumerate(requests)
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ProcessCosts:
    """Seconds of drafting in a process of its own; grids over (requests, 1)."""

    token_s: Grid  # from one token of each request to the next, its loop and messages included (`decoupled.spec.Work`)
    ahead_s: Grid
    """On the engine, of a round beside the verify, without waits for drafts: hearing the process, and what the process
    takes from the engine."""


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Costs of one model's rounds on one device."""

    version: int = VERSION
    model: str
    device: str
    date: str
    verify: Grid  # a target forward over `per_request` tokens of each request
    plain: Grid  # a decode step without speculation
    drafters: Mapping[str, Grid]  # drafting `per_request` tokens for each request, by drafter
    process: ProcessCosts | None = None  # costs of a drafter process (METHOD), if one was measured

    @property
    def methods(self) -> tuple[str, ...]:
        return (*self.drafters, *([METHOD] if self.process else []))

    def only(self, methods: Collection[str]) -> CostTable:
        drafters = {name: grid for name, grid in self.drafters.items() if name in methods}
        return replace(self, drafters=drafters, process=self.process if METHOD in methods else None)

    def verify_s(self, requests: int, tokens: float) -> float:
        """Return the seconds of a forward over `tokens` rows, roots included."""
        assert 1 <= requests <= tokens, (requests, tokens)
        return self.verify.at(requests, tokens / requests)

    def verify_curve(self, requests: int, max_tokens: int) -> NDArray[np.float64]:
        assert 1 <= requests <= max_tokens, (requests, max_tokens)
        return self.verify.along(requests, np.arange(requests, max_tokens + 1) / requests)

    def plain_s(self, requests: int) -> float:
        assert requests >= 1, requests
        return self.plain.at(requests, 1.0)

    def draft_s(self, drafter: str, requests: int, window: int) -> float:
        """Return the seconds of drafting, by the round's largest `window`."""
        grid = self.drafters.get(drafter)
        if grid is None:
            raise PlanError(
                f"cost table: got drafter {drafter!r}, expected one of {sorted(self.drafters)}. {REMEASURE}"
            )
        assert requests >= 1, requests
        assert window >= 0, window
        return grid.at(requests, window) if window else 0.0

    @classmethod
    def read(cls, file: str | Path) -> CostTable:
        """Read a file of `write`. Raises DataError if it is missing, PlanError if invalid."""
        try:
            return cls.from_json(Path(file).read_bytes())
        except OSError as error:
            raise DataError(
                f"cost_table: got {str(file)!r}, expected a file that specactor profile wrote ({error.strerror}). "
                "Run specactor profile RECIPE."
            ) from None

    def write(self, file: Path) -> None:
        """Write the file, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f"{file.name}.tmp")
        fresh.write_text(self.to_json() + "\n")
        fresh.replace(file)

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> CostTable:
        """Raises PlanError for what is no table of this version."""
        try:
            version = msgspec.json.decode(text, type=dict[str, object]).get("version")
            if version != VERSION:
                raise PlanError(f"cost table: got version {version}, expected {VERSION}. {REMEASURE}")
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PlanError(f"cost table: {error}. {REMEASURE}") from error

    @classmethod
    def fit(
        cls,
        points: Iterable[Point],
        *,
        plain: Iterable[Point] = (),
        drafters: Mapping[str, Iterable[Point]] | None = None,
    ) -> CostTable:
        """Return the table of measured verifies. Raises as `Grid.fit` does.

        `plain` are decode steps (total = requests). Without any they cost a verify of one row per request; with those
        of one number of requests, a share of it.
        """
        verify = Grid.fit(points)
        plain = list(plain)
        return cls(
            model="",
            device="",
            date="",
            verify=verify,
            plain=Grid.fit(plain) if len({n for n, _, _ in plain}) > 1 else _share_of(verify, plain),
            drafters={name: Grid.fit(found) for name, found in (drafters or {}).items()},
        )


class Correction:
    """Measured over predicted seconds, by kind of round ("off", a drafter or an option): the median of 31 rounds,
    within `BOUNDS`; 1 before `MIN_ROUNDS`."""

    # A stall (a prefill between, a garbage collection) moves a mean but not a median.

    def __init__(self) -> None:
        self._ratios: dict[str, deque[float]] = {}
        self._factors: dict[str, float] = {}  # cache of `factor`, by kind

    def observe(self, kind: str, *, predicted_s: float, measured_s: float) -> None:
        """Note a round. `predicted_s` is the table's, without this correction."""
        assert min(predicted_s, measured_s) > 0, (kind, predicted_s, measured_s)
        self._ratios.setdefault(kind, deque(maxlen=31)).append(measured_s / predicted_s)
        self._factors.pop(kind, None)

    def factor(self, kind: str) -> float:
        """Return the factor by which predictions of that kind are multiplied."""
        known = self._factors.get(kind)
        if known is None:
            ratios = self._ratios.get(kind, ())
            known = min(max(median(ratios), BOUNDS[0]), BOUNDS[1]) if len(ratios) >= MIN_ROUNDS else 1.0
            self._factors[kind] = known
        return known


class OnlineCosts:
    """Costs of one engine, measured while it runs. Without a table, try the `wanted` windows; a given table is only
    corrected."""

    def __init__(self, table: CostTable | None = None) -> None:
        self._given = table
        self.correction = Correction()
        self.plain: deque[Point] = deque(maxlen=MAX_POINTS)  # rounds on the engine's plain path
        self.verifies: deque[Point] = deque(maxlen=MAX_POINTS)  # other rounds, also those in which nobody had a draft
        self.drafts: dict[str, deque[Point]] = {}
        self._rounds = 0
        self._sizes: set[int] = set()  # numbers of requests that were seen, one of each magnitude
        self._next_fit = FIRST_FIT
        self._use(table)

    def wanted(self, max_window: int) -> int:
        return min(TRIED[self._rounds % len(TRIED)], max_window)

    @property
    def turn(self) -> int:
        """Return how often all windows were tried."""
        return self._rounds // len(TRIED)

    def plain_is_next(self) -> bool:
        return TRIED[(self._rounds + 1) % len(TRIED)] == 0

    def plain_s(self, requests: int) -> float:
        """Return the seconds of a plain step, corrected by those measured."""
        return self._plain_s(requests) * self.correction.factor(OFF)

    def draft_s(self, drafter: str, requests: int) -> Callable[[int], float]:
        """Return the seconds by depth; 0 for an unmeasured drafter."""
        if drafter in self._known().drafters:
            return lambda depth: self._draft_s(drafter, requests, depth)
        # In proportion to the tokens of the newest rounds, until the table has this drafter.
        latest = list(islice(reversed(self.drafts.get(drafter, ())), 8))
        token_s = median(seconds / total for _, total, seconds in latest) if latest else 0.0
        return lambda depth: token_s * requests * depth

    def observe(
        self,
        kind: str,
        *,
        requests: int,
        rows: int,
        depth: int,
        verify_s: float,
        draft_s: float,
        predicted_s: float,
        drafted: tuple[str, int] | None = None,
    ) -> None:
        """Note a round that could have drafts.

        Args:
            kind: its drafter or option.
            depth: the largest window.
            predicted_s: uncorrected, or 0.
            drafted: (by whom, for how many requests), unless by `kind` for all.
        """
        self.verifies.append((requests, rows, verify_s))
        if depth and draft_s > 0:
            name, served = drafted or (kind, requests)
            self.drafts.setdefault(name, deque(maxlen=MAX_POINTS)).append((served, served * depth, draft_s))
        if predicted_s > 0:
            self.correction.observe(kind, predicted_s=predicted_s, measured_s=verify_s + draft_s)
        self._seen(requests)

    def observe_plain(self, requests: int, *, round_s: float, predicted_s: float, after_another: bool = False) -> None:
        """Note a plain round; `predicted_s`: uncorrected, or 0. Right `after_another` kind, some of whose work it may
        have done, it counts only if there is no other."""
        if not after_another or not self.plain:
            self.plain.append((requests, requests, round_s))
            if predicted_s > 0:
                self.correction.observe(OFF, predicted_s=predicted_s, measured_s=round_s)
        self._seen(requests)

    def _seen(self, requests: int) -> None:
        self._rounds += 1
        if not any(n <= 2 * requests and requests <= 2 * n for n in self._sizes):
            self._sizes.add(requests)  # what lines from other numbers say of it may be far off
            self._next_fit = min(self._next_fit, self._rounds + FIRST_FIT)
        if self._given is None and self._rounds >= self._next_fit:
            self._fit()

    def _fit(self) -> None:
        if all(rows == requests for requests, rows, _ in self.verifies):
            self._next_fit = self._rounds + FIRST_FIT  # nothing says what a row costs
            return
        self._next_fit = self._rounds + min(self._rounds, 2048)  # after twice as many
        try:
            self._use(
                CostTable.fit(
                    self.verifies,
                    plain=self.plain,
                    drafters={name: of for name, of in self.drafts.items() if len({point[:2] for point in of}) > 1},
                )
            )
        except PlanError:
            return  # all rounds were alike: the next ones will not be
        self.correction = Correction()

    def _use(self, table: CostTable | None) -> None:
        self.table = table
        self._plain_s = cache(lambda requests: self._known().plain_s(requests))
        self._draft_s = cache(lambda drafter, requests, depth: self._known().draft_s(drafter, requests, depth))
        # (requests, max_rows) -> seconds of a forward for rows = requests, .., max_rows, read-only
        self.verify_curve = lru_cache(256)(lambda requests, rows: self._known().verify_curve(requests, rows))

    def _known(self) -> CostTable:
        assert self.table is not None, "ask for `wanted` windows until there is a table"
        return self.table


def _bracket(axis: Sequence[float], x: float) -> tuple[int, int, float]:
    """Return (left, right, t): x lies at t between these nodes; t > 1 beyond the last, 0 below the first."""
    last = len(axis) - 1
    if x <= axis[0] or last == 0:
        return 0, min(1, last), 0.0
    right = min(bisect_right(axis, x), last)
    return right - 1, right, (x - axis[right - 1]) / (axis[right] - axis[right - 1])


def _lines(a_N: NDArray[np.float64], b_N: NDArray[np.float64], t_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a at t = 0 and b at t = 1, exactly; beyond, the same slope, but not falling."""
    return np.where(t_N <= 1.0, a_N * (1.0 - t_N) + b_N * t_N, b_N + np.maximum(b_N - a_N, 0.0) * (t_N - 1.0))


def _share_of(verify: Grid, plain: Sequence[Point]) -> Grid:
    share = median(s for _, _, s in plain) / verify.at(plain[0][0], 1.0) if plain else 1.0
    requests = tuple(sorted({*verify.requests, *(float(n) for n, _, _ in plain)}))
    return Grid(requests=requests, per_request=(1.0,), seconds=tuple((share * verify.at(n, 1.0),) for n in requests))


def _axis(values: Iterable[float]) -> tuple[float, ...]:
    """Return 1 and the distinct values; of too many, those next to a geometric series."""
    nodes = sorted({1.0, *map(float, values)})
    if len(nodes) > MAX_NODES:
        # Where costs are small, one request or token more changes them most.
        series = np.geomspace(1.0, nodes[-1], MAX_NODES)
        nodes = sorted({min(nodes, key=lambda node: abs(node - value)) for value in series})
    return tuple(nodes)


def _nearest(axis: Sequence[float], x_P: NDArray[np.float64]) -> NDArray[np.intp]:
    nearest_P: NDArray[np.intp] = np.abs(np.array(axis) - x_P[:, None]).argmin(axis=1)
    return nearest_P


def _value(model: tuple[float, float, float], requests: Number, per_request: Number) -> Number:
    return model[0] + model[1] * requests + model[2] * requests * per_request


def _fit_line(points: Sequence[Point]) -> tuple[float, float, float]:
    """Return (c0, c1, c2) >= 0 of least sum ((c0 + c1 requests + c2 total) / seconds - 1)^2."""
    seconds_P = np.array([p[2] for p in points])
    terms_P3 = np.array([(1.0, p[0], p[1]) for p in points]) / seconds_P[:, None]
    # The optimum is the plain least-squares solution on the terms that it uses: one of seven sets.
    best, best_error = (0.0, 0.0, 0.0), float("inf")
    for used in (list(c) for size in (1, 2, 3) for c in combinations(range(3), size)):
        solved = np.linalg.lstsq(terms_P3[:, used], np.ones(len(points)), rcond=None)[0]
        error = float(np.square(terms_P3[:, used] @ solved - 1.0).sum())
        if solved.min() >= 0 and error < best_error * (1 - 1e-9):
            full = [0.0, 0.0, 0.0]
            for term, value in zip(used, solved.tolist(), strict=True):
                full[term] = value
            best, best_error = (full[0], full[1], full[2]), error
    return best
