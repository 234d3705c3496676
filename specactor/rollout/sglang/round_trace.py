"""Rounds of an engine rank as spans of its trace."""

from __future__ import annotations

import time

from specactor.trace import Recorder, Span

_LANE = "rounds"
"""Of the trace."""


class RoundTrace:
    """Records rounds; plain ones that follow each other are one span.

    Where nobody traces, each round costs a comparison."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._stretch: tuple[float, float, int] | None = None
        """Plain rounds that were not written yet: start, end, how many."""
        self._emitted_s = 0.0
        """End of the last round that could have drafts."""

    def verified(
        self, entered_s: float, decided_s: float, ended_s: float, *, requests: int, rows: int, emitted: int
    ) -> None:
        """A round that could have drafts; its tokens were handed out just now. SGLang's own time is a gap."""
        if not self.recorder.on:
            return
        self.end_stretch()
        self.recorder.span(_LANE, "draft", entered_s, decided_s, requests=requests, drafted=rows - requests)
        self.recorder.span(_LANE, "verify", decided_s, ended_s, requests=requests, rows=rows)
        self._emitted_s = time.perf_counter()
        self.recorder.span(_LANE, "emit", ended_s, self._emitted_s, tokens=emitted)

    def plain(self, began_s: float, ended_s: float) -> None:
        """A round on SGLang's own path."""
        if not self.recorder.on:
            return
        start_s, _, count = self._stretch or (max(began_s, self._emitted_s), ended_s, 0)
        self._stretch = start_s, ended_s, count + 1

    def end_stretch(self) -> None:
        """What comes next is no plain round."""
        if self._stretch is not None:
            start_s, end_s, count = self._stretch
            self.recorder.span(_LANE, "plain", start_s, end_s, rounds=count)
            self._stretch = None

    def take(self, *, on: bool) -> list[Span]:
        """What was recorded since the last call. Args: whether to record from now on."""
        self.end_stretch()
        self.recorder.on = on
        return self.recorder.take()
