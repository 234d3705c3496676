"""Algorithm 2 of 2511.16193 on live estimates: each request's (mode, window), round by round. PURE: numbers in and out.

A rollout starts with one plan for all requests (`search.search`). Requests that accept less than the average lose by
it: their tails are thrown away. For each of them every mode and window is compared by its tokens per second,

    off        1 / plain_s
    coupled    (1 + sum_{j <= w} survival_j) / (verify_s(w) + draft_s(w))
    decoupled  tokens per round / max(verify_s at its mean rows, drafting w + 1 tokens and the messages)

and the best is taken. As published, requests at or above the average keep the plan, and seconds are those of one
request alone (`LiveCosts.of` with requests=1). Ours beyond that: plain decoding is a choice; seconds can be those of
the present batch (as if all requests did the same); `everyone` may be asked; survivals are by position; a choice is
changed for a gain of more than `margin` and not for noise.

In an engine's loop: survivals are `AcceptanceModel.survivals(ids, covered=False)`; `LiveCosts` is made when the number
of running requests changes; `current` is what was returned before, with the rollout's plan for new requests.

Invariants: one plan per request, in order; equal input gives equal plans; higher survivals of a request never lower
the coupled speed that it is promised; a request that accepts nothing decodes plainly.

Shape legend: B requests, W windows 1..max_window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from specactor.errors import PlanError
from specactor.rollout.planning.costs import CostTable, Grid
from specactor.rollout.planning.plans import PLAIN, DraftPlan, Mode

Floats = NDArray[np.float64]
MODES: tuple[Mode, ...] = ("off", "coupled", "decoupled")
"""In order of preference among equals."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveCosts:
    """Seconds of a round, at one number of requests, if all had the same window. Make it when that number changes."""

    plain_s: float
    verify_s: Floats
    """[W + 1]: of windows 0, 1, .., W."""
    coupled_draft_s: Floats | None
    """[W]: of drafting 1, .., W tokens on the verifier's devices; None: it cannot."""
    decoupled_draft_s: Floats | None
    """[W]: of drafting 2, .., W + 1 tokens elsewhere and one exchange of messages; None: nobody does."""

    @classmethod
    def of(
        cls,
        table: CostTable,
        *,
        requests: int,
        max_window: int,
        drafter: str = "",
        remote: Grid | None = None,
        served: int = 0,
        message_s: float = 0.0,
    ) -> LiveCosts:
        """`drafter`: drafts on the verifier's devices, if the table has it. `remote`: seconds of a drafter on devices
        of its own over (requests, window), with `served` requests there."""
        if requests < 1 or max_window < 1 or served < 0 or message_s < 0 or (remote is not None and served < 1):
            raise PlanError(
                f"LiveCosts: got {requests} requests, max_window {max_window}, {served} served, message_s {message_s}; "
                "expected >= 1, >= 1, >= 1 with a remote drafter, >= 0."
            )
        windows = np.arange(max_window + 2, dtype=np.float64)
        local = table.drafters.get(drafter)
        return cls(
            plain_s=table.plain_s(requests),
            verify_s=table.verify.along(requests, windows[:-1] + 1.0),
            coupled_draft_s=None if local is None else local.along(requests, windows[1:-1]),
            decoupled_draft_s=None if remote is None else remote.along(served, windows[2:]) + message_s,
        )


