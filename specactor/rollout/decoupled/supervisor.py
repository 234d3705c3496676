"""A drafter process as its owner sees it: started, watched, ended. No SGLang here.

Invariants: no wait is unbounded; a process that answers late is heard again; after `stop` nothing of the process is
left: no process, folder, address or shared memory; waking it never waits; when the owner dies, in whatever way, the
process ends by itself (`guard`).
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from specactor.cpu import sglang as cpu
from specactor.errors import EngineError
from specactor.rollout.child_process import Guarded
from specactor.rollout.decoupled.loop import Work
from specactor.rollout.decoupled.spec import (
    ALIVE,
    RENEW,
    SLEEP,
    TRACE,
    WAKE,
    WORK,
    DrafterSpec,
    Renewed,
    Rested,
    Started,
)

if TYPE_CHECKING:
    from socket import socket

    from specactor.weights_sync.messages import DraftWeights

MODULE = "specactor.rollout.decoupled.main"
_MAX_LINE_BYTES = 1 << 20
_MAX_WORK_BYTES = 1 << 26
_Answer = TypeVar("_Answer", Work, Renewed, Rested)

WORK_TIMEOUT_S = 5.0
"""A batch of a draft model that reads many prompts can take seconds."""
FIRST_WAKE_S = 1.0
"""What waking is expected to take before it was measured."""
_LOOK_EVERY_S = 0.005
SIGN_EVERY_S = 5.0
"""So long after its last word a process is asked for a sign of life, and as long it may take before it counts as
silent: a batch of a draft model that reads many prompts can take seconds."""


class Talk:
    """Questions to a process, and its answers, over a socket.

    A question has a number, which its answer repeats, so an answer that comes late is not taken for another's. Until
    it has come, nothing else is asked: a process that hangs costs one wait, and one that was only late is heard again.
    A sign of life is asked for on the side: other questions do not wait for it, unless it is late.
    """

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._number = self._answered = 0
        self._sign = 0
        """Number of the last question that was one for a sign of life."""
        self._heard_s = time.monotonic()
        """The last answer, or the first question after it."""
        self._unsent, self._unread = b"", bytearray()

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """Its answer. Raises OSError (TimeoutError) when there is none."""
        if self.is_silent():
            raise TimeoutError("it has not yet answered what it was asked before")
        deadline = time.monotonic() + timeout_s
        self._put(question)
        self._send(deadline)
        while True:
            answer = self._hear(deadline)
            if self._answered == self._number:
                return answer

    def is_silent(self) -> bool:
        """Whether an answer is still to come, or a sign of life is late; without waiting for it."""
        try:
            self._catch_up()
        except TimeoutError:
            return self._number != self._sign or time.monotonic() - self._heard_s > SIGN_EVERY_S
        except OSError:
            return True
        return False

    def silent_s(self) -> float:
        """Seconds for which it was asked and said nothing. Asks for a sign of life when it is time, and waits for
        nothing."""
        try:
            self._catch_up()
            if time.monotonic() - self._heard_s >= SIGN_EVERY_S:
                self._put(ALIVE)
                self._sign = self._number
                self._send(0.0)
        except OSError:
            return time.monotonic() - self._heard_s
        return 0.0

    def _put(self, question: bytes) -> None:
        if self._answered == self._number:
            self._heard_s = time.monotonic()
        self._number += 1
        self._unsent += b"%d %s\n" % (self._number, question)

    def _catch_up(self) -> None:
        """Send and hear what can be without waiting. Raises OSError (TimeoutError) where that is not all."""
        self._send(0.0)
        while self._answered != self._number:
            self._hear(0.0)

    def line(self, deadline: float) -> bytes:
        """What the process says next; nothing if it died. Raises TimeoutError, and keeps what has arrived till then."""
        looked = 0
        while (end := self._unread.find(b"\n", looked)) < 0 and len(self._unread) < _MAX_WORK_BYTES:
            looked = len(self._unread)
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                part = self._connection.recv(_MAX_LINE_BYTES)
            except ConnectionResetError:
                return b""
            if not part:
                return b""
            self._unread += part
        size = end + 1 or len(self._unread)
        line = bytes(self._unread[:size])
        del self._unread[:size]
        return line

    def _hear(self, deadline: float) -> bytes:
        """The next answer, to whichever question."""
        line = self.line(deadline)
        number, _, answer = line.partition(b" ")
        if not number.isdigit():
            raise ConnectionError(f"unreadable answer {line[:80]!r}" if line else "the process died")
        self._answered, self._heard_s = int(number), time.monotonic()
        return answer

    def _send(self, deadline: float) -> None:
        """What is left of the question."""
        while self._unsent:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            self._unsent = self._unsent[self._connection.send(self._unsent) :]


class DrafterProcess:
    """One drafter process."""

    def __init__(self, spec: DrafterSpec) -> None:
        """Starts it and returns at once; `wait_ready` tells how it went."""
        self.spec = spec
        self.started: Started | None = None
        self.version = 0
        """Of the weights that it drafts with, as it said last."""
        self.awake = spec.engine is None
        """It was woken, and not asked to sleep since."""
        self.leaving = False
        """It is to be asked to sleep, when it has answered what it was asked before."""
        self.wake_s = FIRST_WAKE_S
        """What waking takes."""
        self._began_s = time.monotonic()
        self._process = Guarded(MODULE, environment=cpu.process_environment((spec.device,)), log_file=spec.log_file)
        self._talk = Talk(self._process.connection)
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
            line = self._talk.line(time.monotonic() + self.spec.start_timeout_s)
        except TimeoutError:
            self.kill()
            limit = f"{self.spec.start_timeout_s:g} s."
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
        """What it did since it was asked last; None if it does not say, or not in time.

        Args: whether it shall record spans from now on.
        """
        work = self._ask(TRACE if trace else WORK, Work, timeout_s)
        return work if isinstance(work, Work) else None

    def renew(self, weights: DraftWeights, *, timeout_s: float) -> str:
        """Bring it new weights; why it did not take them, or empty. It goes on drafting before and after."""
        renewed = self._ask(RENEW + msgspec.json.encode(weights), Renewed, timeout_s)
        if isinstance(renewed, str):
            return f"drafter {self.spec.index}: {renewed}"
        self.version = renewed.version
        return f"drafter {self.spec.index}: {renewed.problem}" if renewed.problem else ""

    def wants(self, version: int) -> bool:
        """Whether it could take weights of this version, and has older ones."""
        return self.alive and self.has_started() and not self._talk.is_silent() and self.version < version

    def can_wake(self) -> bool:
        """Whether it sleeps, and hears."""
        return not self.awake and self.alive and self.has_started() and not self._talk.is_silent()

    def wake(self) -> None:
        """Ask it to draft; nobody waits until it does."""
        self.awake, self.leaving = True, False
        self._ask(WAKE, Rested, 0.0)

    def sleep(self, *, timeout_s: float) -> bool:
        """Whether it says so by then, or is gone. With 0 it is asked, and sleeps later; or is `leaving`."""
        deadline = time.monotonic() + timeout_s
        self.awake, self.leaving = False, True
        while self.alive and self._talk.is_silent():  # it has not woken yet
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_EVERY_S)
        self.leaving = False
        rested = self._ask(SLEEP, Rested, deadline - time.monotonic())
        if not isinstance(rested, Rested):
            return not self.alive
        self.wake_s = rested.wake_s or self.wake_s
        return rested.asleep

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

    def has_started(self) -> bool:
        """Without waiting for it."""
        if self.started is None and select.select([self._process.connection], [], [], 0)[0]:
            with contextlib.suppress(EngineError):  # then it is gone, which its owner will see
                self.wait_ready()
        return self.started is not None

    def hangs(self, limit_s: float) -> bool:
        """Whether it has been silent for so long, though asked, or should have started long ago. Waits for nothing."""
        if self.has_started():
            return self._talk.silent_s() > limit_s
        return time.monotonic() - self._began_s > self.spec.start_timeout_s + limit_s

    def _ask(self, question: bytes, kind: type[_Answer], timeout_s: float) -> _Answer | str:
        """Its answer, or why there is none."""
        if not self.has_started():
            return "it has not started"
        try:
            return msgspec.json.decode(self._talk.ask(question, timeout_s), type=kind)
        except (OSError, msgspec.DecodeError) as error:
            return str(error)

    def _with_log(self, what: str) -> str:
        return f"drafter {self.spec.index} {what} The end of its log, {self.spec.log_file}:\n{self.log_tail()}"


def _core(device: int) -> int | None:
    """Without a GPU a drafter keeps to one core, if there is such a one."""
    return device if not cpu.has_gpu() and device in os.sched_getaffinity(0) else None
