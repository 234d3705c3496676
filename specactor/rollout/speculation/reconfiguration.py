"""Algorithm 2 of 2511.16193 on live estimates: each request's (mode, drafter, window). PURE.

Each request takes the mode and window of most tokens per second:

    off        1 / plain_s
    coupled    (1 + sum_{j <= w} survival_j) / (verify_s(w) + draft_s(w))
    decoupled  tokens per round / max(verify_s at its mean rows, drafting w + 1 tokens and the messages)

Requests share rounds: with `pace`, the engine's tokens per second and request, a plan is worth its tokens less pace
times its seconds (Dinkelbach). As published: `benchmarks/paper_algorithms.py`.

Invariants: no plan is predicted slower than the one that it replaces, and with margin 0 none is faster; higher
survivals never lower a coupled speed; a request that accepts nothing decodes plainly.

Shape legend: B requests, W windows 1..max_window, N choices: plain decoding, then each drafter's modes and windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from specactor.rollout.speculation.acceptance import Floats
from specactor.rollout.speculation.costs import CostTable, Grid
from specactor.rollout.speculation.windows import OFF

Mode = Literal["off", "coupled", "decoupled"]
MODES: tuple[Mode, ...] = ("off", "coupled", "decoupled")
"""In order of preference among equals."""


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    mode: Mode
    drafter: str
    """OFF for plain decoding."""
    window: int
    """Draft tokens per verify; 0 for plain decoding."""

    def __post_init__(self) -> None:
        plain = (self.mode == OFF, self.drafter == OFF, self.window == 0)
        assert self.window >= 0, self
        assert len(set(plain)) == 1, f"a window of 0 goes with mode and drafter {OFF}: {self}"


PLAIN = DraftPlan(mode="off", drafter=OFF, window=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveCosts:
    """Seconds of a round of one number of requests, all with the same window."""

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
        """`remote`: seconds over (requests, window) of a drafter elsewhere, which has `served` requests."""
        assert min(requests, max_window) >= 1, (requests, max_window)
        assert message_s >= 0, message_s
        assert remote is None or served >= 1, served
        windows = np.arange(max_window + 2, dtype=np.float64)
        local = table.drafters.get(drafter)
        return cls(
            plain_s=table.plain_s(requests),
            verify_s=table.verify.along(requests, windows[:-1] + 1.0),
            coupled_draft_s=None if local is None else local.along(requests, windows[1:-1]),
            decoupled_draft_s=None if remote is None else remote.along(served, windows[2:]) + message_s,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class DrafterOffer:
    drafter: str
    survival: Floats
    """[B][W]: P(the first j draft tokens are accepted)."""
    costs: LiveCosts


def reconfigure(
    offers: Sequence[DrafterOffer],
    current: Sequence[DraftPlan],
    *,
    margin: float = 0.02,
    pace: float | None = None,
) -> list[DraftPlan]:
    """Return each request's plan; `current` is what each does now.

    With `pace`, in tokens per second and request, `margin` is in tokens, else a share.
    """
    num_requests = len(current)
    if not num_requests or not offers:
        return [PLAIN] * num_requests
    max_window = len(offers[0].costs.verify_s) - 1
    assert margin >= 0, margin
    for offer in offers:
        assert offer.survival.shape == (num_requests, max_window), (offer.drafter, offer.survival.shape)
        assert len(offer.costs.verify_s) == max_window + 1, (offer.drafter, len(offer.costs.verify_s))
    # Columns: plain decoding, then by drafter and mode the windows 1..W; the first is preferred among equals.
    pairs = [(offer, mode) for offer in offers for mode in _modes(offer.costs)]
    worth_BN = np.hstack([worths(offers[0], "off", pace=pace), *(worths(*pair, pace=pace) for pair in pairs)])
    first = {(offer.drafter, mode): 1 + k * max_window for k, (offer, mode) in enumerate(pairs)}
    now_B = np.array([_column(plan, first, max_window) for plan in current])
    accepts_B = np.max([offer.survival[:, 0] for offer in offers], axis=0) > 0.0
    chosen_B = np.where(accepts_B, worth_BN.argmax(axis=1), 0)
    rows = np.arange(num_requests)
    # A current plan whose drafter makes no offer promises nothing.
    now_worth_B = np.where(now_B >= 0, worth_BN[rows, now_B], 0.0 if pace is None else -np.inf)
    least_B = now_worth_B * (1.0 + margin) if pace is None else now_worth_B + margin
    changed_B = (worth_BN[rows, chosen_B] > least_B) | ~accepts_B
    names = tuple(first)
    return [
        _plan(names, max_window, column) if changes else plan
        for column, changes, plan in zip(chosen_B.tolist(), changed_B.tolist(), current, strict=True)
    ]


def _column(plan: DraftPlan, first: Mapping[tuple[str, Mode], int], max_window: int) -> int:
    """-1: it is no choice."""
    if plan.mode == "off":
        return 0
    window_1 = first.get((plan.drafter, plan.mode), -1)
    return window_1 + min(plan.window, max_window) - 1 if window_1 >= 0 else -1


@cache  # making plans costs more than choosing among them
def _plan(pairs: tuple[tuple[str, Mode], ...], max_window: int, column: int) -> DraftPlan:
    if column == 0:
        return PLAIN
    pair, window = divmod(column - 1, max_window)
    drafter, mode = pairs[pair]
    return DraftPlan(mode=mode, drafter=drafter, window=window + 1)


def speeds(survival_BW: Floats, costs: LiveCosts, mode: Mode) -> Floats:
    """Return tokens per second [B][W] ([B][1] for off); 0 where the mode cannot be."""
    if mode != "off" and mode not in _modes(costs):
        return np.zeros(survival_BW.shape)
    tokens_BW, seconds_BW = _rounds(survival_BW, costs, mode)
    speeds_BW: Floats = tokens_BW / seconds_BW
    return speeds_BW


def worths(offer: DrafterOffer, mode: Mode, *, pace: float | None) -> Floats:
    """Return [B][W] ([B][1] for off): tokens less what their seconds are worth; pace None: `speeds`."""
    if pace is None:
        return speeds(offer.survival, offer.costs, mode)
    tokens_BW, seconds_BW = _rounds(offer.survival, offer.costs, mode)
    return tokens_BW - pace * seconds_BW


def _rounds(survival_BW: Floats, costs: LiveCosts, mode: Mode) -> tuple[Floats, Floats]:
    """Return (tokens [B][W], seconds [W] or [B][W]); W is 1 for off."""
    num_requests, max_window = survival_BW.shape
    if mode == "off":
        return np.ones((num_requests, 1)), np.array([costs.plain_s])
    emitted_BW = 1.0 + survival_BW.cumsum(axis=1)
    if mode == "coupled":
        assert costs.coupled_draft_s is not None
        return emitted_BW, costs.verify_s[1:] + costs.coupled_draft_s
    assert costs.decoupled_draft_s is not None
    ready_BW = ready(survival_BW)
    rows_BW = 1.0 + ready_BW * np.arange(1, max_window + 1)
    verify_BW = np.interp(rows_BW, np.arange(1, max_window + 2), costs.verify_s)
    return 1.0 + ready_BW * (emitted_BW - 1.0), np.maximum(verify_BW, costs.decoupled_draft_s)


def ready(survival_BW: Floats) -> Floats:
    """Return [B][W]: the share of decoupled rounds that have a window."""
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


def _modes(costs: LiveCosts) -> tuple[Mode, ...]:
    return (
        *(("coupled",) if costs.coupled_draft_s is not None else ()),
        *(("decoupled",) if costs.decoupled_draft_s is not None else ()),
    )
