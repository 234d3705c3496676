"""Scores of responses by the name of a verifier (docs/guide.md): any finite number; 1 is a solved problem.

exact, number and reasoning-gym compare the text behind the last '#'; without one, or where the problem's answer has
one, the whole response. What cannot be read scores 0.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import inspect
import json
import logging
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from pathlib import PurePath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from specactor.errors import DataError, did_you_mean
from specactor.types import Problem
from specactor.waits import ANSWER_S, LATE_S, RETRY_PAUSE_S

if TYPE_CHECKING:
    import aiohttp  # takes a quarter of a second, and few need it

Verifier = Callable[[str, Problem], float]

MATH_MEMORY_BYTES = 4 * 2**30  # address space of the child
NUMBER = re.compile(r"([+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?)(?:/([0-9]+))?")


def answer_of(response: str, problem: Problem) -> str:
    """Return the part of a response that is compared; see the module's head."""
    return response.strip() if "#" in problem.answer else response.rpartition("#")[2].strip()


@lru_cache(maxsize=256)
def get_verifier(name: str, timeout_s: float | None = None) -> Verifier:
    """Return the scoring function of that name, which raises DataError when the verifier fails. Raises DataError for an
    unknown one. `timeout_s` bounds asynchronous ones."""
    function = remote_verifier(name, timeout_s) if is_remote(name) else _function(name)
    if not callable(function):
        raise DataError(f"got {name!r}, which is a {type(function).__name__}, expected a function. Name another.")
    try:
        inspect.signature(function).bind("response", "problem")
    except TypeError as error:
        raise DataError(f"got {name!r}, expected a function (response, problem). It failed with: {error}.") from error
    except ValueError:  # of a function in C nobody can say
        pass
    if not is_async(name):
        return _checked(name, function)

    def ask(response: str, problem: Problem) -> float:
        loop = _loop()
        if asyncio._get_running_loop() is loop:
            raise RuntimeError("an asynchronous verifier asked this one through get_verifier, and its loop would wait")
        return asyncio.run_coroutine_threadsafe(_in_time(function(response, problem), timeout_s), loop).result()

    return _checked(name, ask)


def is_async(name: str) -> bool:
    return inspect.iscoroutinefunction(_function(name))


async def _in_time(score: Coroutine[object, object, float], timeout_s: float | None) -> float:
    try:
        async with asyncio.timeout(timeout_s):
            return await score
    except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop of the others, too
        raise RuntimeError(repr(error)) from error


def _loop() -> asyncio.AbstractEventLoop:
    """Return the one loop of this process's asynchronous verifiers: the client that a module keeps works in one."""
    with _LOOP_LOCK:
        return _begun_loop()


@lru_cache(maxsize=1)
def _begun_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # of a task that a verifier has begun
                loop.run_forever()

    threading.Thread(target=run, name="verifiers", daemon=True).start()
    return loop


_LOOP_LOCK = threading.Lock()


@lru_cache(maxsize=256)
def _function(name: str) -> object:
    if is_remote(name):
        return remote_verifier(name)
    return BUILT_IN[name] if name in BUILT_IN else find(name)


