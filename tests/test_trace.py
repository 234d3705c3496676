"""Traces: what is kept, and the form in which Perfetto reads it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from specactor.trace import Recorder, Span, chrome_trace


def events(trace: bytes, ph: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace)["traceEvents"] if event["ph"] == ph]


def test_a_recorder_that_is_off_keeps_nothing() -> None:
    recorder = Recorder()
    recorder.span("verify", "verify", 1.0, 2.0)
    assert recorder.take() == []


def test_spans_are_taken_once_in_their_order_and_the_oldest_go_first() -> None:
    recorder = Recorder(on=True, capacity=2)
    for k in range(3):
        recorder.span("verify", f"round {k}", k, k + 1, rows=k)
    assert recorder.take() == [
        Span("verify", "round 1", 1, 2, {"rows": 1}),
        Span("verify", "round 2", 2, 3, {"rows": 2}),
    ]
    assert recorder.take() == []


def test_no_span_ends_before_it_starts() -> None:
    recorder = Recorder(on=True)
    recorder.span("verify", "verify", 2.0, 1.0)
    assert recorder.take()[0].end_s == 2.0


def test_a_trace_has_processes_lanes_and_microseconds_from_the_first_start() -> None:
    trace = chrome_trace(
        {
            "engine 0": [Span("verify", "verify", 10.0, 10.5, {"rows": 4}), Span("decisions", "switch", 10.25, 10.25)],
            "drafter 0": [Span("draft", "draft", 9.5, 10.25)],
        }
    )
    names = {(e["name"], e["pid"]): e["args"]["name"] for e in events(trace, "M") if e["name"] == "process_name"}
    assert names == {("process_name", 1): "engine 0", ("process_name", 2): "drafter 0"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    assert lanes == {(1, 1): "verify", (1, 2): "decisions", (2, 1): "draft"}
    verify, draft = events(trace, "X")
    assert (verify["ts"], verify["dur"], verify["args"]) == (0.5e6, 0.5e6, {"rows": 4})
    assert (draft["ts"], draft["dur"]) == (0.0, 0.75e6)
    assert draft["ts"] < verify["ts"] < draft["ts"] + draft["dur"]  # one sees that they overlap
    (switch,) = events(trace, "i")
    assert switch["ts"] == 0.75e6


def test_an_empty_trace_is_a_trace() -> None:
    assert json.loads(chrome_trace({}))["traceEvents"] == []


def test_processes_of_a_host_share_the_clock() -> None:
    before = time.perf_counter()
    code = "import time; print(time.perf_counter())"
    there = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout)
    assert before < there < time.perf_counter()
