"""What processes did when, for Perfetto (https://ui.perfetto.dev). PURE. Times are seconds of `time.perf_counter`, one
clock per host. Memory is bounded, the oldest spans go first; off, nothing is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

Detail = int | float | str
_ROUNDS = "rounds"  # the lane of an engine rank


class Span(msgspec.Struct, frozen=True, array_like=True):
    """An instant has `end_s == start_s`."""

    lane: str  # of the process: what stands beside another lane goes on at the same time
    name: str
    start_s: float
    end_s: float
    details: dict[str, Detail] = {}


class Recorder:
    def __init__(self, *, on: bool = False, capacity: int = 100_000) -> None:
        self.on = on
        self._spans: deque[Span] = deque(maxlen=capacity)

    def span(self, lane: str, name: str, start_s: float, end_s: float, **details: Detail) -> None:
        if self.on:
            self._spans.append(Span(lane, name, start_s, max(start_s, end_s), details))

    def instant(self, lane: str, name: str, at_s: float, **details: Detail) -> None:
        self.span(lane, name, at_s, at_s, **details)

    def take(self) -> list[Span]:
        taken = list(self._spans)
        self._spans.clear()
        return taken


class RoundTrace:
    """Consecutive plain rounds are one span. While off, a round costs a comparison."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._stretch: tuple[float, float, int] | None = None
        """Plain rounds that were not written yet: start, end, how many."""
        self._emitted_s = 0.0
        """End of the last round that could have drafts."""

    def verified(
        self,
        entered_s: float,
        decided_s: float,
        ended_s: float,
        emitted_s: float,
        *,
        requests: int,
        rows: int,
        emitted: int,
    ) -> None:
        """Record a round that could have drafts; its tokens are handed out last."""
        if not self.recorder.on:
            return
        self.end_stretch()
        self.recorder.span(_ROUNDS, "draft", entered_s, decided_s, requests=requests, drafted=rows - requests)
        self.recorder.span(_ROUNDS, "verify", decided_s, ended_s, requests=requests, rows=rows)
        self._emitted_s = emitted_s
        self.recorder.span(_ROUNDS, "emit", ended_s, emitted_s, tokens=emitted)

    def plain(self, began_s: float, ended_s: float) -> None:
        if not self.recorder.on:
            return
        start_s, _, count = self._stretch or (max(began_s, self._emitted_s), ended_s, 0)
        self._stretch = start_s, ended_s, count + 1

    def end_stretch(self) -> None:
        if self._stretch is not None:
            start_s, end_s, count = self._stretch
            self.recorder.span(_ROUNDS, "plain", start_s, end_s, rounds=count)
            self._stretch = None

    def take(self, *, on: bool) -> list[Span]:
        """Return what was recorded since the last call; record from now on if `on`."""
        self.end_stretch()
        self.recorder.on = on
        return self.recorder.take()


def chrome_trace(processes: Mapping[str, Sequence[Span]]) -> bytes:
    """Return processes' spans as JSON in Chrome's trace event format, from the first start on."""
    origin = min((span.start_s for spans in processes.values() for span in spans), default=0.0)
    events: list[dict[str, object]] = []
    for pid, (process, spans) in enumerate(processes.items(), 1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
        lanes = {lane: tid for tid, lane in enumerate(dict.fromkeys(span.lane for span in spans), 1)}
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
            for lane, tid in lanes.items()
        ]
        events += [_event(span, pid=pid, tid=lanes[span.lane], origin=origin) for span in spans]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _event(span: Span, *, pid: int, tid: int, origin: float) -> dict[str, object]:
    """Chrome counts in microseconds."""
    common = {"name": span.name, "pid": pid, "tid": tid, "ts": (span.start_s - origin) * 1e6, "args": span.details}
    if span.end_s == span.start_s:
        return {"ph": "i", "s": "t", **common}
    return {"ph": "X", "dur": (span.end_s - span.start_s) * 1e6, **common}
