"""The drafter processes of one host. Those with `DrafterSpec.engine` sleep, and may be woken while that engine is idle.

Invariants: after `rollout` those sleep or are gone, and restart only while their engine is idle; who lends or takes
back a device does not wait for a process; `stop` leaves nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from specactor.errors import EngineError
from specactor.rollout.child_process import RESTARTS_WITHIN, StartRefusedError
from specactor.rollout.decoupled.spec import DrafterSpec, Work
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.speculation.costs import METHOD
from specactor.waits import ANSWER_S, LATE_S, LOOK_EVERY_S, MOMENT_S, RETRY_PAUSE_S

if TYPE_CHECKING:
    from specactor.weights_sync.messages import DraftWeights

_LOG = logging.getLogger(__name__)


class DrafterPool(contextlib.AbstractContextManager["DrafterPool"]):
    def __init__(self, specs: Sequence[DrafterSpec], *, on_gpus: bool = False) -> None:
        """Start all. `on_gpus`: starting one takes GPU memory."""
        self._on_gpus = on_gpus
        self._lock = threading.Lock()
        self._replacing = threading.Lock()  # of the watcher, while it ends and starts processes; taken before `_lock`
        self._ending = threading.Event()
        self._watcher: threading.Thread | None = None
        self.restarts = 0
        self._rollouts = 0
        self._died: list[list[int]] = [[] for _ in specs]  # in which of the last `RESTARTS_WITHIN` rollouts
        self._late = [0] * len(specs)  # ends of rollouts in a row that found it late, and ended it
        self._gone_s: list[float | None] = [None] * len(specs)  # when one that is to be restarted died or was ended
        self._free: set[int] = set()  # engines that have nothing to do, in a rollout
        self.drafters: list[DrafterProcess] = []
        try:
            for spec in specs:
                self.drafters.append(DrafterProcess(spec))
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self) -> None:
        """Wait until all listen, then watch them; one that dies meanwhile is started again, in the time of one more
        start. Raises EngineError, and stops all, otherwise: at once for one that says why it does not start."""
        try:
            for index in range(len(self.drafters)):
                self._wait_ready(index)
        except BaseException:
            self.stop()
            raise
        if self.drafters and self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="drafters", daemon=True)
            self._watcher.start()

    def _wait_ready(self, index: int) -> None:
        spec = self.drafters[index].spec
        limit_s, pause_s, until = spec.start_timeout_s, RETRY_PAUSE_S, math.inf
        for left in range(spec.max_restarts, -1, -1):
            try:
                self.drafters[index].wait_ready(min(limit_s, until - time.monotonic()))
                return
            except StartRefusedError:
                raise
            except EngineError:
                until = min(until, time.monotonic() + limit_s)
                if not left or time.monotonic() + pause_s >= until or self._ending.wait(pause_s):
                    raise
                _LOG.warning("drafter %d died while it started, and is started again", spec.index)
            pause_s *= 2
            with self._lock:
                if not self._ending.is_set():
                    self.drafters[index] = DrafterProcess(spec)

    def work(self, *, trace: bool = False) -> dict[str, Work]:
        """Return `DrafterProcess.work` of each."""
        with self._lock:
            each = {f"drafter {d.spec.index}": d.work(trace=trace) for d in self.drafters if d.alive}
        return {name: work for name, work in each.items() if work is not None}

    def want(self, version: int) -> bool:
        with self._lock:
            return any(drafter.wants(version) for drafter in self._learning())

    def renew(self, weights: DraftWeights) -> tuple[list[str], float]:
        """Bring new weights to all with older ones at once, in at most `LATE_S`; return the reasons of those
        without them, and the seconds taken."""
        began_s = time.monotonic()

        def bring(drafter: DrafterProcess) -> tuple[str, float]:
            return drafter.renew(weights, timeout_s=LATE_S), time.monotonic() - began_s

        with self._lock:
            wanting = [drafter for drafter in self._learning() if drafter.wants(weights.draft_version)]
            with ThreadPoolExecutor(max_workers=max(1, len(wanting))) as threads:
                said = list(threads.map(bring, wanting))
        answered_s = max((spent_s for _, spent_s in said if spent_s < LATE_S), default=0.0)
        return [problem for problem, _ in said if problem], answered_s

    def oldest_version(self) -> int | None:
        with self._lock:
            return min((drafter.version for drafter in self._learning() if drafter.alive), default=None)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._settle()

    @property
    def can_lend(self) -> bool:
        """Whether any sleeps on the device of an engine."""
        return any(drafter.spec.engine is not None for drafter in self.drafters)

    def any_awake(self) -> bool:
        with self._lock:
            return any(drafter.awake and drafter.alive for drafter in self.drafters if drafter.spec.engine is not None)

    def free(self, engine: int) -> None:
        """Note that the engine is idle, until `sleep` or the rollout's end."""
        with self._lock:
            self._free.add(engine)

    def wake_s(self, engine: int) -> float | None:
        """Return the seconds to wake a drafter; None if none sleeps there."""
        with self._lock:
            return min((drafter.wake_s for drafter in self._on(engine) if drafter.can_wake()), default=None)

    def wake(self, engine: int) -> None:
        with self._lock:
            for drafter in self._on(engine):
                if drafter.can_wake():
                    drafter.wake()

    def sleep(self, engine: int) -> None:
        """Give the device back to its engine, without waiting."""
        with self._lock:
            self._free.discard(engine)
            for drafter in self._on(engine):
                if drafter.awake:
                    drafter.sleep(timeout_s=0.0)

    def _learning(self) -> list[DrafterProcess]:
        """Return the drafters whose model is trained: the first one's."""
        return [drafter for drafter in self.drafters if drafter.spec.drafter == METHOD]

    def _on(self, engine: int) -> list[DrafterProcess]:
        return [drafter for drafter in self.drafters if drafter.spec.engine == engine]

    def _settle(self) -> None:
        """Let all sleep; end late or, on GPUs, starting ones."""
        with self._replacing, self._lock:
            deadline = time.monotonic() + LATE_S
            self._rollouts += 1
            self._free.clear()
            lent = [i for i, drafter in enumerate(self.drafters) if drafter.spec.engine is not None and drafter.alive]
            for i in lent:
                if self.drafters[i].awake:
                    self.drafters[i].sleep(timeout_s=0.0)  # all are asked before one is waited for
            late = [i for i in lent if not self._sleeps(self.drafters[i], deadline)]
            for i in lent:
                self._late[i] = self._late[i] + 1 if i in late else 0
            if late:
                self._end_late(late)

    def _sleeps(self, drafter: DrafterProcess, deadline: float) -> bool:
        """Return whether it sleeps in time, is gone, or may go on starting."""
        if drafter.started is None:
            return not (drafter.alive and self._on_gpus)
        # Others may have taken all the time.
        return drafter.sleep(timeout_s=max(MOMENT_S, deadline - time.monotonic()))

    def _end_late(self, late: Sequence[int]) -> None:
        """End them together, as each may take seconds; no deaths are counted."""
        for i in late:
            spec = self.drafters[i].spec
            _LOG.warning(
                "drafter %d does not sleep at the end of a rollout, and is ended: %d of %d times in a row after which "
                "it is started again",
                *(spec.index, self._late[i], spec.max_restarts),
            )
        with ThreadPoolExecutor(max_workers=len(late)) as threads:
            for future in [threads.submit(self.drafters[i].kill) for i in late]:
                future.result()
        for i in late:
            self._gone_s[i] = time.monotonic()

    def stop(self) -> None:
        """End all; may be called again."""
        self._ending.set()
        with self._replacing, self._lock:
            for drafter in self.drafters:
                drafter.stop()
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self) -> None:
        while not self._ending.wait(LOOK_EVERY_S):
            with self._replacing:
                for index in range(len(self.drafters)):
                    if not self._ending.is_set():
                        try:
                            self._look(index, time.monotonic())
                        except Exception:  # such as of a disk; the others are watched on, and this one is tried later
                            _LOG.exception("drafter %d could not be watched or started again", index)

    def _look(self, index: int, now_s: float) -> None:
        drafter = self.drafters[index]
        spec = drafter.spec
        with self._lock:
            hangs = drafter.alive and drafter.hangs(ANSWER_S)
            if drafter.alive and not hangs:
                if drafter.leaving:
                    drafter.sleep(timeout_s=0.0)
                return
        if hangs:
            _LOG.warning("drafter %d was silent for %g s, and is ended", spec.index, ANSWER_S)
            drafter.kill()
        if (gone_s := self._gone_s[index]) is None:
            self._gone_s[index] = gone_s = now_s
            recent = [rollout for rollout in self._died[index] if rollout > self._rollouts - RESTARTS_WITHIN]
            self._died[index] = [*recent, self._rollouts]
            drafter.kill()
            _LOG.warning(
                "drafter %d died; %d of %d restarts in %d rollouts were used. The end of its log, %s:\n%s",
                *(spec.index, len(recent), spec.max_restarts, RESTARTS_WITHIN, spec.log_file, drafter.log_tail()),
            )
        with self._lock:
            if spec.engine is not None and spec.engine not in self._free:
                return  # the device may be the trainer's now, or its engine's
        deaths, late = len(self._died[index]), self._late[index]
        # Again after at most `max_restarts` deaths, and as many late ends in a row, each time twice as long after.
        pause_s = RETRY_PAUSE_S * 2 ** max(0, deaths + late - 1)
        if max(deaths, late) <= spec.max_restarts and now_s - gone_s >= pause_s:
            self._gone_s[index] = None  # if the next line raises, it is found dead again
            successor = DrafterProcess(spec)
            with self._lock:
                if is_taken := spec.engine is not None and spec.engine not in self._free:
                    self._gone_s[index] = now_s  # its engine has requests again, and it is started later
                else:
                    self.drafters[index] = successor
                    self.restarts += 1
            if is_taken:
                successor.kill()
