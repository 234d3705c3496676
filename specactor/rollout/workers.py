"""The process in which verifiers run: code of others, which may be slow, endless, or end its process.

Invariants: one question has one answer per response, as each is there; asynchronous verifiers of a question wait
together; whatever a verifier raises is an answer. How long one may take is the owner's to bound, who ends the process.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from specactor.data.verifiers import get_verifier
from specactor.errors import DataError
from specactor.rollout import frames
from specactor.types import Problem

TOGETHER = 64
"""Asynchronous verifiers that are awaited at a time."""
_TUPLE = 1
"""MessagePack has none, and a scorer may compare with one."""


class Start(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    path: list[str]
    """Where Python finds modules: as in the owner."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    pass


class Job(msgspec.Struct, frozen=True):
    response: str
    problem: Problem


class Ask(msgspec.Struct, tag=True, frozen=True):
    jobs: list[Job]
    timeout_s: float
    """Of each; one that is not asynchronous is ended with the process."""


class Scored(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    job: int
    """Its place in the question."""
    score: float = 0.0
    failure: str = ""
    """Begins with its kind, which is the same for many responses."""


Answer = Ready | Scored | frames.Failed
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def sendable(value: Any) -> Any:
    """Return the value in types that a frame can hold; what has none is left for the encoder to refuse."""
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([sendable(item) for item in value]))
    if isinstance(value, list):
        return [sendable(item) for item in value]
    if isinstance(value, Mapping):
        return {key: sendable(item) for key, item in value.items()}
    if isinstance(value, str):  # also NumPy's
        return str(value)
    return value.item() if hasattr(value, "item") else value


def _received(code: int, data: memoryview) -> tuple[Any, ...]:
    return tuple(msgspec.msgpack.decode(data, ext_hook=_received))


QUESTIONS: msgspec.msgpack.Decoder[Start | Ask] = msgspec.msgpack.Decoder(Start | Ask, ext_hook=_received)


def serve(connection: socket.socket) -> None:
    """Answer until the owner has no more questions; this is the child."""
    lock = threading.Lock()

    def tell(call: int, answer: msgspec.Struct) -> None:
        with lock:
            connection.sendall(frames.pack(call, answer))

    threads = ThreadPoolExecutor(max_workers=TOGETHER)
    while (frame := frames.read(connection, QUESTIONS)) is not None:
        header, question = frame
        if isinstance(question, Start):
            sys.path[:] = question.path
            tell(header.call, Ready())
        elif len(question.jobs) == 1:  # in the main thread, where a verifier may use signals
            tell(header.call, _scored(0, question.jobs[0], question.timeout_s))
        else:
            for number, job in enumerate(question.jobs):
                threads.submit(_answer, partial(tell, header.call), number, job, question.timeout_s)


def _answer(tell: Callable[[Scored], None], number: int, job: Job, timeout_s: float) -> None:
    tell(_scored(number, job, timeout_s))


def _scored(number: int, job: Job, timeout_s: float) -> Scored:
    try:
        verify = get_verifier(job.problem.verifier, timeout_s)
        return Scored(job=number, score=verify(job.response, job.problem))
    except DataError as error:
        kind = type(error.__cause__).__name__ if error.__cause__ else "no finite number"
        return Scored(job=number, failure=f"{kind}: {error}".encode(errors="replace").decode())
