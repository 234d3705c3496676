"""The contestants of `decoupled_speed` take turns, and the machine's pace changes meanwhile: within minutes by a third.

So each is compared with decoding without drafts before and after it, and dialled drafters, which take seconds that are
fixed before, count with the share of a plain step that these turned out to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from benchmarks.decoupled_speed_bench import NEW_TOKENS, Bench, Way, shortened, speculation
from benchmarks.decoupled_speed_profile import PACES
from benchmarks.decoupled_speed_table import CONTESTANTS
from benchmarks.dialled import Script
from specactor.rollout.speculation.costs import CostTable
from specactor.types import RolloutRequest

DRAFTING = tuple(mode for mode in CONTESTANTS if mode != "off")


class Turns:
    """Of a cell's contestants: each decodes between two decodings without drafts, which it is compared with. Requests
    are decoded in groups, one group after the other."""

    def __init__(self, bench: Bench, way: Way, groups: Sequence[Sequence[RolloutRequest]]) -> None:
        self._bench, self._way, self._groups = bench, way, groups
        self._prefills_s: dict[str, list[float]] = {mode: [] for mode in CONTESTANTS}
        self._off_s: list[float] = []
        self._own_s: list[tuple[str, float]] = []  # the i-th came after the i-th decoding without drafts
        self.off()

    def off(self) -> None:
        self.begin("off")
        self._off_s.append(self._decode("off", self._groups))

    def begin(self, mode: str) -> None:
        """The engines of this mode have no costs yet, and do not know how good drafts are."""
        engines = self._bench.of(mode)
        self._bench.configure(speculation(mode, self._way.in_engine), engines)
        self._prefills_s[mode].append(self._decode(mode, [shortened(group) for group in self._groups]))

    def teach(self, mode: str) -> None:
        """The decoding that is timed next is not the first: a group was decoded before."""
        self._decode(mode, self._groups[:1])

    def timed(self, mode: str) -> None:
        """To be followed by one without drafts."""
        self._own_s.append((mode, self._decode(mode, self._groups)))

    def off_s(self) -> list[float]:
        """Of all decodings without drafts, without prefills."""
        prefill_s = median(self._prefills_s["off"])
        return [seconds - prefill_s for seconds in self._off_s]

    def ratios(self) -> dict[str, list[float]]:
        """Times as fast as without drafts, by contestant that drafts. The decoding before came a group earlier, which
        teaches: it counts less than that after, so that a steady drift of the machine is left out."""
        found: dict[str, list[float]] = {mode: [] for mode in DRAFTING}
        off_s, num = self.off_s(), len(self._groups)
        for (mode, own_s), before_s, after_s in zip(self._own_s, off_s, off_s[1:], strict=False):
            beside_s = (num * before_s + (num + 1) * after_s) / (2 * num + 1)
            found[mode].append(beside_s / (own_s - median(self._prefills_s[mode])))
        return found

    def _decode(self, mode: str, groups: Sequence[Sequence[RolloutRequest]]) -> float:
        engines = self._bench.of(mode)
        return sum(self._bench.decode(group, engines) for group in groups)


def pace_of(bench: Bench, table: CostTable, batch: int) -> float:
    """Seconds of a plain step now over those of the table."""
    requests = bench.requests[batch][:batch]
    bench.configure(speculation("off"), bench.engines)
    found = [
        bench.decode(requests, bench.engines) - bench.decode(shortened(requests), bench.engines) for _ in range(PACES)
    ]
    return pace_at(table, batch, batch * (NEW_TOKENS - 1) / median(found))


def pace_at(table: CostTable, batch: int, off: float) -> float:
    """Args: tokens per second of two engines without drafts."""
    return batch / off / table.plain_s(-(-batch // 2))


def as_dialled(way: Way, table: CostTable, batch: int, off: float) -> Way:
    """With the share of a plain step that a dialled drafter took at the pace of the cell: its seconds are fixed before.

    Args: as of `pace_at`.
    """
    if way.share is None:
        return way
    return replace(way, share=Script.read(way.model_dir).step_s[0] / (pace_at(table, batch, off) * table.plain_s(1)))
