"""How sharply a draft model should sample, fitted while it drafts. PURE.

A drafter with distribution q that drafts argmax_v [beta log q(v) + G(v)], G the target's own noise, agrees with the
target's sample argmax_v [log p(v) + G(v)] often: beta = 1 shares the noise, beta -> infinity is greedy. A drafter that
is flatter than its target does better with beta > 1, a nearly certain target wants a greedy drafter. What beta would
have done is known afterwards, from log q and G of the likeliest tokens and the token that the target chose.
Sources: arXiv 2408.07978 (drafts coupled by shared noise); the exponent is ours.

Invariants: only positions that were `observe`d, thus verified before, have an influence; equal observations give equal
betas on every rank; beta changes which tokens are drafted and never which are emitted.

Shape legend: N positions, K likeliest tokens of the drafter there, B betas of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specactor.rollout.planning.noise import Floats, Ints, gumbel

GRID = (1.0, 0.5, 0.7, 0.85, 1.2, 1.5, 2.0, 3.0, 5.0, math.inf)
"""Betas that are compared; the first of equally good ones is used."""
TOP = 32
"""Likeliest tokens that are kept per position."""
MAX_POSITIONS = 256
"""Positions of one round that are looked at, the first of every draft before the second."""
MEMORY = 2000.0
"""Positions after which an observation weighs 1/e."""


class Sharpening:
    """Of one drafter."""

    def __init__(self) -> None:
        self._hits_B = np.zeros(len(GRID))
        self._weight = 0.0

    @property
    def beta(self) -> float:
        """The best so far; 1 before anything was observed."""
        return GRID[int(self._hits_B.argmax())]

    def agreement(self) -> dict[float, float]:
        """Per beta, the share of positions where it would have drafted the target's token."""
        return dict(zip(GRID, (self._hits_B / max(self._weight, 1.0)).tolist(), strict=True))

    def new_version(self, weight: float) -> None:
        """The drafter has changed: what was observed is worth `weight` (0..1) of what it was."""
        self._hits_B *= weight
        self._weight *= weight

    def observe(self, logq_NK: Floats, noise_NK: Floats, tokens_NK: Ints, targets_N: Ints) -> None:
        """What the target chose at positions where the drafter had drafted.

        Args: log q and noise of the drafter's likeliest tokens, likeliest first; those tokens; the target's token.
        A beta that would have drafted a token beyond those K counts as if it had drafted the best of them.
        """
        if not len(targets_N):
            return
        hits_B = np.array([_hits(beta, logq_NK, noise_NK, tokens_NK, targets_N) for beta in GRID])
        kept = math.exp(-len(targets_N) / MEMORY)
        self._hits_B = kept * self._hits_B + hits_B
        self._weight = kept * self._weight + len(targets_N)


def _hits(beta: float, logq_NK: Floats, noise_NK: Floats, tokens_NK: Ints, targets_N: Ints) -> int:
    if math.isinf(beta):
        return int((tokens_NK[:, 0] == targets_N).sum())
    choice_N = (beta * logq_NK + noise_NK).argmax(axis=1)
    return int((tokens_NK[np.arange(len(targets_N)), choice_N] == targets_N).sum())


@dataclass(slots=True)
class Lane:
    """A request that is drafted for in a round, and what became of it."""

    request_id: str
    seed: int
    position: int
    """Of the token that its first draft token follows."""
    targets: Sequence[int] = ()
    """What the target emitted in this round."""


class Record:
    """What was likely in the drafts of one round, until the target's tokens are known."""

    def __init__(self) -> None:
        self._lanes: list[Lane | None] = []
        self._by_id: dict[str, Lane] = {}
        self._likely: list[tuple[Floats, Ints]] = []

    def begin(self, lanes: Sequence[Lane | None]) -> None:
        """A round of these lanes; None for one that teaches nothing."""
        self._lanes = list(lanes)
        self._by_id = {lane.request_id: lane for lane in lanes if lane is not None}
        self._likely = []

    def add(self, logq_BK: Floats, tokens_BK: Ints) -> None:
        """The likeliest tokens at the next draft position, of the lanes that still are drafted for: the first B."""
        self._likely.append((logq_BK, tokens_BK))

    def commit(self, request_id: str, tokens: Sequence[int]) -> None:
        """What the target emitted: accepted draft tokens, then its own."""
        lane = self._by_id.pop(request_id, None)
        if lane is not None:
            lane.targets = list(tokens)

    def teach(self, sharpening: Sharpening) -> None:
        """Every position that was accepted, and the first one that was not. The round is over."""
        known = [
            (depth, i, lane)
            for depth, (logq_BK, _) in enumerate(self._likely)
            for i, lane in enumerate(self._lanes[: len(logq_BK)])
            if lane is not None and depth < len(lane.targets)
        ][:MAX_POSITIONS]
        if known:
            tokens_NK = np.stack([self._likely[depth][1][i] for depth, i, _ in known])
            noise_NK = gumbel(
                np.array([lane.seed for _, _, lane in known]),
                np.array([lane.position + depth for depth, _, lane in known]),
                tokens_NK,
            )
            sharpening.observe(
                np.stack([self._likely[depth][0][i] for depth, i, _ in known]),
                noise_NK,
                tokens_NK,
                np.array([lane.targets[depth] for depth, _, lane in known]),
            )
        self.begin([])
