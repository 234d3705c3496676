"""A drafter process as its owner sees it: started, watched, ended. No SGLang here.

Invariants: no wait is unbounded; after `stop` nothing of the process is left: no process, folder, address or shared
memory; when the owner dies, in whatever way, the process ends by itself (`guard`).
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from specactor.cpu import sglang as cpu
from specactor.errors import EngineError
from specactor.rollout.decoupled.process import Work
from specactor.rollout.decoupled.spec import RENEW, TRACE, WORK, DrafterSpec, Renewed, Started
from specactor.rollout.sglang.guarded import Guarded

if TYPE_CHECKING:
    from specactor.weights_sync.messages import DraftWeights

MODULE = "specactor.rollout.decoupled.main"
_MAX_LINE_BYTES = 1 << 20
_MAX_WORK_BYTES = 1 << 26
WORK_TIMEOUT_S = 5.0
"""A batch of a draft model that reads many prompts can take seconds."""


class DrafterProcess:
    """One drafter process."""

    def __init__(self, spec: DrafterSpec) -> None:
        """Starts it and returns at once; `wait_ready` tells how it went."""
        self.spec = spec
        self.started: Started | None = None
        self.version = 0
        """Of the weights that it drafts with, as it said last."""
        self._is_silent = False
        self._process = Guarded(MODULE, environment=cpu.process_environment((spec.device,)), log_file=spec.log_file)
        try:
            self._process.connection.sendall(msgspec.json.encode(replace(spec, core=_core(spec.device))) + b"\n")
        except OSError:
            return  # it is dead already, which `wait_ready` tells

    @property
    def pid(self) -> int:
        """Of the guard around it."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as is known."""
        return not self._process.exited

    def wait_ready(self) -> Started:
        """Until it listens. When it does not: EngineError, with the end of the log, and nothing of it is left."""
        if self.started is not None:
            return self.started
        try:
            line = self._line(time.monotonic() + self.spec.start_timeout_s)
        except TimeoutError:
            self.kill()
            limit = f"{self.spec.start_timeout_s:g} s. Raise rollout.engine.start_timeout_s."
            raise EngineError(self._with_log(f"did not start within {limit}")) from None
        try:
            started = msgspec.json.decode(line, type=Started) if line else Started(error="the process died")
        except msgspec.DecodeError as error:
            started = Started(error=f"unreadable answer {line!r}: {error}")
        if started.error:
            self.kill()
            raise EngineError(self._with_log(f"did not start: {started.error}."))
        self.started, self.version = started, started.version
        return started

    def work(self, *, trace: bool, timeout_s: float = WORK_TIMEOUT_S) -> Work | None:
        """What it did since it was asked last; None if it does not say, or not in time, and then never again.

        Args: whether it shall record spans from now on.
        """
        if self._is_silent or not self._has_started():
            return None
        try:
            self._process.connection.sendall((TRACE if trace else WORK) + b"\n")
            return msgspec.json.decode(self._line(time.monotonic() + timeout_s, _MAX_WORK_BYTES), type=Work)
        except (OSError, msgspec.DecodeError):  # the answer to this question may come yet, and be taken for another's
            self._is_silent = True
            return None

    def renew(self, weights: DraftWeights, *, timeout_s: float) -> str:
        """Bring it new weights; why it did not take them, or empty. It goes on drafting before and after."""
        if self._is_silent or not self._has_started():
            return f"drafter {self.spec.index} does not answer"
        try:
            self._process.connection.sendall(RENEW + msgspec.json.encode(weights) + b"\n")
            renewed = msgspec.json.decode(self._line(time.monotonic() + timeout_s, _MAX_WORK_BYTES), type=Renewed)
        except (OSError, msgspec.DecodeError) as error:
            self._is_silent = True
            return f"drafter {self.spec.index}: {error}"
        self.version = renewed.version
        return f"drafter {self.spec.index}: {renewed.problem}" if renewed.problem else ""

    def wants(self, version: int) -> bool:
        """Whether it could take weights of this version, and has older ones."""
        return self.alive and not self._is_silent and self._has_started() and self.version < version

    def stop(self) -> None:
        """Orderly end; falls back to `kill`. Harmless when it is gone."""
        self._process.connection.close()
        if self.started is not None:
            self._process.reap()
        self.kill()

    def kill(self) -> None:
        """Immediate end. Harmless when it is gone."""
        self._process.end()
        self._process.connection.close()
        self._process.sweep()

    def log_tail(self) -> str:
        """Last lines of the log."""
        return self._process.log_tail()

    def _has_started(self) -> bool:
        """Without waiting for it."""
        if self.started is None and select.select([self._process.connection], [], [], 0)[0]:
            with contextlib.suppress(EngineError):  # then it is gone, which its owner will see
                self.wait_ready()
        return self.started is not None

    def _line(self, deadline: float, most: int = _MAX_LINE_BYTES) -> bytes:
        """What the process says first; nothing if it died. Raises TimeoutError."""
        data = b""
        while not data.endswith(b"\n") and len(data) < most:
            self._process.connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                part = self._process.connection.recv(_MAX_LINE_BYTES)
            except ConnectionResetError:
                return b""
            if not part:
                return b""
            data += part
        return data

    def _with_log(self, what: str) -> str:
        return f"drafter {self.spec.index} {what} The end of its log, {self.spec.log_file}:\n{self.log_tail()}"


def _core(device: int) -> int | None:
    """Without a GPU a drafter keeps to one core, if there is such a one."""
    return device if not cpu.has_gpu() and device in os.sched_getaffinity(0) else None
