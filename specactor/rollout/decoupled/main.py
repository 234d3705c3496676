"""A drafter process: hears engines (`transport`), drafts what `drafter_side` wants, answers the owner.

Invariants: idle or asleep it takes no processor time; it ends on SIGTERM, with its owner's stream and with its parent;
no frame ends it, but an error of the continuer does.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from types import FrameType

import msgspec

from specactor.rollout import frames
from specactor.rollout.decoupled.drafter_side import Continuer, MirroredRequests
from specactor.rollout.decoupled.protocol import Drops
from specactor.rollout.decoupled.spec import SPEC, TO_DRAFTER, Ask, DrafterSpec, FromDrafter, State, Work
from specactor.rollout.decoupled.transport import Hub, Keys, new_session
from specactor.rollout.frames import Failed, is_final
from specactor.rollout.speculation.costs import Point
from specactor.trace import Recorder

MAX_LANES = 256  # requests per call of the continuer

_LOG = logging.getLogger(__name__)


def serve(
    continuer: Continuer,
    *,
    endpoint: str,
    on_ready: Callable[[State], None],
    keys: Keys | None = None,
    max_tokens: int = 4_000_000,
    owner_fd: int | None = None,
    asleep: bool = False,
    on_owner: Callable[[DrafterLoop], bool] = lambda loop: False,
) -> None:
    """Draft, in the main thread, until the process is to end. Raises ConfigError for an unusable endpoint.

    Args:
        on_owner: called when `owner_fd` is readable; returns whether to go on.
    """
    parent = os.getppid()
    hub = Hub(endpoint, keys=keys)
    loop = DrafterLoop(continuer, hub, max_tokens=max_tokens)
    if asleep:
        loop.sleep()
    try:
        with _termination() as terminated:
            files = [terminated] if owner_fd is None else [terminated, owner_fd]
            on_ready(loop.state())
            while os.getppid() == parent:
                began_s = time.perf_counter()
                readable = loop.wait(files)
                if not loop.busy:
                    name = "asleep" if loop.asleep else "idle"
                    loop.recorder.span("draft", name, began_s, time.perf_counter())
                if terminated in readable or (readable and not on_owner(loop)):
                    break
                loop.turn()
    finally:
        loop.close()
    _LOG.info("drafter process %d ends", os.getpid())


class BatchTiming:
    """Seconds of batches by their number of lanes: of each magnitude the latest 15, which count from three on."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}  # by the logarithm of lanes
        self._lanes: dict[int, int] = {}  # of the last of them
        self._batches = 0

    def batch(self, lanes: int, seconds: float) -> None:
        self._lanes[lanes.bit_length()] = lanes
        self._seconds.setdefault(lanes.bit_length(), deque(maxlen=15)).append(seconds)
        self._batches += 1
        if self._batches % 256 == 0:  # each size's oldest time leaves: sizes that nobody makes are tried again
            for times in self._seconds.values():
                if times:
                    times.popleft()

    def free(self, lanes: int, max_lanes: int) -> int:
        """Return how many lanes may be added for at most 6 % more time, by a line through known times, up to twice
        those tried."""
        known = sorted(size for size, of in self._seconds.items() if len(of) >= 3)
        if not known:
            return 0
        few, many = self._lanes[known[0]], self._lanes[known[-1]]
        few_s, many_s = median(self._seconds[known[0]]), median(self._seconds[known[-1]])
        most = min(2 * many, max_lanes) - lanes
        if many_s > few_s:
            lane_s = (many_s - few_s) / (many - few)
            most = min(most, int(0.06 * (few_s / lane_s + max(0, lanes - few))))
        return max(0, most)


