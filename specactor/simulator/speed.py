"""Tokens and seconds of a round in which requests do different things. PURE: probabilities and tables in, numbers out.

The same arithmetic serves what is predicted (believed tables, estimated survivals) and what happens (true ones).

    a request's method m offers window w in a share ready_m of its rounds (1 where it drafts on the verifier's devices,
    `pipelined` where it runs ahead), so it accepts j tokens or more with probability ready_m survival_mj;
    methods together: `fastest_of_n.combined`; emitted = 1 + the sum over j
    rows = 1 + sum_m ready_m w_m;  seconds = max(verify of all rows, drafting elsewhere) + drafting here

Invariants: a round emits at least one token per request; a round without windows is a plain step; better survivals
never emit less.

Shape legend: B requests, W positions, M methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specactor.rollout.speculation.costs import CostTable, Grid
from specactor.rollout.speculation.stragglers import combined

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
OFF, COUPLED, DECOUPLED = 0, 1, 2
"""What a request does, as in `reconfiguration.MODES`."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A drafter on devices of its own, as one engine sees it."""

    seconds: Grid
    served: float
    """Requests that it drafts for, those of other engines too."""
    message_s: float
    rollback_s: float = 0.0

    def window_s(self, window: int, restarts: float = 0.0) -> float:
        """From a commit to the next window; `restarts`: share of requests that go back."""
        return self.seconds.at(max(self.served, 1.0), window + 1) + self.message_s + self.rollback_s * restarts


@dataclass(frozen=True, kw_only=True, eq=False)
class Beside:
    """A further method that drafts for some of the requests, on an engine that ran dry."""

    method: str
    rows: Ints
    """[R]: which requests, indices 0..B-1."""
    survival: Floats
    """[R, W]"""
    window: int
    window_s: float
    """From one window to the next."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """What a round does."""

    seconds: float
    tokens: Floats
    """[B]: emitted."""
    drafted: Floats
    """[B]: draft tokens that are verified."""


def ready(survival_BW: Floats, window_B: Ints) -> Floats:
    """[B]: `throughput_model.pipelined(..).ready` of every request, at its window >= 1."""
    rows_B, last = np.arange(len(window_B)), survival_BW.shape[1] - 1
    at_B = survival_BW[rows_B, np.minimum(window_B, last)]
    end_B, before_B = survival_BW[:, last], survival_BW[:, last - 1] if last else np.ones(len(window_B))
    beyond_B = np.divide(end_B * end_B, before_B, out=np.zeros_like(end_B), where=before_B > 0)
    onward_B = np.where(window_B <= last, at_B, beyond_B)
    total_B = survival_BW[:, 0] + 1.0 - onward_B
    share_B: Floats = np.divide(survival_BW[:, 0], total_B, out=np.ones_like(total_B), where=total_B > 0)
    return share_B


def round_of(
    survival_BW: Floats,
    mode_B: Ints,
    window_B: Ints,
    *,
    table: CostTable,
    drafter: str = "",
    remote: Remote | None = None,
    beside: Sequence[Beside] = (),
    alike: float = 0.5,
) -> Round:
    """`drafter`: whose tokens the requests verify, on the verifier's devices or, by `remote`, on its own."""
    requests, width = survival_BW.shape
    offered_BW = survival_BW * (np.arange(1, width + 1) <= window_B[:, None])
    share_B = np.ones(requests)
    ahead_B = mode_B == DECOUPLED
    if ahead_B.any():
        share_B = np.where(ahead_B, ready(survival_BW, np.maximum(window_B, 1)), 1.0)
        offered_BW *= share_B[:, None]
    drafted_B = share_B * window_B
    draft_s = 0.0
    here_B = (mode_B == COUPLED) & (window_B > 0)
    if here_B.any():
        draft_s = table.draft_s(drafter, int(here_B.sum()), int(window_B[here_B].max()))
    elsewhere_s = 0.0
    if remote is not None and ahead_B.any():
        elsewhere_s = remote.window_s(int(window_B[ahead_B].max()), float(1.0 - share_B[ahead_B].mean()))
    before_s = max(_verify_s(table, requests, drafted_B), elsewhere_s) + draft_s
    for one in beside:
        offered_BW, drafted_B = _with(one, offered_BW, drafted_B, round_s=before_s, alike=alike)
    seconds = max(_verify_s(table, requests, drafted_B), elsewhere_s) + draft_s
    return Round(seconds=seconds, tokens=1.0 + offered_BW.sum(axis=1), drafted=drafted_B)


def _with(one: Beside, offered_BW: Floats, drafted_B: Floats, *, round_s: float, alike: float) -> tuple[Floats, Floats]:
    """What the requests are offered with a further method. If its windows come less often than rounds, no one waits."""
    window = min(one.window, one.survival.shape[1])
    share_R = ready(one.survival, np.full(len(one.rows), window)) * min(1.0, round_s / one.window_s)
    more_RW = one.survival * share_R[:, None]
    more_RW[:, window:] = 0.0
    offered_BW, drafted_B = offered_BW.copy(), drafted_B.copy()
    offered_BW[one.rows] = combined(np.stack([offered_BW[one.rows], more_RW]), alike=alike)
    drafted_B[one.rows] += share_R * window
    return offered_BW, drafted_B


def _verify_s(table: CostTable, requests: int, drafted_B: Floats) -> float:
    drafted = float(drafted_B.sum())
    return table.verify.at(requests, 1.0 + drafted / requests) if drafted > 0 else table.plain_s(requests)
