"""Tokens and seconds of a round in which requests do different things. PURE.

Invariants: a round emits at least one token per request; without windows it is a plain step; better survivals emit no
less.

Shape legend: B requests, W positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specactor.rollout.speculation.costs import CostTable, Grid
from specactor.rollout.speculation.fastest_of_n import combined
from specactor.rollout.speculation.reconfiguration import ready
from specactor.simulator.requests import Floats, Ints

OFF, COUPLED, DECOUPLED = 0, 1, 2  # what a request does, as in `reconfiguration.MODES`


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A drafter on devices of its own, as one engine sees it."""

    seconds: Grid
    served: float  # requests that it drafts for, those of other engines too
    message_s: float
    rollback_s: float = 0.0

    def window_s(self, window: int, restarts: float = 0.0) -> float:
        """Return the seconds from a commit to the next window; `restarts` is the share of requests that go back."""
        return self.seconds.at(max(self.served, 1.0), window + 1) + self.message_s + self.rollback_s * restarts


@dataclass(frozen=True, kw_only=True, eq=False)
class Beside:
    """A further method that drafts for all the requests, on an engine that ran dry."""

    survival: Floats  # [B, W]
    window: int
    window_s: float  # from one window to the next


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    seconds: float
    tokens: Floats  # [B]: emitted
    drafted: Floats  # [B]: draft tokens that are verified


def round_of(
    survival_BW: Floats,
    mode_B: Ints,
    window_B: Ints,
    *,
    table: CostTable,
    drafter: str = "",
    remote: Remote | None = None,
    beside: Beside | None = None,
    alike: float = 0.5,
) -> Round:
    """Return the round. The requests verify `drafter`'s tokens, drafted on their devices or, by `remote`, elsewhere.

    A request's method offers window w in a share ready of its rounds (1 on the verifier's devices, `pipelined`
    elsewhere), so it accepts j tokens or more with probability ready * survival_j.
    """
    requests, width = survival_BW.shape
    offered_BW = survival_BW * (np.arange(1, width + 1) <= window_B[:, None])
    share_B = np.ones(requests)
    ahead_B = mode_B == DECOUPLED
    if ahead_B.any():
        share_B = np.where(ahead_B, ready(survival_BW)[np.arange(requests), np.maximum(window_B, 1) - 1], 1.0)
        offered_BW *= share_B[:, None]
    drafted_B = share_B * window_B
    draft_s = elsewhere_s = 0.0
    here_B = (mode_B == COUPLED) & (window_B > 0)
    if here_B.any():
        draft_s = table.draft_s(drafter, int(here_B.sum()), int(window_B[here_B].max()))
    if remote is not None and ahead_B.any():
        elsewhere_s = remote.window_s(int(window_B[ahead_B].max()), float(1.0 - share_B[ahead_B].mean()))
    seconds = max(_verify_s(table, requests, drafted_B), elsewhere_s) + draft_s
    if beside is not None:
        # Nobody waits for its windows: they come in as many rounds as there is time for.
        share_B = ready(beside.survival)[:, beside.window - 1] * min(1.0, seconds / beside.window_s)
        more_BW = beside.survival * share_B[:, None] * (np.arange(1, width + 1) <= beside.window)
        offered_BW = combined(np.stack([offered_BW, more_BW]), alike=alike)
        drafted_B = drafted_B + share_B * beside.window
        seconds = max(_verify_s(table, requests, drafted_B), elsewhere_s) + draft_s
    return Round(seconds=seconds, tokens=1.0 + offered_BW.sum(axis=1), drafted=drafted_B)


def _verify_s(table: CostTable, requests: int, drafted_B: Floats) -> float:
    drafted = float(drafted_B.sum())
    return table.verify_s(requests, requests + drafted) if drafted > 0 else table.plain_s(requests)
