"""Mathematical equality by the math-verify library, in bounded time, from any thread of any process.

math-verify bounds its time by a signal, which works in a main thread only and cannot stop a long C call. So it runs
in a child process, whose alarm ends it when one question takes too long. The child also ends when its parent is gone.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import msgspec

from specactor.errors import DataError

START_TIMEOUT_S = 60.0  # longest wait for a child; it takes about a second, all of it imports
QUESTION_TIMEOUT_S = 5  # of one comparison; beyond it the answer does not count as equal
MEMORY_BYTES = 4 * 2**30  # address space of the child


class MathAnswers:
    """Asks the child, and replaces it when it had to be ended."""

    def __init__(self, question_timeout_s: int = QUESTION_TIMEOUT_S) -> None:
        self._question_timeout_s = question_timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process that started the child; after a fork the other process starts its own

    def readable(self, answer: str) -> bool:
        """Return whether math-verify finds an expression in a problem's answer."""
        return self._ask({"answer": answer})

    def equal(self, answer: str, response: str) -> bool:
        """Return whether the last expression of `response` equals `answer`; False when finding out takes too long."""
        return self._ask({"answer": answer, "response": response})

    def close(self) -> None:
        with self._lock:
            self._end_child()

    def _ask(self, question: dict[str, str]) -> bool:
        with self._lock:
            child = self._running_child()
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps(question).encode() + b"\n")
                child.stdin.flush()
                line = _read_line(child, self._question_timeout_s + 5.0)
            except BrokenPipeError:
                line = b""
            if line:
                return msgspec.json.decode(line, type=bool)
            status = self._end_child()
            if status in (-signal.SIGALRM, -signal.SIGKILL):
                return False
            raise DataError(
                f"math-verify: its process ended with status {status} at {json.dumps(question)[:300]}. Its messages "
                "are above; correct the answer, or use the verifier exact or number."
            )

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._owner == os.getpid():
            return self._child
        command = [sys.executable, "-m", "specactor.data.math_answers", str(self._question_timeout_s)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._owner = os.getpid()
        if not _read_line(self._child, START_TIMEOUT_S):
            status = self._end_child()
            raise DataError(
                f"math-verify: its process did not start within {START_TIMEOUT_S:.0f} s (status {status}). Install "
                "the package math-verify, or use the verifier exact or number."
            )
        return self._child

    def _end_child(self) -> int | None:
        """End the child, and return its exit status."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return None
        try:
            child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            child.kill()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what was not sent yet has no reader any more
                pipe.close()
        return child.wait(timeout=10.0)


def _read_line(child: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """One line without its end; empty when the child ended or said nothing in time."""
    assert child.stdout is not None
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(child.stdout.fileno(), 4096) if ready else b""
        if not part:
            return b""
        line += part
    return line[:-1]


def serve(question_timeout_s: int) -> None:
    """Answer the questions on standard input until it ends; this is the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, in the midst of C code too
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns about every unreadable response
    print("ready", flush=True)
    for line in sys.stdin:
        question: dict[str, str] = json.loads(line)  # half surrogate pairs included, which msgspec refuses
        signal.alarm(question_timeout_s)
        answer = parse(_as_math(question["answer"]), fallback_mode="no_fallback", parsing_timeout=None)
        good = bool(answer)
        if good and "response" in question:
            response = parse(question["response"], parsing_timeout=None)
            good = bool(verify(answer, response, timeout_seconds=None))
        signal.alarm(0)
        print(json.dumps(good), flush=True)


def _as_math(answer: str) -> str:
    """math-verify reads LaTeX only inside a mathematical environment; a bare answer is put into one."""
    return answer if "$" in answer or "\\boxed" in answer or "\\(" in answer else f"\\boxed{{{answer}}}"


shared = MathAnswers()  # the child is started by the first question of a process and shared by its threads
atexit.register(shared.close)

if __name__ == "__main__":
    serve(int(sys.argv[1]))