def is_remote(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def find(name: str) -> object:
    """Return what is at ``module:name``. Raises DataError when nothing is."""
    module, colon, attribute = name.partition(":")
    if not colon:
        hint = did_you_mean(name, BUILT_IN, "Name one of them, or write module:function.")
        raise DataError(f"got {name!r}, expected one of {', '.join(BUILT_IN)}, or module:function. {hint}")
    if module.endswith(".py") or "/" in module:
        own = f"{PurePath(module).stem}:{attribute}"
        raise DataError(f"got {name!r}, expected an import path. Write {own}, with its folder on PYTHONPATH.")
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # code of others, which may raise anything
        raise DataError(
            f"got {name!r}, expected the import path of a function. Put its folder on PYTHONPATH. "
            f"It failed with: {error}."
        ) from error
    return found


def unscorable(problem: Problem) -> str | None:
    """Return why no response could score 1, if that is known."""
    if problem.verifier == "number" and _number(problem.answer) is None:
        return f"answer: got {problem.answer!r}, expected a number. Use the verifier exact for other answers"
    if problem.verifier == "math-verify" and not _is_readable(problem.answer):
        return f"answer: got {problem.answer!r}, expected an expression that math-verify can read"
    if problem.verifier == "reasoning-gym":
        from specactor.data import reasoning  # takes two seconds

        return reasoning.unscorable(problem)
    return None


@lru_cache(maxsize=2**16)
def _is_readable(answer: str) -> bool:
    """Ask math-verify about each answer once, and not about integers, which most are: it takes milliseconds."""
    return bool(re.fullmatch("-?[0-9]{1,18}", answer.strip())) or MATH_ANSWERS.readable(answer)


def _checked(name: str, function: Verifier) -> Verifier:
    def verify(response: str, problem: Problem) -> float:
        who = f"verifier {name}: problem {problem.index} (answer {problem.answer[:80]!r})"
        try:
            score = function(response, problem)
        except BaseException as error:  # code of others, which may raise anything, and exit
            raise DataError(
                f"{who}: it raised {type(error).__name__}: {error!s:.300}, on the response {response[:200]!r}. "
                "Correct the verifier, or remove the problem."
            ) from error
        value = as_score(score)
        if not math.isfinite(value):
            raise DataError(
                f"{who}: it returned {score!r:.200}, which is of type {type(score).__name__}, expected a finite "
                "number. Correct the verifier."
            )
        return value

    return verify


def as_score(result: object) -> float:
    """Read Python's, NumPy's and torch's numbers; NaN for anything else."""
    try:
        value = result.item() if hasattr(result, "item") else result
        # float() alone would read the text "1", and drop the imaginary part of NumPy's complex numbers
        return float(value) if isinstance(value, Real | Decimal) else math.nan
    except (ValueError, RuntimeError, OverflowError):  # several values, or more than a float can hold
        return math.nan


def _exact(response: str, problem: Problem) -> float:
    return float(answer_of(response, problem) == problem.answer.strip())


def _same_number(response: str, problem: Problem) -> float:
    right = _number(problem.answer)
    if right is None:
        raise DataError(f"the problem's answer {problem.answer!r} is not a number")
    return float(_number(answer_of(response, problem)) == right)


def _number(text: str) -> Fraction | None:
    """Return the exact value: 0.50, 1/2 and 5e-1 are equal, 0.333 and 1/3 are not."""
    match = NUMBER.fullmatch(text.strip()) if len(text) <= 200 else None  # longer ones take long, and are none
    if match is None:
        return None
    try:
        return Fraction(match[1].replace(",", "")) / int(match[2] or "1")
    except (ValueError, ZeroDivisionError):
        return None


def _math(response: str, problem: Problem) -> float:
    return float(MATH_ANSWERS.equal(problem.answer, response))


def _reasoning(response: str, problem: Problem) -> float:
    from specactor.data import reasoning  # takes two seconds

    return reasoning.score(answer_of(response, problem), problem)


BUILT_IN: dict[str, Verifier] = {
    "exact": _exact,
    "number": _same_number,
    "math-verify": _math,
    "reasoning-gym": _reasoning,
}
# Bounded by themselves, however long a response is; all others are asked in processes that can be ended.
IN_PROCESS = ("exact", "number")


AWAY = (429, 502, 503, 504)  # busy, or what a proxy says of a server that is started again
MAX_BYTES = 1 << 20  # of an answer that are read


class _Answer(msgspec.Struct):
    score: float


def _question(response: str, problem: Problem) -> bytes:
    return msgspec.json.encode(
        {
            "response": response,
            "prompt": problem.prompt,
            "answer": problem.answer,
            "index": problem.index,
            "metadata": problem.metadata,
        }
    )


async def _score_of(answer: aiohttp.ClientResponse) -> float:
    """Return the score of an answer, which may come in pieces."""
    text = bytearray()
    async for part in answer.content.iter_any():
        text += part
        if len(text) > MAX_BYTES:
            raise DataError(f"got an answer of more than {MAX_BYTES} bytes")
    return msgspec.json.decode(text, type=_Answer).score


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def remote_verifier(url: str, timeout_s: float | None = None) -> Callable[[str, Problem], Awaitable[float]]:
    """Return the verifier at that address. Raises DataError for what is none."""
    if not _is_address(url):
        raise DataError(f"got {url!r}, expected the address of a verifier, as http://host:port/path. Correct it.")
    limit_s = 60.0 if timeout_s is None else timeout_s
    is_away = False

    async def pause(attempt: int, deadline: float, error: Exception) -> None:
        """Wait until the next attempt. Raises `error` where there is none."""
        nonlocal is_away
        pause_s = RETRY_PAUSE_S * 2 ** min(attempt - 1, 3)
        if time.monotonic() + pause_s >= deadline:
            raise error
        if not is_away:  # once, and not for each response that waits
            is_away = True
            print(f"verifier {url}: {error}. It is asked again for {limit_s:g} s.", file=sys.stderr, flush=True)
        await asyncio.sleep(pause_s)

    async def verify(response: str, problem: Problem) -> float:
        import aiohttp

        nonlocal is_away
        body = _question(response, problem)
        # The last error says more than the caller, whose time is over a little later.
        deadline, attempt, failed = time.monotonic() + 0.9 * limit_s, 0, 0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as client:  # the caller bounds it all
            while True:
                attempt += 1
                try:
                    async with client.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                        answer.raise_for_status()
                        is_away = False
                        return await _score_of(answer)
                except (
                    aiohttp.ClientConnectionError,
                    aiohttp.ClientPayloadError,
                    aiohttp.ClientResponseError,
                ) as error:
                    status = error.status if isinstance(error, aiohttp.ClientResponseError) else None
                    if status not in AWAY and not isinstance(error, aiohttp.ClientConnectorError):
                        failed += 1  # the response itself may end the server; one that is away is not counted
                        if failed == 4 or (status is not None and status < 500):
                            raise
                    await pause(attempt, deadline, error)

    return verify


class MathAnswers:
    """Asks math-verify, in bounded time, from any thread. Its own bound, a signal, works in main threads alone and
    cannot stop a long C call: a child runs it."""

    def __init__(self, question_s: int = 5) -> None:
        """`question_s`: of one comparison; beyond it the answer does not count as equal."""
        self._question_s = question_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process that started the child; after a fork the other process starts its own

    def readable(self, answer: str) -> bool:
        return self._ask({"answer": answer})

    def equal(self, answer: str, response: str) -> bool:
        """Return whether the last expression of `response` equals `answer`, False when out of time."""
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
                line = _read_line(child, self._question_s + 5.0)
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
        command = [sys.executable, "-m", "specactor.data.verifiers", str(self._question_s)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._owner = os.getpid()
        if not _read_line(self._child, ANSWER_S):  # it takes about a second, all of it imports
            status = self._end_child()
            raise DataError(
                f"math-verify: its process did not start within {ANSWER_S:g} s (status {status}). Install "
                "the package math-verify, or use the verifier exact or number."
            )
        return self._child

    def _end_child(self) -> int | None:
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
        return child.wait(timeout=LATE_S)


def _read_line(child: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """Return nothing when the child ended, or was silent for too long."""
    assert child.stdout is not None
    deadline = time.monotonic() + timeout_s
    line = b""
    waiting = select.poll()  # and not `select`, which ends at file 1023
    waiting.register(child.stdout, select.POLLIN)
    while not line.endswith(b"\n"):
        ready = waiting.poll(1000 * max(0.0, deadline - time.monotonic()))
        part = os.read(child.stdout.fileno(), 4096) if ready else b""
        if not part:
            return b""
        line += part
    return line[:-1]


def serve_math(question_s: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, in the midst of C code too
    resource.setrlimit(resource.RLIMIT_AS, (MATH_MEMORY_BYTES, MATH_MEMORY_BYTES))
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns about every unreadable response
    print("ready", flush=True)
    for line in sys.stdin:
        question: dict[str, str] = json.loads(line)  # half surrogate pairs included, which msgspec refuses
        signal.alarm(question_s)
        answer = parse(_as_math(question["answer"]), fallback_mode="no_fallback", parsing_timeout=None)
        good = bool(answer)
        if good and "response" in question:
            response = parse(question["response"], parsing_timeout=None)
            good = bool(verify(answer, response, timeout_seconds=None))
        signal.alarm(0)
        print(json.dumps(good), flush=True)


def _as_math(answer: str) -> str:
    """Put a bare answer into the mathematical environment that math-verify wants."""
    return answer if "$" in answer or "\\boxed" in answer or "\\(" in answer else f"\\boxed{{{answer}}}"


MATH_ANSWERS = MathAnswers()  # the child is started by the first question of a process and shared by its threads
atexit.register(MATH_ANSWERS.close)

if __name__ == "__main__":
    serve_math(int(sys.argv[1]))
