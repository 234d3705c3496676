"""Costs of rounds as they are measured while an engine runs. PURE: seconds are passed in.

Until enough different rounds were seen there is no table, and whoever asks must try some (`wanted`). Then the table is
fitted again as rounds come, at intervals that grow, so fitting costs less and less of the time.

Invariants: bounded memory; equal observations give equal tables; a table that was given is never replaced, only
corrected by `Correction`. Plain decoding is what rounds on the engine's plain path take, and these alone; a round that
could have had drafts and has none costs what a verify of one row per request does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import islice
from statistics import median

import numpy as np
from numpy.typing import NDArray

from specactor.errors import PlanError
from specactor.rollout.speculation.costs import Correction, CostTable, Point
from specactor.rollout.speculation.windows import OFF

MAX_POINTS = 1024
"""Rounds that are remembered, of each kind."""
FIRST_FIT = 12
"""Rounds after which the first table is fitted."""
GROWTH = 2
"""The next fit comes when this many times as many rounds were seen."""
MAX_INTERVAL = 2048
"""Rounds between two fits, at most."""
CURVES = 256
"""Numbers of requests whose costs are kept at hand."""
UNFITTED = 8
"""Rounds that tell what drafting costs while they are too much alike for the table."""
TRIED = (0, 2, 4, 1)
"""Windows to try, in turns, while there is no table; those beyond the largest are cut to it."""


class OnlineCosts:
    """Of one engine."""

    def __init__(self, table: CostTable | None = None) -> None:
        self._given = table
        self.correction = Correction()
        self._verifies: deque[Point] = deque(maxlen=MAX_POINTS)
        self._plain: deque[Point] = deque(maxlen=MAX_POINTS)
        self._drafts: dict[str, deque[Point]] = {}
        self._rounds = 0
        self._sizes: set[int] = set()
        """Numbers of requests that were seen, one of each magnitude."""
        self._next_fit = FIRST_FIT
        self._use(table)

    @property
    def table(self) -> CostTable | None:
        return self._table

    @property
    def plain(self) -> list[Point]:
        """Of the rounds that are remembered, those on the engine's plain path."""
        return list(self._plain)

    @property
    def verifies(self) -> list[Point]:
        """The others."""
        return list(self._verifies)

    @property
    def drafts(self) -> dict[str, list[Point]]:
        """The same, per drafter."""
        return {name: list(points) for name, points in self._drafts.items()}

    def wanted(self, max_window: int) -> int:
        """A window to try while there is no table."""
        return min(TRIED[self._rounds % len(TRIED)], max_window)

    def plain_is_next(self) -> bool:
        """Whether a plain round is `wanted` after the round that goes on."""
        return TRIED[(self._rounds + 1) % len(TRIED)] == 0

    def verify_s(self, requests: int, rows: int) -> float:
        """Seconds of one forward pass over `rows` rows. Raises PlanError while there is no table."""
        return self._verify(requests, rows)

    def verify_curve(self, requests: int, max_rows: int) -> NDArray[np.float64]:
        """`verify_s` for rows = requests, .., max_rows; not to be written to."""
        return self._curve(requests, max_rows)

    def plain_s(self, requests: int) -> float:
        """Seconds of a plain step, corrected."""
        return self._plain_s(requests) * self.correction.factor(OFF)

    def draft_s(self, drafter: str, requests: int) -> Callable[[int], float]:
        """Seconds of drafting by depth; nothing for a drafter that was not measured yet, and in proportion to the draft
        tokens for one that is not in the table yet."""
        if drafter in self._known().drafters:
            return lambda depth: self._draft_s(drafter, requests, depth)
        latest = list(islice(reversed(self._drafts.get(drafter, ())), UNFITTED))
        token_s = median(seconds / total for _, total, seconds in latest) if latest else 0.0
        return lambda depth: token_s * requests * depth

    def observe(
        self, drafter: str, *, requests: int, rows: int, depth: int, verify_s: float, draft_s: float, predicted_s: float
    ) -> None:
        """A round that could have drafts has ended. `rows` of all requests; `depth`, the largest window; `predicted_s`:
        uncorrected, or 0."""
        self._verifies.append((requests, rows, verify_s))
        if depth and draft_s > 0:
            self._drafts.setdefault(drafter, deque(maxlen=MAX_POINTS)).append((requests, requests * depth, draft_s))
        if predicted_s > 0:
            self.correction.observe(drafter, predicted_s=predicted_s, measured_s=verify_s + draft_s)
        self._seen(requests)

    def observe_plain(self, requests: int, *, round_s: float, predicted_s: float, after_another: bool = False) -> None:
        """A plain round has ended. `predicted_s`: uncorrected, or 0; `after_another`: after a round that could have
        drafts, some of whose work it did; then it counts if there is no other."""
        if not after_another or not self._plain:
            self._plain.append((requests, requests, round_s))
            if predicted_s > 0:
                self.correction.observe(OFF, predicted_s=predicted_s, measured_s=round_s)
        self._seen(requests)

    def _seen(self, requests: int) -> None:
        self._rounds += 1
        if not any(n <= 2 * requests and requests <= 2 * n for n in self._sizes):
            self._sizes.add(requests)  # what lines from other numbers say of it may be far off
            self._next_fit = min(self._next_fit, self._rounds + FIRST_FIT)
        if self._given is None and self._rounds >= self._next_fit:
            self._fit()

    def _fit(self) -> None:
        if all(rows == requests for requests, rows, _ in self._verifies):
            self._next_fit = self._rounds + FIRST_FIT  # nothing says what a row costs
            return
        self._next_fit = self._rounds + min(self._rounds * (GROWTH - 1), MAX_INTERVAL)
        try:
            self._use(
                CostTable.fit(
                    self._verifies,
                    plain=self._plain,
                    drafters={name: points for name, points in self._drafts.items() if _varied(points)},
                )
            )
        except PlanError:
            return  # all rounds were alike: the next ones will not be
        self.correction = Correction()

    def _use(self, table: CostTable | None) -> None:
        self._table = table
        self._verify = cache(lambda requests, rows: self._known().verify_s(requests, rows))
        self._plain_s = cache(lambda requests: self._known().plain_s(requests))
        self._draft_s = cache(lambda drafter, requests, depth: self._known().draft_s(drafter, requests, depth))
        self._curve = lru_cache(CURVES)(lambda requests, rows: self._known().verify_curve(requests, rows))

    def _known(self) -> CostTable:
        if self._table is None:
            raise PlanError("costs: no table yet. Ask for `wanted` windows until there is one.")
        return self._table


def _varied(points: Sequence[Point] | deque[Point]) -> Sequence[Point] | deque[Point]:
    """The points, if there are two different ones, which a fit needs; else none."""
    return points if len({point[:2] for point in points}) > 1 else ()