def reconfigure(
    survival_BW: Floats,
    costs: LiveCosts,
    current: Sequence[DraftPlan],
    *,
    drafter: str,
    everyone: bool = False,
    margin: float = 0.02,
    hit_rate: float = 0.0,
) -> list[DraftPlan]:
    """The plan of each request. survival_BW[i][j-1] = P(the first j draft tokens of request i are accepted).

    `current`: what each does now; `hit_rate`: see `rounds.pipelined`. Raises PlanError for sizes that do not match.
    """
    num_requests, max_window = survival_BW.shape
    if len(current) != num_requests or max_window + 1 != len(costs.verify_s) or margin < 0:
        raise PlanError(
            f"reconfigure: got {num_requests} requests and {len(current)} plans, {max_window} windows and costs of "
            f"{len(costs.verify_s) - 1}, margin {margin}; expected as many of each, >= 0."
        )
    if not num_requests:
        return []
    speeds_BM = np.concatenate([speeds(survival_BW, costs, mode, hit_rate=hit_rate) for mode in MODES], axis=1)
    best_B = speeds_BM.argmax(axis=1)
    chosen_B = np.where(survival_BW[:, 0] > 0.0, best_B, 0)
    asked_B = np.ones(num_requests, bool) if everyone else survival_BW[:, 0] < survival_BW[:, 0].mean()
    now_B = np.array([_column(plan, max_window) for plan in current])
    rows_B = np.arange(num_requests)
    gains_B = speeds_BM[rows_B, chosen_B] > speeds_BM[rows_B, now_B] * (1.0 + margin)
    changed_B = asked_B & (gains_B | (survival_BW[:, 0] <= 0.0))
    plans = _plans(drafter, max_window)
    return [
        plans[column] if changes else plan
        for column, changes, plan in zip(chosen_B.tolist(), changed_B.tolist(), current, strict=True)
    ]


def speeds(survival_BW: Floats, costs: LiveCosts, mode: Mode, *, hit_rate: float = 0.0) -> Floats:
    """Tokens per second of each request by window ([B][1] for off); 0 where the mode cannot be."""
    num_requests, max_window = survival_BW.shape
    if mode == "off":
        return np.full((num_requests, 1), 1.0 / costs.plain_s)
    emitted_BW = 1.0 + survival_BW.cumsum(axis=1)
    if mode == "coupled":
        if costs.coupled_draft_s is None:
            return np.zeros((num_requests, max_window))
        coupled_BW: Floats = emitted_BW / (costs.verify_s[1:] + costs.coupled_draft_s)
        return coupled_BW
    if costs.decoupled_draft_s is None:
        return np.zeros((num_requests, max_window))
    ready_BW = _ready(survival_BW, hit_rate)
    rows_BW = 1.0 + ready_BW * np.arange(1, max_window + 1)
    verify_BW = np.interp(rows_BW, np.arange(1, max_window + 2), costs.verify_s)
    decoupled_BW: Floats = (1.0 + ready_BW * (emitted_BW - 1.0)) / np.maximum(verify_BW, costs.decoupled_draft_s)
    return decoupled_BW


def _ready(survival_BW: Floats, hit_rate: float) -> Floats:
    """`rounds.Pipelined.ready` of every window; the position after the last one is accepted as often as the last."""
    last_B, before_B = survival_BW[:, -1], survival_BW[:, -2] if survival_BW.shape[1] > 1 else 1.0
    beyond_B = np.divide(last_B * last_B, before_B, out=np.zeros_like(last_B), where=np.asarray(before_B) > 0)
    onward_BW = np.column_stack([survival_BW[:, 1:], beyond_B])
    leaves_BW = (1.0 - onward_BW) * (1.0 - hit_rate)
    returns_B = survival_BW[:, :1] + (1.0 - survival_BW[:, :1]) * hit_rate
    total_BW = returns_B + leaves_BW
    ready_BW: Floats = np.divide(
        np.broadcast_to(returns_B, total_BW.shape), total_BW, out=np.ones_like(total_BW), where=total_BW > 0
    )
    return ready_BW


@lru_cache(maxsize=64)
def _plans(drafter: str, max_window: int) -> tuple[DraftPlan, ...]:
    """In the order of columns: off, coupled by window, decoupled by window. Shared: making them costs more than
    choosing."""
    return (
        PLAIN,
        *(
            DraftPlan(mode=mode, drafter=drafter, window=w)
            for mode in ("coupled", "decoupled")
            for w in range(1, max_window + 1)
        ),
    )


def _column(plan: DraftPlan, max_window: int) -> int:
    return 0 if plan.mode == "off" else (plan.mode == "decoupled") * max_window + min(plan.window, max_window)
