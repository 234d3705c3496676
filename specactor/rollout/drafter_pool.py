"""The drafter processes of one host: started together, restarted when they die, stopped together.

Drafters own nothing: a dead one costs drafts and no more, engines find it again by themselves. So it is replaced on the
side, by a thread, while whoever uses the engines goes on.

Those of `DrafterSpec.engine` sleep, and may be woken while that engine has nothing to do.

Invariants: after `rollout` those sleep or are gone, and none of them is being started before the next; after `stop`
nothing of any drafter is left, also when starting failed; a drafter is started at most `max_restarts` times again, each
time `PAUSE_S` or more after it was found dead, twice as long every time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from specactor.rollout.decoupled.host import DrafterProcess
from specactor.rollout.decoupled.process import Work
from specactor.rollout.decoupled.spec import DrafterSpec

if TYPE_CHECKING:
    from specactor.weights_sync.messages import DraftWeights

LOOK_EVERY_S = 0.2
PAUSE_S = 0.5
SLEEP_TIMEOUT_S = 10.0
"""Longest wait for all drafters that were woken to sleep; a batch may have to end first. The others are ended."""

_LOG = logging.getLogger(__name__)


class DrafterPool:
    """May be empty: then every method does nothing."""

    def __init__(self, specs: Sequence[DrafterSpec]) -> None:
        """Starts all at once; they do not listen before `wait_ready`."""
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._watcher: threading.Thread | None = None
        self._restarts = [0] * len(specs)
        self._dead_s: list[float | None] = [None] * len(specs)
        """When a drafter was found dead that is to be started again."""
        self._rollout = False
        self.drafters: list[DrafterProcess] = []
        try:
            for spec in specs:
                self.drafters.append(DrafterProcess(spec))
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> DrafterPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def restarts(self) -> int:
        """Drafters that were started again so far."""
        return sum(self._restarts)

    def wait_ready(self) -> None:
        """Until all listen; from then on they are watched. Raises EngineError, and stops all, when one does not."""
        try:
            for drafter in self.drafters:
                drafter.wait_ready()
        except BaseException:
            self.stop()
            raise
        if self.drafters and self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="drafters", daemon=True)
            self._watcher.start()

    def work(self, *, trace: bool = False) -> dict[str, Work]:
        """What each drafter that answers did since the last call. Args: whether to record spans from now on."""
        with self._lock:
            each = {f"drafter {d.spec.index}": d.work(trace=trace) for d in self.drafters if d.alive}
        return {name: work for name, work in each.items() if work is not None}

    def want(self, version: int) -> bool:
        """Whether any of them drafts with older weights, and could take these."""
        with self._lock:
            return any(drafter.wants(version) for drafter in self.drafters)

    def renew(self, weights: DraftWeights, *, timeout_s: float) -> list[str]:
        """Bring new weights to those that draft with older ones; what each says that did not take them."""
        with self._lock:
            wanting = [drafter for drafter in self.drafters if drafter.wants(weights.draft_version)]
            said = [drafter.renew(weights, timeout_s=timeout_s) for drafter in wanting]
        return [problem for problem in said if problem]

    def oldest_version(self) -> int | None:
        """Of the weights that those which run draft with."""
        with self._lock:
            return min((drafter.version for drafter in self.drafters if drafter.alive), default=None)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Devices of engines are theirs meanwhile; afterwards the trainer's."""
        self._rollout = True
        try:
            yield
        finally:
            self._rollout = False
            self._settle()

    def is_awake(self, engine: int) -> bool:
        """Whether the drafter on that engine's device was woken, and not asked to sleep since, and is alive."""
        with self._lock:
            return any(drafter.awake and drafter.alive for drafter in self._on(engine))

    def wake_s(self, engine: int) -> float | None:
        """What waking the drafter on that engine's device takes; None: there is none that sleeps."""
        with self._lock:
            return min((drafter.wake_s for drafter in self._on(engine) if drafter.can_wake()), default=None)

    def wake(self, engine: int) -> None:
        """The engine has nothing to do. Waits for nothing."""
        with self._lock:
            for drafter in self._on(engine):
                if drafter.can_wake():
                    drafter.wake()

    def sleep(self, engine: int) -> None:
        """The engine has something to do again. Waits for nothing; harmless if it sleeps."""
        with self._lock:
            for drafter in self._on(engine):
                if drafter.awake:
                    drafter.sleep(timeout_s=0.0)

    def _on(self, engine: int) -> list[DrafterProcess]:
        return [drafter for drafter in self.drafters if drafter.spec.engine == engine]

    def _settle(self) -> None:
        """All that may be woken sleep, or are ended: those that are late, and those that have not started yet."""
        deadline = time.monotonic() + SLEEP_TIMEOUT_S
        with self._lock:
            lent = [drafter for drafter in self.drafters if drafter.spec.engine is not None and drafter.alive]
            for drafter in lent:
                if drafter.awake:
                    drafter.sleep(timeout_s=0.0)  # all are asked before one is waited for
            for drafter in lent:
                left_s = max(0.0, deadline - time.monotonic())
                if not drafter.has_started() or not drafter.sleep(timeout_s=left_s):
                    _LOG.warning("drafter %d does not sleep, and is ended", drafter.spec.index)
                    drafter.kill()

    def stop(self) -> None:
        """Ends all. May be called again."""
        self._ending.set()
        with self._lock:
            for drafter in self.drafters:
                drafter.stop()
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self) -> None:
        while not self._ending.wait(LOOK_EVERY_S):
            with self._lock:
                if not self._ending.is_set():
                    self._look(time.monotonic())

    def _look(self, now_s: float) -> None:
        for index, drafter in enumerate(self.drafters):
            if drafter.alive:
                if drafter.leaving:
                    drafter.sleep(timeout_s=0.0)
                continue
            spec, tried = drafter.spec, self._restarts[index]
            if self._dead_s[index] is None:
                self._dead_s[index] = now_s
                drafter.kill()
                _LOG.warning(
                    "drafter %d died; %d of %d restarts were used. The end of its log, %s:\n%s",
                    *(spec.index, tried, spec.max_restarts, spec.log_file, drafter.log_tail()),
                )
            pause_s = PAUSE_S * 2**tried
            if spec.engine is not None and not self._rollout:
                continue  # the device may be the trainer's now
            if tried < spec.max_restarts and now_s - (self._dead_s[index] or now_s) >= pause_s:
                try:
                    self.drafters[index] = DrafterProcess(spec)
                except OSError:
                    _LOG.exception("drafter %d could not be started again", spec.index)
                self._dead_s[index] = None
                self._restarts[index] += 1