class DrafterLoop:
    def __init__(
        self,
        continuer: Continuer,
        hub: Hub,
        *,
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_tokens = max_tokens
        self._drops = Drops("drafter")
        self.mirrors = self._new_mirrors()
        self.busy = False  # the next turn need not wait for anything to arrive
        self.asleep = False
        self.recorder = Recorder()
        self._wake_s = 0.0
        self._busy_s = 0.0
        self._turns: deque[Point] = deque(maxlen=512)
        self._began_s = 0.0
        self._drafted = (0, 0)  # (requests, tokens) in it
        self._timing = BatchTiming()
        self._continuer = continuer
        self._hub = hub
        self._clock = clock

    def _new_mirrors(self) -> MirroredRequests:
        return MirroredRequests(new_session(), max_tokens=self._max_tokens, drops=self._drops)

    def wait(self, files: Sequence[int]) -> list[int]:
        """Wait for something to do; return those of `files` that are readable."""
        if self.asleep:
            return list(select.select(files, [], [])[0])
        # Twice a second it looks whether its parent is there, and which engines have fallen silent.
        return self._hub.wait(0.0 if self.busy else 0.5, files)

    def sleep(self) -> State:
        if not self.asleep:
            self._hub.close()
            self.mirrors.forget_all()
            for key in self.mirrors.forgotten():
                self._continuer.forget(key)
            self._continuer.sleep()
            self.asleep, self.busy = True, False
        return self.state()

    def wake(self) -> State:
        """Start as a new process would. Raises ConfigError where the address was taken."""
        if self.asleep:
            began_s = time.perf_counter()
            self._continuer.wake()
            self.mirrors, self._hub = self._new_mirrors(), self._hub.again()
            self.asleep, self._wake_s = False, time.perf_counter() - began_s
        return self.state()

    def state(self, problem: str = "") -> State:
        return State(
            endpoint=self._hub.endpoint,
            version=self._continuer.version,
            asleep=self.asleep,
            wake_s=self._wake_s,
            problem=problem,
        )

    def close(self) -> None:
        self._hub.close()

    def turn(self) -> None:
        if self.asleep:
            return
        mirrors, continuer = self.mirrors, self._continuer
        now_s = self._clock()
        if self.busy and self._drafted[1]:
            self._turns.append((*self._drafted, now_s - self._began_s))
        self._began_s = now_s
        wasted = mirrors.num_wasted
        for session, frame in self._hub.receive():
            mirrors.receive(session, frame, now_s)
        mirrors.tick(now_s)
        if mirrors.num_wasted > wasted:
            self.recorder.instant("commits", "rollback", time.perf_counter(), tokens=mirrors.num_wasted - wasted)
        for key in mirrors.forgotten():
            continuer.forget(key)
        self._send(more=self.busy)  # an engine that asks whether anybody is here need not wait for the draft
        lanes = mirrors.wanted(MAX_LANES)
        own = len(lanes)
        began_s = time.perf_counter()  # lanes of branches copy their texts, which is time that they take
        free = self._timing.free(own, MAX_LANES)
        continuer.wants_runners_up = free > 0
        lanes += mirrors.branches(free)
        if lanes:
            drafts = continuer.extend(lanes)
            ended_s = time.perf_counter()
            self._busy_s += ended_s - began_s
            tokens = [len(draft or ()) for draft in drafts]
            is_steady = None not in drafts  # reading takes time that drafting does not
            if is_steady and (computed := sum(map(bool, tokens))):  # a lane that was refused took no time
                self._timing.batch(computed, ended_s - began_s)
            self.recorder.span("draft", "draft", began_s, ended_s, requests=len(lanes), tokens=sum(tokens))
            self._drafted = (own, sum(tokens[:own]) if is_steady else 0)
            mirrors.extended(lanes, drafts, continuer.runners_up())
        self.busy = bool(lanes)
        self._send(more=self.busy)

    def work(self, *, trace: bool) -> Work:
        """Return the work since the last call; see `Engine.trace`."""
        drops = Counter(self._drops.take()) + Counter(self._hub.drops.take())
        work = Work(busy_s=self._busy_s, turns=list(self._turns), spans=self.recorder.take(), drops=drops)
        self._turns.clear()
        self._busy_s, self.recorder.on = 0.0, trace
        return work

    def renew(self, asked: bytes) -> State:
        """Give the continuer new weights, `DraftWeights` as JSON."""
        from specactor.weights_sync.messages import DraftWeights  # with torch, which a continuer with weights has

        began_s = time.perf_counter()
        try:
            problem = self._continuer.renew(msgspec.json.decode(asked, type=DraftWeights))
        except (msgspec.MsgspecError, OSError) as error:
            problem = str(error)
        self.recorder.span("draft", "new weights", began_s, time.perf_counter())
        if problem:
            _LOG.warning("new weights were refused: %s", problem)
        return self.state(problem)

    def _send(self, *, more: bool) -> None:
        now_s = self._clock()
        for session in self.mirrors.sessions:
            for frame in self.mirrors.outgoing(session, version=self._continuer.version, now_s=now_s, more=more):
                if not self._hub.send(session, frame):
                    self.mirrors.drops.expect("unsent")


@contextmanager
def _termination() -> Iterator[int]:
    """Yield a file that SIGTERM makes readable, and nothing else."""
    ours, signals = socket.socketpair()

    def nothing(number: int, frame: FrameType | None) -> None:
        pass

    with ours, signals:
        signals.setblocking(False)
        before = signal.signal(signal.SIGTERM, nothing)
        wake = signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
        try:
            yield ours.fileno()
        finally:
            signal.set_wakeup_fd(wake)
            signal.signal(signal.SIGTERM, before)


def run(owner: socket.socket) -> None:
    frame = frames.read(owner, SPEC)
    if frame is None:
        return
    start, _, spec = frame

    def say(call: int, message: FromDrafter) -> None:
        owner.sendall(frames.pack(call, message))

    def answer(loop: DrafterLoop) -> bool:
        frame = frames.read(owner, TO_DRAFTER)
        if frame is None:
            return False  # the owner is gone, or wants no more
        call, _, message = frame
        say(call, _answer(loop, message))
        return True

    try:
        if spec.core is not None:
            os.sched_setaffinity(0, {spec.core})
        continuer, max_tokens = _continuer(spec)
        serve(
            continuer,
            endpoint=spec.endpoint,
            keys=spec.keys,
            max_tokens=max_tokens,
            owner_fd=owner.fileno(),
            asleep=spec.engine is not None,
            on_ready=lambda started: say(start, started),
            on_owner=answer,
        )
    except Exception as error:  # the boundary of the process: the owner reports it, if it still waits
        traceback.print_exc()
        if is_final(error):
            say(start, Failed(message=f"{type(error).__name__}: {error}"))


def _answer(loop: DrafterLoop, message: Ask) -> FromDrafter:
    match message.verb:
        case "work":
            return loop.work(trace=message.trace)
        case "sleep":
            return loop.sleep()
        case "wake":
            return loop.wake()
        case "renew":
            return loop.renew(message.weights)
        case "alive":
            return loop.state()


def _continuer(spec: DrafterSpec) -> tuple[Continuer, int]:
    if spec.continuer != "model":
        module, _, attribute = spec.continuer.partition(":")
        made: Continuer = getattr(importlib.import_module(module), attribute)(spec)
        return made, spec.kv_tokens or sys.maxsize
    from specactor.rollout.sglang.draft_backend import DraftBackend

    backend = DraftBackend.start(spec)
    return backend, backend.max_tokens
