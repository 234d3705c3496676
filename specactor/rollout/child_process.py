"""A child process (an engine, a drafter or verifiers) as its owner sees it.

Invariants: sending never waits, other waits are bounded; an answer reaches its own call alone; a child that sends an
invalid frame is dead; `kill` leaves nothing of it; it ends with its owner.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from specactor.errors import EngineError
from specactor.rollout import frames, process_guard, warm_starter
from specactor.rollout.frames import Failed, ProtocolError
from specactor.waits import LATE_S

RESTARTS_WITHIN = 100  # steps, or rollouts, in which its owner counts deaths: those of long ago say nothing of it
_LOG_TAIL_LINES, _LOG_TAIL_BYTES = 20, 2**16
_MODULE = "specactor.rollout.process_guard"
Answer = TypeVar("Answer")


class ChildDied(EngineError):  # noqa: N818  (an event, like StopIteration)
    pass


class StartRefusedError(EngineError):
    """The child itself said why it does not start; trying again gives the same."""


class Call(Generic[Answer]):
    """One question and its answers; those after the context are dropped."""

    def __init__(self, child: ChildProcess[Answer], number: int) -> None:
        self._child, self.number = child, number
        self.inbox: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()

    def __enter__(self) -> Call[Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.forget(self)

    def next(self, timeout_s: float) -> Answer:
        """Return the next answer. Raises TimeoutError, and ChildDied."""
        try:
            answer = self.inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        if answer is None:
            self._child.reap()
            raise ChildDied(self._child.with_log("died."))
        return answer


class ChildProcess(Generic[Answer]):
    def __init__(
        self,
        run: str,
        start: object,
        *,
        name: str,
        answers: msgspec.msgpack.Decoder[Answer],
        environment: Mapping[str, str],
        log_file: str,
    ) -> None:
        """Start it, or have the warm starter fork it, without waiting. `run` is ``package.module:function``, which gets
        the child's end of the socket, and `start` the first message, which says what to start. `answers` decodes all
        answers, `Failed` among them."""
        self.name, self.log_file = name, log_file
        self.moved_s = 0.0  # when it last gave an answer that was not the last of its call
        self.answer_to_start: Answer | None = None  # once it is there; `wait_ready` returns it
        self._answers = answers
        self._lock = threading.Lock()
        self._calls: dict[int, Call[Answer]] = {}
        self._unanswered: dict[int, float] = {}  # number of a call -> when it was asked
        self._heard_s = time.monotonic()
        self._next_number = 0
        self._dead = threading.Event()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        self._connection, theirs = socket.socketpair()
        with theirs, open(log_file, "ab") as log:
            files = (theirs.fileno(), log.fileno())
            self._process = warm_starter.fork(_MODULE, (run,), files, environment) or subprocess.Popen(
                [sys.executable, "-m", _MODULE, run, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._start = self.call(start)
        self._threads = [threading.Thread(target=of, name=name, daemon=True) for of in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()

    def wait_ready(self, timeout_s: float) -> Answer:
        """Return the answer to `start`. Raises EngineError, after `kill`; StartRefusedError for what the child says."""
        kind = EngineError
        try:
            answer = self._start.next(timeout_s)
        except TimeoutError:
            reason = f"did not start within {timeout_s:g} s."
        except ChildDied:
            reason = "did not start: the process died."
        else:
            if not isinstance(answer, Failed):
                self.forget(self._start)
                return answer
            kind, reason = StartRefusedError, f"did not start: {answer.message}."
        self.kill()
        raise kind(self.with_log(reason))

    def call(self, message: object) -> Call[Answer]:
        """Ask without waiting; a dead child has answered that it died."""
        with self._lock:
            number = self._next_number
            data = frames.pack(number, message)
            self._next_number += 1
            call = self._calls[number] = Call(self, number)
            self._unanswered[number] = time.monotonic()
        self._outbox.put(data)
        if not self.alive:
            call.inbox.put(None)
        return call

    def ask(self, message: object, timeout_s: float) -> Answer:
        """Ask, and return the one answer. Raises TimeoutError, and ChildDied."""
        with self.call(message) as call:
            return call.next(timeout_s)

    def forget(self, call: Call[Answer]) -> None:
        with self._lock:
            self._calls.pop(call.number, None)

    def unanswered(self) -> set[int]:
        """Return the numbers of calls without their last answer."""
        with self._lock:
            return set(self._unanswered)

    def heard_s(self) -> float:
        return time.monotonic() - self._heard_s

    def silent_s(self) -> float:
        """Return the seconds of silence since the oldest open question, 0 without one."""
        with self._lock:
            asked_s = min(self._unanswered.values(), default=None)
        return 0.0 if asked_s is None else min(self.heard_s(), time.monotonic() - asked_s)

    def reap(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LATE_S)

    def stop(self) -> None:
        """End it orderly, once it has started, or else `kill` it."""
        if self.alive and self.answer_to_start is not None:
            self._outbox.put(None)  # the end of the stream is its sign to end
            self.reap()
        self.kill()

    def kill(self) -> None:
        """End all of it at once; may be called again."""
        for end in (signal.SIGTERM, signal.SIGKILL):  # the guard ends its tree on SIGTERM
            if self._process.poll() is None:
                self._process.send_signal(end)
                self.reap()
        self._mark_dead()
        with contextlib.suppress(OSError):  # it was closed before
            self._connection.shutdown(socket.SHUT_RDWR)  # which wakes the threads
        for thread in self._threads:
            thread.join(LATE_S)
        self._connection.close()
        process_guard.sweep(self.pid)

    def with_log(self, what: str) -> str:
        return f"{self.name} {what} The end of its log, {self.log_file}:\n{self.log_tail()}"

    def log_tail(self) -> str:
        try:
            with open(self.log_file, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
                lines = file.read(_LOG_TAIL_BYTES).decode(errors="replace").splitlines()
        except OSError as error:  # a shared disk's trouble is not the child's
            lines = [f"(no log: {error.strerror})"]
        return "\n".join(f"  | {line}" for line in lines[-_LOG_TAIL_LINES:])

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # it is gone, as the other thread sees
            while (data := self._outbox.get()) is not None:
                self._connection.sendall(data)
            self._connection.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        with contextlib.suppress(ProtocolError, OSError):  # the two ends are out of step, or the socket was closed
            while (frame := frames.read(self._connection, self._answers)) is not None:
                number, last, answer = frame
                with self._lock:
                    self._heard_s = time.monotonic()
                    if last:
                        self._unanswered.pop(number, None)
                    else:
                        self.moved_s = self._heard_s
                    call = self._calls.get(number)
                if call is self._start:
                    self.answer_to_start = answer
                if call is not None:
                    call.inbox.put(answer)
        self._mark_dead()

    def _mark_dead(self) -> None:
        self._dead.set()
        self._outbox.put(None)
        with self._lock:
            for call in self._calls.values():
                call.inbox.put(None)
