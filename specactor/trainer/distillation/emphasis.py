"""How much a response token weighs in the draft model's loss: more where acceptance is lost. PURE.

Positions are binned by powers of two, since responses differ in length by orders of magnitude: bin b holds the response
positions 2**b - 1 .. 2**(b + 1) - 2, counted from 0.

Invariant: weights are > 0, and all are 1 where nothing is emphasised; so the best draft model, which equals the policy
at every context, is the best under any weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MAX_LOG_WEIGHT = 3.0
"""A reward changes a weight by at most this factor, as a logarithm."""
MIN_WEIGHT = 0.05
"""Of positions where nothing is lost: they would be if they were not learned."""


def bin_of(position: int) -> int:
    """Args: position in the response, from 0."""
    return (position + 1).bit_length() - 1


def bins_of(response_len: int) -> NDArray[np.int64]:
    """[R]"""
    bins: NDArray[np.int64] = np.frexp(np.arange(1, response_len + 1))[1].astype(np.int64) - 1
    return bins


class LostAcceptance:
    """Counts of draft tokens by position: what was drafted there, and what of it was accepted."""

    def __init__(self) -> None:
        self._drafted: dict[int, float] = {}
        self._accepted: dict[int, float] = {}

    def observe(self, position: int, *, drafted: float, accepted: float) -> None:
        """Draft tokens around a response position, and those accepted of them."""
        where = bin_of(position)
        self._drafted[where] = self._drafted.get(where, 0.0) + drafted
        self._accepted[where] = self._accepted.get(where, 0.0) + accepted

    def lost(self) -> tuple[float, ...]:
        """Per bin, the share of draft tokens that was rejected; that of all bins where nothing was drafted."""
        total = sum(self._drafted.values())
        if not total:
            return ()
        overall = 1 - sum(self._accepted.values()) / total
        bins = range(max(self._drafted) + 1)
        return tuple(1 - self._accepted[b] / self._drafted[b] if self._drafted.get(b, 0) > 0 else overall for b in bins)


def token_weights(
    response_len: int,
    *,
    lost: Sequence[float] = (),
    position_emphasis: float = 0.0,
    reward: float = 0.0,
    mean_reward: float = 0.0,
    reward_emphasis: float = 0.0,
) -> Floats:
    """[R] weights of a response's tokens.

    (1 - e + e lost_b / mean lost) * exp(r (reward - mean reward)), with e and r the emphases and b a position's bin;
    positions beyond the last bin count to that.
    """
    weights: Floats = np.ones(response_len)
    if lost and position_emphasis and (mean := sum(lost) / len(lost)) > 0:
        share = np.asarray(lost)[np.minimum(bins_of(response_len), len(lost) - 1)] / mean
        weights = np.maximum(1 - position_emphasis + position_emphasis * share, MIN_WEIGHT)
    tilt = reward_emphasis * (reward - mean_reward)
    result: Floats = weights * math.exp(max(-MAX_LOG_WEIGHT, min(MAX_LOG_WEIGHT, tilt)))
    return result
