"""The cost model and Algorithms 1 and 2 of arXiv 2511.16193 (v3) as published. PURE: seconds and counts in, plans out.

`search.search` and `planner.Owners.of` are what runs; this is what they are compared with. Notation of the
paper: b requests on a worker, g_d drafter devices and g_v verifier devices of a worker, w window, p acceptance of a
draft token, G devices, B requests in all.

    D(g_d, b)    = b D'(g_d) + alpha(g_d)                  one draft step
    V(g_v, w, b) = b V'(g_v, w) + beta(g_v, w)             one verify of w tokens per request
    IL           = max(w D, V)                             decoupled; coupled: w D + V
    P(a, w)      = p^a (1 - p) for a < w;  p^w for a = w
    tau(w)       = sum_{a<w} P(a, w) (a + 1) / 2 + w p^w   decoupled; the half is the pipeline's restart
    TGS          = tau / IL

Where the text leaves a choice, or ours differs:
- w accepted tokens count as w: the token that the target adds is in the next window already, so a verify has w rows.
  Ours commits that token and keeps the rest of the tail if the drafter has the same one, so a verify has w + 1 rows.
- tau averages tokens per iteration over outcomes. A long run's speed is the ratio of the averages (tokens over
  iterations), which is lower: p = 0.5, w = 1 gives 0.75 here and 2/3 as a ratio. `planning/plans.py` uses ratios.
- w_max has V' and beta, which depend on w: w goes up while it is within the bound of its own V' and beta.
- tau of coupled speculation is not printed: it is read as the same sum without the half.
- Algorithm 2 compares one request alone (b = 1), whatever runs beside it.

Invariants: equal input gives equal plans; the first of equal plans is kept, as in the published loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

import numpy as np

from specactor.errors import PlanError
from specactor.rollout.speculation.costs import Grid

MAX_FACTOR = 10**6  # of w_max: a drafter whose steps cost nothing would have an infinite one


@dataclass(frozen=True, kw_only=True)
class Line:
    """Seconds of b requests: b * per_request_s + base_s."""

    per_request_s: float
    base_s: float

    def at(self, requests: float) -> float:
        return requests * self.per_request_s + self.base_s

    @classmethod
    def fit(cls, requests: Sequence[float], seconds: Sequence[float]) -> Line:
        """Least squares of relative errors, both terms >= 0. With a single point the line is constant."""
        n_P, s_P = np.array(requests), np.array(seconds)
        terms_P2 = np.stack([n_P, np.ones_like(n_P)], axis=1) / s_P[:, None]
        best, best_error = cls(per_request_s=0.0, base_s=float(s_P[0])), inf
        for used in ([1], [0], [0, 1]) if len(n_P) > 1 else ([1],):
            solved = np.linalg.lstsq(terms_P2[:, used], np.ones(len(n_P)), rcond=None)[0]
            error = float(np.square(terms_P2[:, used] @ solved - 1.0).sum())
            if solved.min() >= 0 and error < best_error * (1 - 1e-9):
                slope, base = (solved[0] if 0 in used else 0.0), (solved[-1] if 1 in used else 0.0)
                best, best_error = cls(per_request_s=float(slope), base_s=float(base)), error
        return best


@dataclass(frozen=True, kw_only=True)
class PaperCosts:
    """Fitted lines: of draft steps by drafter devices, of verifies by (verifier devices, window)."""

    draft: Mapping[int, Line]
    verify: Mapping[tuple[int, int], Line]

    @classmethod
    def fit(cls, *, draft: Mapping[int, Grid], verify: Mapping[int, Grid], max_window: int) -> PaperCosts:
        """Of tables, by devices of one drafter and of one verifier. A verify of window w has w rows per request."""
        return cls(
            draft={g: Line.fit(t.requests, [t.at(n, 1.0) for n in t.requests]) for g, t in draft.items()},
            verify={
                (g, w): Line.fit(t.requests, [t.at(n, w) for n in t.requests])
                for g, t in verify.items()
                for w in range(1, max_window + 1)
            },
        )


def probability(accepted: int, window: int, p: float) -> float:
    """P(a, w)."""
    return p**accepted * (1.0 - p) if accepted < window else p**window


def tau(window: int, p: float) -> float:
    """Tokens per decoupled iteration."""
    partial = sum(probability(a, window, p) * (a + 1) / 2 for a in range(window))
    return partial + window * probability(window, window, p)


def tau_coupled(window: int, p: float) -> float:
    """Tokens per coupled iteration."""
    partial = sum(probability(a, window, p) * (a + 1) for a in range(window))
    return partial + window * probability(window, window, p)


def tgs(costs: PaperCosts, *, g_d: int, g_v: int, window: int, requests: float, p: float) -> float:
    """Tokens per second of one request, decoupled."""
    iteration_s = max(window * costs.draft[g_d].at(requests), costs.verify[g_v, window].at(requests))
    return tau(window, p) / iteration_s


def tgs_coupled(costs: PaperCosts, *, g_d: int, g_v: int, window: int, requests: float, p: float) -> float:
    """The same with drafting and verifying one after the other."""
    iteration_s = window * costs.draft[g_d].at(requests) + costs.verify[g_v, window].at(requests)
    return tau_coupled(window, p) / iteration_s


@dataclass(frozen=True, kw_only=True)
class PaperPlan:
    """What Algorithm 1 returns."""

    g_d: int
    g_v: int
    window: int
    requests: int  # b: of one worker
    tgs: float  # tokens per second of one request


def windows(costs: PaperCosts, g_d: int, g_v: int) -> Iterator[int]:
    """1, 2, .. w_max = max(ceil(V' / D'), ceil(beta / alpha)), as far as verifies were measured."""
    draft, window = costs.draft[g_d], 1
    while (g_v, window) in costs.verify:
        verify = costs.verify[g_v, window]
        ratios = (_ratio(verify.per_request_s, draft.per_request_s), _ratio(verify.base_s, draft.base_s))
        if window > max(map(ceil, ratios)):
            return
        yield window
        window += 1


def plan(costs: PaperCosts, *, devices: int, requests: int, p: float) -> PaperPlan:
    """Algorithm 1: the decoupled plan of largest TGS. It knows neither plain decoding nor coupled speculation.

    Raises PlanError where no drafter is as small as a verifier, and for counts that cannot be.
    """
    if devices < 2 or requests < 1 or not 0 <= p <= 1:
        raise PlanError(
            f"Algorithm 1: got {devices} devices, {requests} requests, p {p}; expected >= 2, >= 1, 0..1. "
            "One device cannot both draft and verify decoupled."
        )
    best: PaperPlan | None = None
    for g_v in sorted({g for g, _ in costs.verify}):
        for g_d in (g for g in sorted(costs.draft) if g <= g_v and g + g_v <= devices):
            b = ceil((g_d + g_v) * requests / devices)
            for window in windows(costs, g_d, g_v):
                speed = tgs(costs, g_d=g_d, g_v=g_v, window=window, requests=b, p=p)
                if speed > (best.tgs if best else 0.0):
                    best = PaperPlan(g_d=g_d, g_v=g_v, window=window, requests=b, tgs=speed)
    if best is None:
        raise PlanError(
            f"Algorithm 1: got drafters of {sorted(costs.draft)}, verifiers of {sorted({g for g, _ in costs.verify})} "
            f"devices, {devices} in all; expected a drafter no larger than a verifier that fits beside it. Add one."
        )
    return best


def reconfigure(
    costs: PaperCosts, chosen: PaperPlan, acceptance: Sequence[float]
) -> list[tuple[Literal["coupled", "decoupled"], int]]:
    """Algorithm 2: (mode, window) of every request from its acceptance. Requests that are not below the average keep
    the plan."""
    average = sum(acceptance) / len(acceptance) if acceptance else 0.0
    return [("decoupled", chosen.window) if p >= average else _better(costs, chosen, p) for p in acceptance]


def _better(costs: PaperCosts, chosen: PaperPlan, p: float) -> tuple[Literal["coupled", "decoupled"], int]:
    """Alone on the plan's devices. Among equals coupled, and the smaller window."""
    best: tuple[Literal["coupled", "decoupled"], int] = ("coupled", 1)
    best_speed = -inf
    for mode, speed_of in (("coupled", tgs_coupled), ("decoupled", tgs)):
        window = 1
        while (chosen.g_v, window) in costs.verify:
            speed = speed_of(costs, g_d=chosen.g_d, g_v=chosen.g_v, window=window, requests=1, p=p)
            if speed > best_speed:
                best, best_speed = ("coupled" if mode == "coupled" else "decoupled", window), speed
            window += 1
    return best


def _ratio(verify_s: float, draft_s: float) -> float:
    return min(verify_s / draft_s, MAX_FACTOR) if draft_s > 0 else (MAX_FACTOR if verify_s > 0 else 0.0)
