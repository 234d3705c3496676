"""Rounds that last until windows are there, by scalars: what `planning.plans.ready` is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specactor.planning.plans import coupled_tokens


class Pipelined(NamedTuple):
    ready: float
    """Share of rounds that verify a window."""
    tokens: float
    """Emitted per round."""


def pipelined(survival: Sequence[float], window: int) -> Pipelined:
    """A missing entry of `survival` behind the window is extrapolated."""
    if len(survival) > window:
        onward = survival[window]
    else:
        last, before = survival[window - 1], survival[window - 2] if window > 1 else 1.0
        onward = last * last / before if before > 0 else 0.0
    returns, leaves = survival[0], 1.0 - onward
    ready = returns / (returns + leaves) if returns + leaves > 0 else 1.0
    return Pipelined(ready, 1.0 + ready * (coupled_tokens(survival, window) - 1.0))
