"""A network between engines and one drafter that delays, loses, repeats and reorders frames, both ways."""

from __future__ import annotations

import heapq
import threading
import time
from dataclasses import dataclass
from itertools import count
from random import Random

import zmq

_LOOK_MS = 1


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Of every frame, by chance."""

    loss: float = 0.0
    repeat: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    """Between these: frames overtake each other."""


class Network:
    """A thread; engines connect to `endpoint`, and what they say comes to the drafter's."""

    def __init__(self, drafter: str, faults: Faults, *, seed: int = 3) -> None:
        self.passed = 0
        self.lost = 0
        self.repeated = 0
        self.overtaken = 0
        self._faults = faults
        self._rng = Random(seed)
        self._drafter = drafter
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind("tcp://127.0.0.1:*")
        self.endpoint: str = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._flying: list[tuple[float, int, bool, bytes, bytes]] = []
        self._numbers = count()
        self._newest = -1
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bad network", daemon=True)
        self._thread.start()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._ending.is_set():
            ready = dict(poller.poll(_LOOK_MS))
            if self._front in ready:
                name, frame = self._front.recv_multipart()
                if name not in self._backs:
                    poller.register(self._back(name), zmq.POLLIN)
                self._take(True, name, frame)
            for name, back in self._backs.items():
                if back in ready:
                    self._take(False, name, back.recv())
            self._deliver(time.monotonic())
        for socket in (self._front, *self._backs.values()):
            socket.close(linger=0)
        self._context.term()

    def _back(self, name: bytes) -> zmq.Socket[bytes]:
        back = self._backs[name] = self._context.socket(zmq.DEALER)
        back.setsockopt(zmq.IDENTITY, name)
        back.connect(self._drafter)
        return back

    def _take(self, up: bool, name: bytes, frame: bytes) -> None:
        if self._rng.random() < self._faults.loss:
            self.lost += 1
            return
        copies = 2 if self._rng.random() < self._faults.repeat else 1
        self.repeated += copies - 1
        for _ in range(copies):
            due_s = time.monotonic() + self._rng.uniform(*self._faults.delay_s)
            heapq.heappush(self._flying, (due_s, next(self._numbers), up, name, frame))

    def _deliver(self, now_s: float) -> None:
        while self._flying and self._flying[0][0] <= now_s:
            _, number, up, name, frame = heapq.heappop(self._flying)
            self.passed += 1
            self.overtaken += number < self._newest
            self._newest = max(number, self._newest)
            if up:
                self._backs[name].send(frame)
            else:
                self._front.send_multipart([name, frame])
