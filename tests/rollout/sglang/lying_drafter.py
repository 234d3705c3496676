"""A peer that speaks the draft protocol by hand, on a raw socket, and lies in every way that it can."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator
from itertools import count
from random import Random

import msgspec
import zmq

from specactor.rollout.decoupled import protocol
from specactor.rollout.decoupled.protocol import Commits, Open, Pulse, Resend, Tail, TailColumns, ToEngine

_HEADER = struct.Struct("<4sB3xQQQ")
_LOOK_MS = 1
_SESSION = 1 << 40


def tail(request: int, base: int, *lists: list[int]) -> TailColumns:
    """Args: lists: of tokens; of several, each is a tail of the same request."""
    return protocol.columns([Tail(request, base, protocol.pack(tokens)) for tokens in lists])


class _Heard:
    """What the engine said of one request."""

    def __init__(self, record: Open) -> None:
        self.number = record.request
        self.length = len(record.output_ids)
        self.last = [*record.prompt_ids, *record.output_ids][-3:]


Lie = Callable[[_Heard, Random], list[ToEngine]]


def _tokens(rng: Random, count: int = 8) -> list[int]:
    return [rng.randrange(96) for _ in range(count)]


def _neighbours(one: _Heard, rng: Random) -> list[ToEngine]:
    """Right for another request."""
    return [tail(max(1, one.number + rng.choice((-1, 1))), one.length, _tokens(rng))]


def _columns(one: _Heard, rng: Random) -> list[ToEngine]:
    """One request twice, the second time with as many tokens as fit, some of which are none."""
    short, long = _tokens(rng, 2), [rng.randrange(-5, 200) for _ in range(protocol.MAX_TAIL_TOKENS)]
    return [tail(one.number, one.length, short, long), tail(one.number, one.length, short)]


LIES: dict[str, Lie] = {
    "any tokens": lambda one, rng: [tail(one.number, one.length, _tokens(rng))],
    "no such tokens": lambda one, rng: [tail(one.number, one.length, [rng.randrange(-(1 << 31), 1 << 31), 5])],
    "the past": lambda one, rng: [tail(one.number, max(0, one.length - 2), [*one.last[-2:], *_tokens(rng)])],
    "the future": lambda one, rng: [tail(one.number, one.length + rng.choice((1, 3, 10**6)), _tokens(rng))],
    "no such requests": lambda one, rng: [
        tail(rng.choice((0, protocol.LARGEST, one.number + 10**6)), one.length, _tokens(rng))
    ],
    "the neighbour's": _neighbours,
    "columns": _columns,
    "resend": lambda one, rng: [Resend(requests=[one.number, 0, protocol.LARGEST])],
    "loads": lambda one, rng: [
        Pulse(version=protocol.LARGEST, requests=protocol.LARGEST, drafted=0, wasted=protocol.LARGEST)
    ],
}
"""Name -> records, one frame for each request that the engine has told of."""

RUBBISH: list[Callable[[bytes], bytes]] = [
    lambda frame: b"",
    lambda frame: frame[:-3],
    lambda frame: os.urandom(300),
    lambda frame: frame[:4] + b"\xff" + frame[5:],
    lambda frame: frame + b"\x00" * 50,
    lambda frame: frame[:32] + msgspec.msgpack.encode([[18, 1, -1, b"x", -5]]),
    lambda frame: frame[:32] + b"\x91" * 5000,
    lambda frame: frame[:32] + b"\xdd\xff\xff\xff\xff",
]


class LyingDrafter:
    """A thread that answers every frame of an engine with lies about every request, and a pulse, so that it lives."""

    def __init__(self, lie: str, *, seed: int = 5) -> None:
        self.sent = 0
        self._lie = lie
        self._rng = Random(seed)
        self._heard: dict[int, _Heard] = {}
        self._numbers = count(1)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lying drafter", daemon=True)
        self._thread.start()

    def __enter__(self) -> LyingDrafter:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.is_set():
            if self._socket.poll(_LOOK_MS):
                name, frame = self._socket.recv_multipart()
                header, records = protocol.decode_to_drafter(frame)
                for record in records:
                    self._hear(record)
                for answer in self._answers(header.sender):
                    self._socket.send_multipart([name, answer])
                    self.sent += 1
        self._socket.close(linger=0)
        self._context.term()

    def _hear(self, record: protocol.ToDrafter) -> None:
        if isinstance(record, Open):
            self._heard[record.request] = _Heard(record)
        elif isinstance(record, Commits):
            for request, position, tokens in record:
                if (one := self._heard.get(request)) is not None:
                    one.length = position + len(tokens)
                    one.last = [*one.last, *tokens][-3:]

    def _answers(self, engine: int) -> Iterator[bytes]:
        pulse: list[ToEngine] = [Pulse(version=1, requests=len(self._heard), drafted=1, wasted=1)]
        yield self._frame(engine, pulse)
        for one in list(self._heard.values())[-32:]:
            if self._lie == "rubbish":
                yield self._rng.choice(RUBBISH)(self._frame(engine, [tail(one.number, one.length, [5])]))
            elif self._lie == "frames of others":
                records: list[ToEngine] = [tail(one.number, one.length, _tokens(self._rng))]
                yield self._frame(
                    engine + self._rng.choice((-1, 0, 1)), records, sender=self._rng.randrange(1, 1 << 50)
                )
            else:
                yield self._frame(engine, LIES[self._lie](one, self._rng))

    def _frame(self, engine: int, records: list[ToEngine], *, sender: int = _SESSION) -> bytes:
        start = _HEADER.pack(protocol.MAGIC, protocol.VERSION, sender, engine, next(self._numbers))
        return start + msgspec.msgpack.encode(records)
