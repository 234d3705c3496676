"""A link with a delay between engines and their drafter process: every frame arrives so many seconds later.

    engines (DEALER) --> ROUTER [delay] DEALER per engine --> drafter (ROUTER), and back

Invariant: frames keep their order and their sender; none is changed, and those of an unknown receiver are dropped.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import zmq

LOOK_S = 1e-3  # between two looks at what is due


@contextmanager
def delayed(near: str, far: str, delay_s: float) -> Iterator[None]:
    """Listen at `near` in the name of the drafter at `far`."""
    ended = threading.Event()
    ready = threading.Event()
    thread = threading.Thread(target=_relay, args=(near, far, delay_s, ready, ended), name="delayed link")
    thread.start()
    try:
        ready.wait()
        yield
    finally:
        ended.set()
        thread.join()


def _relay(near: str, far: str, delay_s: float, ready: threading.Event, ended: threading.Event) -> None:
    context = zmq.Context()
    front = context.socket(zmq.ROUTER)
    backs: dict[bytes, zmq.Socket[bytes]] = {}  # by the engine's name
    due: list[tuple[float, int, bool, bytes, bytes]] = []  # (when, number, to the drafter, engine, frame)
    numbers = count()
    try:
        front.bind(near)
        ready.set()
        while not ended.wait(LOOK_S):
            arrives_s = time.perf_counter() + delay_s
            while front.poll(0):
                name, frame = front.recv_multipart()
                if name not in backs:
                    backs[name] = _connect(context, name, far)
                heapq.heappush(due, (arrives_s, next(numbers), True, name, frame))
            for name, back in backs.items():
                while back.poll(0):
                    heapq.heappush(due, (arrives_s, next(numbers), False, name, back.recv()))
            while due and due[0][0] <= time.perf_counter():
                _, _, is_out, name, frame = heapq.heappop(due)
                try:
                    if is_out:
                        backs[name].send(frame, zmq.DONTWAIT)
                    else:
                        front.send_multipart([name, frame], zmq.DONTWAIT)
                except zmq.Again:
                    pass  # nobody is there: dropped, as the engine's own socket would
    finally:
        ready.set()
        context.destroy(linger=0)


def _connect(context: zmq.Context[zmq.Socket[bytes]], name: bytes, far: str) -> zmq.Socket[bytes]:
    back = context.socket(zmq.DEALER)
    back.setsockopt(zmq.IDENTITY, name)
    back.setsockopt(zmq.IMMEDIATE, 1)  # what nobody is there for is not kept for later
    back.connect(far)
    return back
