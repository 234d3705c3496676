"""What devices did when, in virtual time, and what a rollout was. PURE: spans in, sums out.

Invariants, which `checked` asserts: no device does two things at once; no span ends before it begins; all lie within
the devices that there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from specactor.errors import PlanError
from specactor.planning.plans import RolloutPlan
from specactor.simulator.requests import Floats, Ints

KINDS: Mapping[str, str] = {
    "start": "#c9ced6",
    "off": "#4c6a92",
    "coupled": "#7fa7c9",
    "decoupled": "#2f7f79",
    "drafting": "#d9a441",
    "fastest": "#e8843c",
    "train": "#8064a2",
    "sync": "#c0504d",
    "refresh": "#b8c4a0",
}
"""What a device can do, with its colour; what is not covered by a span is idle."""
ROUNDING_S = 1e-6
"""By which spans may overlap: sums of many small numbers."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Neighbouring devices do one thing."""

    first: int
    """Device."""
    devices: int
    start_s: float
    end_s: float
    kind: str

    @property
    def device_s(self) -> float:
        return self.devices * (self.end_s - self.start_s)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans that follow each other on the same devices become one; those of no length go."""
    last: dict[tuple[int, int], int] = {}
    out: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start_s, s.first)):
        if span.end_s <= span.start_s:
            continue
        key = (span.first, span.devices)
        i = last.get(key)
        if i is not None and out[i].kind == span.kind and abs(out[i].end_s - span.start_s) <= ROUNDING_S:
            out[i] = replace(out[i], end_s=span.end_s)
        else:
            last[key] = len(out)
            out.append(span)
    return out


def checked(spans: Sequence[Span], devices: int) -> Sequence[Span]:
    """The same. Raises PlanError for a device that does two things at once: that would be a bug of ours."""
    free_at = [0.0] * devices
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        if not 0 <= span.first <= span.first + span.devices <= devices or span.end_s < span.start_s:
            raise PlanError(f"ledger: got {span}, expected devices 0..{devices - 1} and an end after the start.")
        for device in range(span.first, span.first + span.devices):
            if free_at[device] > span.start_s + ROUNDING_S:
                raise PlanError(f"ledger: device {device} got {span} while it was busy until {free_at[device]} s.")
            free_at[device] = span.end_s
    return spans


def busy_s(spans: Iterable[Span]) -> dict[str, float]:
    """Device-seconds by kind."""
    sums: dict[str, float] = {}
    for span in spans:
        sums[span.kind] = sums.get(span.kind, 0.0) + span.device_s
    return sums


def moved(spans: Iterable[Span], *, by_s: float) -> list[Span]:
    """The same, later."""
    return [replace(span, start_s=span.start_s + by_s, end_s=span.end_s + by_s) for span in spans]


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a rollout was. Every request has finished. N requests."""

    plan: RolloutPlan
    lengths: Ints
    """[N], tokens."""
    finish_s: Floats
    """[N]: seconds from the rollout's begin."""
    spans: Sequence[Span]
    rounds: float
    """Of all engines."""
    emitted: float
    """Tokens, as engines counted them."""
    drafted: float
    """Draft tokens that were verified."""
    accepted: float
    decisions: int
    events: int
    helpers: int
    """Engines that ran dry and drafted for others."""

    @property
    def seconds(self) -> float:
        return float(self.finish_s.max())

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())
