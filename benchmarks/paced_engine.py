"""What an engine's process does that keeps the pace of another device: SpecActor's own, and then it sleeps.

Every decoding pass computes its real tokens with a tiny model, and returns when the time is over that a cost table
gives for a pass of so many requests and rows, times a dilation that all devices share. Prefills are not paced:
benchmarks take them off. The scheduler is forked from this process and inherits the change.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import dialled
from benchmarks.paced_turns import Turn, Turns
from specactor.rollout.speculation.costs import Grid
from specactor.rollout.speculation.drafter import DraftSequence

PACE = "SPECACTOR_BENCHMARK_PACE"
"""Environment variable: path of a `DevicePace` as JSON, read once, when an engine starts."""
PASSES = "paced.passes"
"""Rank call: `Passes` since the last one. No payload."""
NOTED = "paced.turns"
"""Rank call: `Turns` since the last one. No payload."""
HALF = 0.5


class DevicePace(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one device, before dilation. Grids over (requests, rows per request)."""

    plain: Grid
    verify: Grid
    draft: Grid  # per window; one token after the other
    dilation: float

    def pass_s(self, requests: int, rows: int) -> float:
        """Return the dilated seconds of a pass of `rows` rows of all requests."""
        grid = self.plain if rows == requests else self.verify
        return self.dilation * grid.at(requests, rows / requests)

    def step_s(self, requests: int) -> list[float]:
        """Return the dilated seconds of a draft step of 1, 2, .. requests."""
        return [self.dilation * self.draft.at(n, 1.0) for n in range(1, requests + 1)]

    @classmethod
    def read(cls, path: str) -> DevicePace:
        return msgspec.json.decode(Path(path).read_bytes(), type=cls)


class Passes(msgspec.Struct, kw_only=True):
    """Decoding passes of one engine."""

    passes: int = 0
    busy_s: float = 0.0  # that the device would have computed, dilated; drafting on it included
    own_s: float = 0.0  # that computing the tokens took here
    over_half: int = 0  # passes whose computing took more than half of them


def size(names: Iterable[str]) -> tuple[int, int]:
    """Return (requests, rows) of a pass: a verification has a request once per row."""
    rows = Counter(names)
    return len(rows), rows.total()


class Noted:
    """What an engine notes of its turns: those without drafts, and when it looked for some elsewhere."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._looked: dict[str, Turn] = {}  # of the round that begins, by request

    def install(self) -> None:
        """Note every look of a drafter elsewhere."""
        from specactor.rollout.decoupled.remote_drafter import Decoupled

        propose = Decoupled.propose

        def noted(itself: Decoupled, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
            told_s = time.perf_counter()
            drafts = propose(itself, sequences, windows)
            looked_s = time.perf_counter()
            for sequence, window, draft in zip(sequences, windows, drafts, strict=True):
                self._looked[sequence.request_id] = Turn(
                    sequence.seed, len(sequence.output_ids), window, told_s, looked_s, len(draft)
                )
            return drafts

        Decoupled.propose = noted  # type: ignore[method-assign,assignment]

    def passed(self, names: Iterable[str]) -> None:
        """Note the turns of a pass, which has a request once per row."""
        rows = Counter(names)
        self._turns.turns += len(rows)
        self._turns.empty += [self._looked.get(name, Turn()) for name, count in rows.items() if count == 1]
        self._looked.clear()

    def take(self) -> Turns:
        taken, self._turns = self._turns, Turns()
        return taken


class Paced:
    def __init__(self, pace: DevicePace) -> None:
        self._pace = pace
        self._passes = Passes()
        self.noted = Noted()

    def install(self) -> None:
        """Change SGLang's worker, before it starts."""
        self.noted.install()
        from sglang.srt.managers import tp_worker

        worker: Any = tp_worker.TpModelWorker
        forward = worker.forward_batch_generation

        def paced(itself: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
            if not batch.forward_mode.is_decode():
                return forward(itself, batch, *arguments, **named)
            began_s = time.perf_counter()
            names = [req.rid for req in batch.reqs]
            pass_s = self._pace.pass_s(*size(names))
            self.noted.passed(names)
            result = forward(itself, batch, *arguments, **named)
            self._ended(time.perf_counter() - began_s, pass_s)
            return result

        worker.forward_batch_generation = paced

    def _ended(self, own_s: float, pass_s: float) -> None:
        passes = self._passes
        passes.passes += 1
        passes.own_s += own_s
        passes.busy_s += max(own_s, pass_s)
        passes.over_half += own_s > HALF * pass_s
        time.sleep(max(0.0, pass_s - own_s))

    def take(self) -> Passes:
        taken, self._passes = self._passes, Passes()
        taken.busy_s += dialled.take_spent_s()
        return taken


_paced: Paced | None = None


def passes(rank: Any, payload: bytes) -> bytes:
    """Answer `PASSES`."""
    assert _paced is not None, "this engine is not paced"
    return msgspec.json.encode(_paced.take())


def turns(rank: Any, payload: bytes) -> bytes:
    """Answer `NOTED`."""
    assert _paced is not None, "this engine is not paced"
    return msgspec.json.encode(_paced.noted.take())


def run(connection: socket.socket) -> None:
    """Serve, as `engine_server.run` does, at a pace."""
    global _paced
    from specactor.rollout.sglang import engine_server, rank_calls

    rank_calls.RANK_CALLS |= {PASSES: passes, NOTED: turns}
    _paced = Paced(DevicePace.read(os.environ[PACE]))
    _paced.install()
    engine_server.run(connection)
