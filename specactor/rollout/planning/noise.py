"""The noise G(seed, position, token) of sampling, for a few tokens of many positions. PURE.

Invariant: the same values as SGLang's `multinomial_with_seed` adds to log-probabilities, in float64: MurmurHash3 (32
bit, length 16) of (seed low, seed high, position, token) as a uniform number x, and G = -log(-log x).

Shape legend: N positions, K tokens of each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_Words = NDArray[np.uint32]
_U32_MAX = float(2**32 - 1)


def gumbel(seeds_N: Ints, positions_N: Ints, tokens_NK: Ints) -> Floats:
    """[N, K]"""
    state_N = np.zeros(len(seeds_N), np.uint32)
    for block_N in (seeds_N, seeds_N >> 32, positions_N):
        state_N = _absorb(state_N, block_N.astype(np.uint32))
    h_NK = _absorb(state_N[:, None], tokens_NK.astype(np.uint32)) ^ np.uint32(16)
    h_NK = (h_NK ^ (h_NK >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h_NK = (h_NK ^ (h_NK >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    h_NK ^= h_NK >> np.uint32(16)
    with np.errstate(divide="ignore"):  # log 0 is clipped
        log_x = np.clip(np.log(h_NK / _U32_MAX), np.finfo(np.float64).min, -(2.0**-32))
    noise: Floats = -np.log(-log_x)
    return noise


def _absorb(state: _Words, block: _Words) -> _Words:
    """One round of MurmurHash3."""
    k = block * np.uint32(0xCC9E2D51)
    h = state ^ (((k << np.uint32(15)) | (k >> np.uint32(17))) * np.uint32(0x1B873593))
    mixed: _Words = ((h << np.uint32(13)) | (h >> np.uint32(19))) * np.uint32(5) + np.uint32(0xE6546B64)
    return mixed
