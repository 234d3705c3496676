"""Speeds of decoupled rounds: a drafter elsewhere drafts while the engine verifies. PURE.

A round takes the longer of verifying its mean rows and of drafting w + 1 tokens with one exchange of messages.

Shape legend: B requests, W windows 1..max_window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specactor.rollout.speculation.acceptance import Floats
from specactor.rollout.speculation.costs import CostTable, Grid


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveCosts:
    """Seconds of a round of one number of requests, all with the same window."""

    plain_s: float
    verify_s: Floats
    """[W + 1]: of windows 0, 1, .., W."""
    draft_s: Floats
    """[W]: of drafting 2, .., W + 1 tokens elsewhere and one exchange of messages."""

    @classmethod
    def of(
        cls, table: CostTable, *, requests: int, max_window: int, remote: Grid, served: int, message_s: float = 0.0
    ) -> LiveCosts:
        """`remote`: seconds over (requests, window) of a drafter elsewhere, which has `served` requests."""
        assert min(requests, max_window, served) >= 1, (requests, max_window, served)
        assert message_s >= 0, message_s
        windows = np.arange(max_window + 2, dtype=np.float64)
        return cls(
            plain_s=table.plain_s(requests),
            verify_s=table.verify.along(requests, windows[:-1] + 1.0),
            draft_s=remote.along(served, windows[2:]) + message_s,
        )


def speeds(survival_BW: Floats, costs: LiveCosts) -> Floats:
    """Return tokens per second [B][W]."""
    max_window = survival_BW.shape[1]
    ready_BW = ready(survival_BW)
    rows_BW = 1.0 + ready_BW * np.arange(1, max_window + 1)
    verify_BW = np.interp(rows_BW, np.arange(1, max_window + 2), costs.verify_s)
    tokens_BW = 1.0 + ready_BW * survival_BW.cumsum(axis=1)
    speeds_BW: Floats = tokens_BW / np.maximum(verify_BW, costs.draft_s)
    return speeds_BW


def ready(survival_BW: Floats) -> Floats:
    """Return [B][W]: the share of rounds that have a window, where they last until windows are there.

    A request's window is there, or its drafter starts again from the commit, after a plain step.
    """
    # The position after the last one is accepted as often as the last.
    last_B, before_B = survival_BW[:, -1], survival_BW[:, -2] if survival_BW.shape[1] > 1 else 1.0
    beyond_B = np.divide(last_B * last_B, before_B, out=np.zeros_like(last_B), where=np.asarray(before_B) > 0)
    onward_BW = np.column_stack([survival_BW[:, 1:], beyond_B])
    returns_B = survival_BW[:, :1]
    total_BW = returns_B + 1.0 - onward_BW
    ready_BW: Floats = np.divide(
        np.broadcast_to(returns_B, total_BW.shape), total_BW, out=np.ones_like(total_BW), where=total_BW > 0
    )
    return ready_BW
