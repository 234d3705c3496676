"""What the process of an engine under measurement does.

It is SpecActor's own, with what a benchmark needs besides: kernels for SGLang's own algorithms, and rank calls
that switch between ways to speculate, each with its own history, and that profile the scheduler. The engine's scheduler
is forked from it and inherits all of this.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import socket
import time
from typing import Any

import msgspec

from specactor.config import SpeculationConfig

SWITCH = "speculation_speed.switch"
"""Rank call: go on as the contestant of this name. Payload: `Switch` as JSON."""
PROFILE = "speculation_speed.profile"
"""Rank call: begin a profile (payload b"begin"), or end it (b"end"); the answer is a `Profile` as JSON."""
ACCEPTED = "speculation_speed.accepted"
"""Rank call: [emitted tokens, verifies] of SGLang's own algorithm since the last call, as JSON."""
BUILTIN = "SPECULATION_SPEED_BUILTIN"
"""Environment variable of an engine that runs SGLang's own algorithm: arguments of SGLang's server, as JSON. They are
refused in EngineConfig, since they change the text."""
PARTS = {
    ("tp_worker.py", "forward_batch_generation"): "target",
    ("verify_worker.py", "forward_batch_generation"): "worker",
    ("verify_worker.py", "_follow"): "commits",
    ("verify_worker.py", "note_request_finished"): "close",
    ("verify_worker.py", "_drafts"): "decide and draft",
    ("drafter_set.py", "tell"): "tell",
    ("drafter_set.py", "draft"): "draft",
    ("speculator.py", "learn"): "learn",
    ("verify_batch.py", "spread"): "spread",
    ("verify_batch.py", "place"): "spread",
    ("verify_worker.py", "_accepted"): "accept and emit",
    ("verify_worker.py", "_emit"): "accept and emit",
    ("verify_worker.py", "_prefill"): "prefill",
    ("scheduler.py", "run_batch"): "run_batch",
}
"""(File, function) -> the name under which its time is reported, what it calls included."""


class Profile(msgspec.Struct, kw_only=True, frozen=True):
    """Of the scheduler. Seconds are of the processor, and the profiler makes Python look slower than it is."""

    batches: int  # prefills and rounds
    total_s: float
    parts_s: dict[str, float]


class Switch(msgspec.Struct, kw_only=True, frozen=True):
    """A way to speculate."""

    name: str
    config: SpeculationConfig


_kept: dict[str, Any] = {}
_profile: cProfile.Profile | None = None


def switch(rank: Any, payload: bytes) -> bytes:
    """Answer `SWITCH`: what the contestant learned when it ran before is still there."""
    from specactor.rollout.sglang.speculation_calls import make_speculator

    message = msgspec.json.decode(payload, type=Switch)
    if message.name not in _kept:
        _kept[message.name] = make_speculator(message.config)
    worker = rank.draft_worker
    worker.speculator = None  # so that the last one is not stopped
    worker.use(_kept[message.name])
    return b""


def profile(rank: Any, payload: bytes) -> bytes:
    """Answer `PROFILE`."""
    global _profile
    if payload == b"begin":
        _profile = cProfile.Profile(time.process_time)
        _profile.enable()
        return b""
    if _profile is None:
        return b""
    _profile.disable()
    stats: Any = pstats.Stats(_profile)
    _profile = None
    parts: dict[str, float] = {}
    batches = 0
    for (path, _, function), (calls, _, _, spent, _) in stats.stats.items():
        part = PARTS.get((path.rpartition("/")[2], function))
        if part is not None:
            parts[part] = parts.get(part, 0.0) + spent
        if part == "run_batch":
            batches = calls
    return msgspec.json.encode(Profile(batches=batches, total_s=stats.total_tt, parts_s=parts))


def run(connection: socket.socket) -> None:
    """Serve, as `engine_server.run` does."""
    from specactor.rollout.sglang import engine_server, rank_calls

    rank_calls.RANK_CALLS.update({SWITCH: switch, PROFILE: profile})
    if os.environ.get(BUILTIN):
        _use_builtin(json.loads(os.environ[BUILTIN]))
    engine_server.run(connection)


def _use_builtin(arguments: dict[str, str | int]) -> None:
    from benchmarks import speculation_speed_kernels as kernels
    from specactor.rollout.sglang import backend, rank_calls

    rank_calls.RANK_CALLS[ACCEPTED] = lambda rank, payload: msgspec.json.encode(kernels.accepted())
    own = backend.server_args
    backend.server_args = lambda spec, **device: own(spec, **device) | arguments
    kernels.install()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    kernels.connect()
