"""Scores responses during the rollout, in processes that can be ended.

Invariants: every response gets one verdict in bounded time; a verifier that raises, hangs, exits or returns no finite
number fails its own response alone; `close` leaves no process.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from specactor.cpu import sglang as cpu
from specactor.data.verifiers import IN_PROCESS, get_verifier, is_async
from specactor.errors import DataError, EngineError
from specactor.rollout import frames
from specactor.rollout.child_process import Call, ChildProcess
from specactor.types import Problem, Trajectory
from specactor.waits import ANSWER_S, LATE_S, MOMENT_S

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROW_S = 2.0  # a response's wait until another process is started: most verifiers need one
MAX_HUNG = 8  # in a row, until a verifier is not asked again in this rollout
LOG_BYTES = 2**28  # of what verifiers print, which is emptied beyond
TOGETHER = 64  # asynchronous verifiers that are awaited at a time


class Ready(msgspec.Struct, tag=True, frozen=True):
    pass


class Ask(msgspec.Struct, frozen=True):
    jobs: list[tuple[str, Problem]]  # responses
    timeout_s: float  # of each; one that is not asynchronous is ended with the process


class Scored(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    job: int  # its place in the question
    score: float = 0.0
    failure: str = ""  # begins with its kind, which many responses share


FromGrader = Ready | Scored | frames.Failed
ANSWERS: msgspec.msgpack.Decoder[FromGrader] = msgspec.msgpack.Decoder(FromGrader)


@dataclass(kw_only=True)
class _Asked:
    response: str
    problem: Problem
    is_async: bool = False
    verdict: Future[Scored] = field(default_factory=Future)
    since_s: float = field(default_factory=time.monotonic)
    alone: bool = False  # others were asked with it when the process ended

    def fail(self, kind: str, why: str) -> None:
        self.verdict.set_result(Scored(job=0, failure=f"{kind}: verifier {self.problem.verifier}: {why}"))


class Grading(contextlib.AbstractContextManager["Grading"]):
    """A rank's verifier processes, started when needed."""

    def __init__(self, *, timeout_s: float, log_file: str = os.devnull, most: int = 8) -> None:
        """Start nothing; a verifier gets `timeout_s` per response. So many verifiers as there are at `most` processes
        may hang at once before others wait."""
        self._timeout_s, self._log_file, self._most = timeout_s, log_file, most
        self._changed = threading.Condition()
        self._waiting: deque[_Asked] = deque()
        self._idle, self._closed, self._has_answered = 0, False, False
        self._grow_from_s = -math.inf  # no process is started before: the last may be importing
        self._verdicts: dict[str, Future[Scored]] = {}  # of this rollout, by request
        self._hung: Counter[str] = Counter()
        self._threads: list[threading.Thread] = []
        self._children: list[ChildProcess[FromGrader]] = []

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, response: str, problem: Problem) -> Future[Scored]:
        """Have it scored; the verdict comes from another thread."""
        asked = _Asked(response=response, problem=problem)
        if problem.verifier in IN_PROCESS:
            asked.verdict.set_result(Scored(job=0, score=get_verifier(problem.verifier)(response, problem)))
            return asked.verdict
        try:
            asked.is_async = is_async(problem.verifier)
            asked.problem = replace(problem, metadata=sendable(problem.metadata))
            msgspec.msgpack.encode((response, asked.problem))
        except Exception as error:  # a module that no longer imports; metadata of a function's rows
            asked.fail(type(error).__name__, f"problem {problem.index}: it cannot be asked: {error!s:.200}")
            return asked.verdict
        with self._changed:
            self._waiting.append(asked)
            self._grow()
            self._changed.notify()
        return asked.verdict

    def begin(self) -> None:
        """Begin a rollout: verifiers that hung are asked again."""
        with contextlib.suppress(OSError):
            if os.path.getsize(self._log_file) > LOG_BYTES:
                os.truncate(self._log_file, 0)  # all append to it
        self._hung.clear()
        self._verdicts.clear()

    def add(self, response: Trajectory, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> None:
        """Have a response scored; conversations come with their reward."""
        if response.reward is None and not response.failure and response.finish_reason != "abort":
            text = tokenizer.decode(list(response.token_ids), skip_special_tokens=True)
            self._verdicts[response.request_id] = self.submit(text, problem)

    def when_scored(self, response: Trajectory, then: Callable[[], None]) -> None:
        """Call `then`, maybe in another thread, once `scored` would not wait."""
        if response.request_id in self._verdicts:
            self._verdicts[response.request_id].add_done_callback(lambda _: then())
        else:
            then()

    def scored(self, response: Trajectory) -> Trajectory:
        """Wait for the response's verdict, and return both."""
        if response.request_id not in self._verdicts:
            return response
        found = self._verdicts[response.request_id].result()
        return replace(response, reward=found.score, failure=found.failure)

    def close(self) -> None:
        """End all processes; what waits has failed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            children, waiting = list(self._children), list(self._waiting)
            self._waiting.clear()
        for asked in waiting:
            asked.fail("closed", "the run has ended")
        for child in children:
            child.kill()
        for thread in self._threads:
            thread.join()

    def _grow(self) -> None:
        """Start a process if responses wait. The lock is held."""
        now, begun = time.monotonic(), len(self._threads)
        if not self._waiting or self._idle or begun >= self._most or now < self._grow_from_s:
            return
        if not begun or now - min(asked.since_s for asked in self._waiting) >= GROW_S:
            self._grow_from_s = now + (GROW_S if begun else LATE_S)  # the first one's answer waits for imports
            thread = threading.Thread(target=self._work, name=f"grading-{begun}", daemon=True)
            # Where the system gives no further thread, those there are go on.
            with contextlib.suppress(RuntimeError) if begun else contextlib.nullcontext():
                thread.start()
                self._threads.append(thread)

    def _work(self) -> None:
        child: ChildProcess[FromGrader] | None = None
        while asked := self._next():
            left = dict(enumerate(asked))
            kind = why = ""
            try:
                child = child or self._started()
                with child.call(Ask([(one.response, one.problem) for one in asked], self._timeout_s)) as call:
                    deadline = time.monotonic() + self._timeout_s + MOMENT_S  # then its process is ended
                    while left:
                        answer = self._answer(call, deadline)
                        self._hung[asked[answer.job].problem.verifier] = 0
                        left.pop(answer.job).verdict.set_result(answer)
                        self._answered()
                continue
            except TimeoutError:
                kind, why = "no answer in time", f"no answer within {self._timeout_s:g} s"
            except Exception as error:  # it died, could not be started, or answers what nobody asked
                kind, why = "its process ended", f"its process ended ({error!s:.200})".replace("\n", " ")
            self._end(child)
            child = None
            self._settle(list(left.values()), len(asked) == 1, kind, why)

    def _answered(self) -> None:
        with self._changed:
            if not self._has_answered:
                self._has_answered, self._grow_from_s = True, time.monotonic() + GROW_S

    def _settle(self, left: list[_Asked], is_one: bool, kind: str, why: str) -> None:
        """Fail the one that ended the process; of several each is asked again alone."""
        with self._changed:
            if not is_one and not self._closed:
                self._waiting.extend(replace(one, alone=True) for one in left)
                self._changed.notify_all()
                return
        for one in left:
            self._hung[one.problem.verifier] += kind == "no answer in time"
            one.fail(kind, f"problem {one.problem.index} (answer {one.problem.answer[:80]!r}): {why}")

    def _next(self) -> list[_Asked]:
        with self._changed:
            while not self._closed:
                self._idle += 1
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._idle -= 1
                found: list[_Asked] = []
                while self._waiting and len(found) < TOGETHER:
                    one = self._waiting[0]
                    if self._hung[one.problem.verifier] >= MAX_HUNG:
                        self._waiting.popleft().fail("no answer in time", f"it hung {MAX_HUNG} times in a row")
                    elif not found or (one.is_async and not one.alone and found[0].is_async):
                        found.append(self._waiting.popleft())
                        if one.alone or not one.is_async:
                            break
                    else:
                        break
                if found:
                    self._grow()
                    return found
            return []

    def _answer(self, call: Call[FromGrader], deadline: float) -> Scored:
        """Return the next verdict. Raises TimeoutError and EngineError."""
        while True:
            try:
                answer = call.next(min(GROW_S / 4, max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
                with self._changed:
                    self._grow()
                continue
            if isinstance(answer, Scored) and math.isfinite(answer.score):
                return answer
            raise EngineError(f"it answered {answer!r:.200}")

    def _started(self) -> ChildProcess[FromGrader]:
        with self._changed:
            if self._closed:
                raise EngineError("the run has ended")
            child: ChildProcess[FromGrader] = ChildProcess(
                "specactor.rollout.grading:serve",
                [str(folder) for folder in sys.path],
                name="verifiers",
                answers=ANSWERS,
                environment=cpu.process_environment(()),
                log_file=self._log_file,
            )
            self._children.append(child)
        child.wait_ready(ANSWER_S)
        return child

    def _end(self, child: ChildProcess[FromGrader] | None) -> None:
        if child is not None:
            child.kill()
            with contextlib.suppress(ValueError):
                self._children.remove(child)


def sendable(value: Any) -> Any:
    """Convert to types that a frame can hold; the encoder refuses the rest."""
    if isinstance(value, tuple):
        # MessagePack has no tuples, and a scorer may compare with one.
        return msgspec.msgpack.Ext(1, msgspec.msgpack.encode([sendable(item) for item in value]))
    if isinstance(value, list):
        return [sendable(item) for item in value]
    if isinstance(value, Mapping):
        return {key: sendable(item) for key, item in value.items()}
    if isinstance(value, str):  # also NumPy's
        return str(value)
    return value.item() if hasattr(value, "item") else value


def _received(code: int, data: memoryview) -> tuple[Any, ...]:
    return tuple(msgspec.msgpack.decode(data, ext_hook=_received))


MODULE_PATH: msgspec.msgpack.Decoder[list[str]] = msgspec.msgpack.Decoder(list[str])  # of the first message
QUESTIONS: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask, ext_hook=_received)


def serve(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # where memory ends, a verifier that leaks goes first, not a rank or an engine
        Path("/proc/self/oom_score_adj").write_text("1000")
    lock = threading.Lock()

    def tell(call: int, answer: msgspec.Struct) -> None:
        with lock:
            connection.sendall(frames.pack(call, answer))

    def score(call: int, number: int, response: str, problem: Problem, timeout_s: float) -> None:
        tell(call, _scored(number, response, problem, timeout_s))

    if (first := frames.read(connection, MODULE_PATH)) is None:
        return
    call, _, sys.path[:] = first  # as in the owner
    tell(call, Ready())
    threads = ThreadPoolExecutor(max_workers=TOGETHER)
    while (frame := frames.read(connection, QUESTIONS)) is not None:
        call, _, question = frame
        if len(question.jobs) == 1:  # in the main thread, where a verifier may use signals
            score(call, 0, *question.jobs[0], question.timeout_s)
        else:
            for number, job in enumerate(question.jobs):
                threads.submit(score, call, number, *job, question.timeout_s)


def _scored(number: int, response: str, problem: Problem, timeout_s: float) -> Scored:
    try:
        verify = get_verifier(problem.verifier, timeout_s)
        return Scored(job=number, score=verify(response, problem))
    except DataError as error:
        kind = type(error.__cause__).__name__ if error.__cause__ else "no finite number"
        return Scored(job=number, failure=f"{kind}: {error}".encode(errors="replace").decode())
