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
NUM_BINS = 32
"""Enough for any response."""
MIN_WEIGHT = 0.05
"""Of positions where nothing is lost: they would be if they were not learned."""


def bin_of(position: int) -> int:
    """Args: position in the response, from 0."""
    return (position + 1).bit_length() - 1


def bins_of(response_len: int) -> NDArray[np.int64]:
    """[R]"""
    bins: NDArray[np.int64] = np.frexp(np.arange(1, response_len + 1))[1].astype(np.int64) - 1
    return bins


def lost(tokens: Sequence[float], kept: Sequence[float]) -> tuple[float, ...]:
    """Per bin, the share of acceptance that is lost; that of all bins where nothing is known. () where nothing is.

    Args: per bin, tokens whose law is known, and the sum of their overlaps with the draft model's (`losses.overlap`):
    1 - overlap is what no drafter with this law gets accepted (arXiv 2302.01318, corollary 3.6), whatever the window.
    """
    known = [number for number, count in enumerate(tokens) if count > 0]
    if not known:
        return ()
    overall = 1 - sum(kept) / sum(tokens)
    shares = (1 - kept[b] / tokens[b] if tokens[b] > 0 else overall for b in range(known[-1] + 1))
    return tuple(min(1.0, max(0.0, share)) for share in shares)


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
