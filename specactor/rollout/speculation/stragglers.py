"""Algorithm 3 of 2511.16193: draft methods for stragglers on workers that ran dry. PURE: counts in, assignments out.

Late in a rollout few requests are left, and workers have none. Such a worker drafts, with one method, for requests of
others; a request then has drafts of several methods, and what is accepted of a round is the longest that agrees with
the target. All methods lead to the same tokens (noise keyed by position), so keeping the longest is exact.

`as_published`: requests by acceptance ascending, methods by what they buy at the acceptance that was seen of each (the
paper's draft ladder, `ranked`); a (request, method) pair that has no drafter yet gets the least-loaded worker of that
method, while its load is under its bound.

`while_it_pays` is that with a stop: a pair is left out unless the request's predicted speed rises by more than
`margin`, since every further method adds rows to the verify, and load to a worker.

Invariants: no pair is drafted for twice; no worker exceeds its bound; what `while_it_pays` gives, `as_published` would
give if there were room; loads are changed in no argument; equal input gives equal assignments.

Shape legend: M methods, W positions 1..window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from specactor.errors import PlanError
from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.reconfiguration import LiveCosts, Mode, speeds

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A request that still runs."""

    request_id: str
    acceptance: float
    """Of the drafts that it has."""
    methods: frozenset[str] = frozenset()
    """That draft for it already."""


@dataclass(frozen=True, kw_only=True)
class DryWorker:
    """A worker without requests of its own, which drafts with one method."""

    name: str
    method: str
    load: int = 0
    """Requests that it drafts for."""
    max_load: int
    """b_max of the paper."""

    def __post_init__(self) -> None:
        if self.load < 0 or self.max_load < 1:
            raise PlanError(f"worker {self.name}: got load {self.load}, bound {self.max_load}; expected >= 0, >= 1.")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """From now on this worker drafts for this request."""

    request_id: str
    method: str
    worker: str


Pays = Callable[[Straggler, frozenset[str], str, int], float]
"""(request, methods that it has by now, further method, load of its worker with it) -> predicted speed with the further
method over that without."""


def speedup(rate: float, costs: LiveCosts) -> float:
    """Predicted speed over plain decoding, at the best mode and window of a method whose draft tokens are accepted with
    probability `rate` each; below 1 where plain decoding is faster."""
    modes: tuple[Mode, ...] = ("coupled", "decoupled")
    return max(float(_by_window(rate, costs, mode).max()) for mode in modes) * costs.plain_s


def ranked(rates: Mapping[str, float], costs: Mapping[str, LiveCosts]) -> list[str]:
    """Methods by their speed-up, the best first, by name among equals. Args: rates: P(a draft token is accepted | those
    before it were), by method; costs: of rounds if that method drafts, in every way that it can."""
    return sorted(rates, key=lambda name: (-speedup(rates[name], costs[name]), name))


def best_window(rate: float, costs: LiveCosts) -> int:
    """Of a drafter elsewhere."""
    return int(_by_window(rate, costs, "decoupled").argmax()) + 1


def gain_after(waking: float, left: float, faster: float) -> float:
    """Speed of a request that has `left` tokens to go, over that without a drafter that is there after `waking` tokens
    of it; from then on the request is `faster` times as fast. A drafter that wakes too late brings nothing."""
    if waking < 0 or left <= 0 or faster < 1:
        raise PlanError(
            f"gain_after: got waking {waking}, left {left}, faster {faster}; expected >= 0, > 0 and >= 1 times."
        )
    before = min(waking, left)
    return left / (before + (left - before) / faster)


def _by_window(rate: float, costs: LiveCosts, mode: Mode) -> Floats:
    """Tokens per second."""
    by_window_W: Floats = speeds(np.array([survival_of(rate, len(costs.verify_s) - 1)]), costs, mode)[0]
    return by_window_W


def as_published(
    stragglers: Iterable[Straggler], ranked: Sequence[str], workers: Iterable[DryWorker]
) -> list[Assignment]:
    """Algorithm 3. `ranked`: methods, the best first."""
    return _assign(stragglers, ranked, workers, pays=None, margin=0.0)


def while_it_pays(
    stragglers: Iterable[Straggler],
    ranked: Sequence[str],
    workers: Iterable[DryWorker],
    *,
    pays: Pays,
    margin: float = 0.02,
    most: int | None = None,
) -> list[Assignment]:
    """Algorithm 3, without pairs whose predicted gain is `margin` or less. `most`: methods that a request is given, at
    most; None: no bound."""
    if margin < 0 or (most is not None and most < 0):
        raise PlanError(f"while_it_pays: got margin {margin}, most {most}; expected >= 0 and >= 0 or None.")
    return _assign(stragglers, ranked, workers, pays=pays, margin=margin, most=most)


def _assign(
    stragglers: Iterable[Straggler],
    ranked: Sequence[str],
    workers: Iterable[DryWorker],
    *,
    pays: Pays | None,
    margin: float,
    most: int | None = None,
) -> list[Assignment]:
    least: dict[str, list[tuple[int, str, int]]] = {method: [] for method in ranked}
    """(load, worker, its bound) of each method, as heaps: the least-loaded worker first."""
    for worker in workers:
        if worker.method in least:
            least[worker.method].append((worker.load, worker.name, worker.max_load))
    for heap in least.values():
        heapify(heap)
    room = sum(max(0, bound - load) for heap in least.values() for load, _, bound in heap)
    found: list[Assignment] = []
    for request in sorted(stragglers, key=lambda r: (r.acceptance, r.request_id)):
        if len(found) == room:
            break
        has, given = request.methods, 0
        for method in (m for m in ranked if m not in has):
            if given == most:
                break
            if not least[method]:
                continue
            load, worker_name, bound = least[method][0]
            if load >= bound or (pays is not None and pays(request, has, method, load + 1) <= 1.0 + margin):
                continue
            heapreplace(least[method], (load + 1, worker_name, bound))
            has |= {method}
            given += 1
            found.append(Assignment(request_id=request.request_id, method=method, worker=worker_name))
    return found


def combined(survival_MW: Floats, *, alike: float) -> Floats:
    """[W]: P(at least one method has its first j draft tokens accepted).

    `alike`: 0, methods agree with the target independently; 1, where the best fails all fail. In between it is linear,
    which is an assumption; measure it where trees of several drafters are verified.
    """
    if not 0 <= alike <= 1:
        raise PlanError(f"combined: got alike {alike}, expected 0..1.")
    best_W = survival_MW.max(axis=0)
    apart_W = 1.0 - np.prod(1.0 - survival_MW, axis=0)
    joined_W: Floats = best_W + (1.0 - alike) * (apart_W - best_W)
    return joined_W
