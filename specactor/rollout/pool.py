"""The engines of one trainer rank, replaced when they die.

Invariants: `generate` returns each request once, finished, unfinished or stopped; a dead engine costs no request;
`stop` and a failed start leave nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from specactor.errors import EngineError
from specactor.rollout.child_process import RESTARTS_WITHIN, ChildDied, StartRefusedError
from specactor.rollout.conversations import Conversations
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.driver import REPORT_TOKENS, Driver
from specactor.rollout.refill import Refill
from specactor.rollout.requests import assign, merge
from specactor.rollout.sglang.engine_client import Engine, EngineSpec
from specactor.rollout.speculation.counters import Counts, added
from specactor.rollout.waiting import Waiting
from specactor.trace import Span
from specactor.types import RolloutRequest, Trajectory

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RolloutOutcome:
    finished: list[Trajectory]
    unfinished: list[RolloutRequest]  # of engines that died; restart those, sync weights, and generate these again
    # since there were enough groups; they hold what was begun
    stopped: list[RolloutRequest] = field(default_factory=list)
    drafters_woken: int = 0  # on devices of engines that had run dry


class EnginePool(contextlib.AbstractContextManager["EnginePool"]):
    def __init__(
        self,
        specs: Sequence[EngineSpec],
        *,
        report_tokens: int = REPORT_TOKENS,
        drafters: DrafterPool | None = None,
        restart_limit_s: float = 300.0,
    ) -> None:
        """Start all engines, if any; `wait_ready` waits for them. `restart_lost` takes at most `restart_limit_s`, for
        which other ranks wait."""
        self._restart_limit_s = restart_limit_s
        self.drafters = drafters if drafters is not None else DrafterPool([])
        self.report_tokens = report_tokens
        self._version = 0  # of the last sync, which counts steps
        self._restarts: dict[int, list[int]] = {spec.index: [] for spec in specs}  # versions at which they were made
        self._starting = threading.Lock()
        self._stopped = False  # no engine is started any more
        self.engines: list[Engine] = []
        try:
            for spec in specs:
                self.engines.append(Engine(spec))
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self) -> None:
        """Wait until all take requests; those that die meanwhile are started again, in the time of one more start.
        Raises EngineError after `stop`: at once for one that says why it does not start."""
        if all(engine.ready is not None for engine in self.engines):
            return
        limit_s = max(engine.spec.config.start_timeout_s for engine in self.engines)
        try:
            self._wait_starting(time.monotonic() + limit_s, refusal_is_final=True)
            self._replace_until_ready(time.monotonic() + limit_s, f"{limit_s:g} s", refusal_is_final=True)
        except BaseException:
            self.stop()
            raise

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        on_finished: Callable[[Trajectory], None] | None = None,
        is_enough: Callable[[int], bool] | None = None,
        conversations: Conversations | None = None,
        refill: Refill | None = None,
        waiting: Waiting | None = None,
    ) -> RolloutOutcome:
        """Generate on living engines, until `refill` is settled, `waiting` empty or there `is_enough`;
        `on_finished` is called in this thread. `conversations` begin, or go on after a death. Without a living engine
        all come back unfinished. Raises EngineError for a request that cannot be served."""
        merge(requests, [])  # refuses ids that are not unique before anything runs
        self.wait_ready()
        alive = [engine for engine in self.engines if engine.alive]
        driver = Driver(
            alive,
            notify=on_finished or (lambda trajectory: None),
            report_tokens=self.report_tokens,
            is_enough=is_enough,
            drafters=self.drafters,
            conversations=conversations,
            refill=refill,
            waiting=waiting,
        )
        if (requests or refill or (waiting and waiting.lists)) and alive:
            with self.drafters.rollout():
                driver.run(assign(requests, len(alive)))
        requests = [*requests, *driver.added]
        finished, rest = merge(requests, driver.done.values())
        return RolloutOutcome(
            finished=finished,
            unfinished=[request for request in rest if request.request_id not in driver.stopped],
            stopped=[driver.stopped[r.request_id] for r in rest if r.request_id in driver.stopped],
            drafters_woken=driver.num_woken,
        )

    def lost(self) -> tuple[int, ...]:
        return tuple(engine.index for engine in self.engines if not engine.alive)

    def restart_lost(self, ended: Collection[int] = ()) -> tuple[int, ...]:
        """Replace dead engines, also those that die while starting, with pauses that double; return their indices.
        Until the next sync they hold their model folder's weights. That a failed sync `ended` some is not counted.
        Raises EngineError for one that died too often, or is not ready within `restart_limit_s`."""
        deadline = time.monotonic() + self._restart_limit_s
        limit = f"{self._restart_limit_s:g} s, half of what other ranks wait"
        first = set(self.lost())
        self._replace_lost(deadline, ended)
        return tuple(sorted(first | self._replace_until_ready(deadline, limit)))

    def _replace_until_ready(self, deadline: float, limit: str, *, refusal_is_final: bool = False) -> set[int]:
        pause_s, replaced = 1.0, set[int]()
        while lost := [engine for engine in self.engines if not engine.alive]:
            replaced.update(engine.index for engine in lost)
            if time.monotonic() + pause_s >= deadline:
                raise EngineError(lost[0].with_log(f"died and could not be replaced within {limit}."))
            _LOG.warning("engine %d died while it started, and is started again", lost[0].index)
            time.sleep(pause_s)  # what killed it, such as memory that another process holds, may pass
            pause_s *= 2
            self._replace_lost(deadline, refusal_is_final=refusal_is_final)
        return replaced

    def _replace_lost(self, deadline: float, ended: Collection[int] = (), *, refusal_is_final: bool = False) -> None:
        """Replace each once, and wait until it is ready or dead."""
        for position, engine in enumerate(self.engines):
            if engine.alive:
                continue
            engine.kill()
            limit, since = engine.spec.config.max_restarts, self._version - RESTARTS_WITHIN
            recent = [version for version in self._restarts[engine.index] if version > since]
            if engine.index not in ended:
                if len(recent) >= limit:
                    allowed = f"allowed are {limit} restarts in {RESTARTS_WITHIN} steps."
                    what = engine.with_log(f"died {limit + 1} times, {allowed}")
                    raise EngineError(f"rollout.engine.max_restarts: {what}")
                recent.append(self._version)
            self._restarts[engine.index] = recent
            with self._starting:
                if self._stopped:
                    raise EngineError(f"engine {engine.index} is not started again: the run has ended")
                try:
                    self.engines[position] = Engine(_successor(engine))
                except OSError:  # a disk or memory; it stays lost, and is tried again
                    _LOG.exception("engine %d could not be started again", engine.index)
        self._wait_starting(deadline, refusal_is_final=refusal_is_final)

    def _wait_starting(self, deadline: float, *, refusal_is_final: bool) -> None:
        """Wait until each is ready or dead. Raises StartRefusedError, where that is final, after `stop`."""

        def until_ready_or_lost(engine: Engine) -> None:
            try:
                engine.wait_ready(min(engine.spec.config.start_timeout_s, max(0.0, deadline - time.monotonic())))
            except StartRefusedError:
                if refusal_is_final:
                    raise
            except EngineError:
                pass  # it has ended it

        starting = [engine for engine in self.engines if engine.ready is None]
        if not starting:
            return
        with ThreadPoolExecutor(max_workers=len(starting)) as threads:
            futures = [threads.submit(until_ready_or_lost, engine) for engine in starting]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                for future in futures:
                    if future.done():
                        future.result()
            except BaseException:
                self.stop()  # which also ends the waiting for the others
                raise

    def flush(self) -> None:
        self._on_living(Engine.flush)

    def release_memory(self) -> None:
        """Free device memory, where the platform can."""
        self._on_living(Engine.release_memory)

    def resume_weights(self) -> None:
        self._on_living(Engine.resume_weights)

    def resume_memory(self) -> None:
        self._on_living(Engine.resume_memory)

    def speculation_counts(self) -> dict[str, Counts]:
        parts: list[dict[str, Counts]] = []
        self._on_living(lambda engine: parts.append(engine.speculation_counts()))
        return added(parts)

    def trace(self, *, on: bool) -> dict[str, list[Span]]:
        """Return `Engine.trace` of each living engine."""
        spans: dict[str, list[Span]] = {}
        self._on_living(lambda engine: spans.__setitem__(f"engine {engine.index}", engine.trace(on=on)))
        return {name: spans[name] for name in sorted(spans)}

    def set_version(self, version: int) -> None:
        self._version = version
        for engine in self.engines:
            engine.version = version

    def stop(self) -> None:
        with self._starting:
            self._stopped = True
        self._each(self.engines, Engine.stop)

    def _on_living(self, action: Callable[[Engine], object]) -> None:
        """Act on living engines; `restart_lost` sees to those that die."""

        def run(engine: Engine) -> None:
            with contextlib.suppress(ChildDied):
                action(engine)

        self._each([engine for engine in self.engines if engine.alive], run)

    @staticmethod
    def _each(engines: Sequence[Engine], action: Callable[[Engine], object]) -> None:
        """Act in parallel; then raise the first error."""
        if not engines:
            return
        with ThreadPoolExecutor(max_workers=len(engines)) as threads:
            futures = [threads.submit(action, engine) for engine in engines]
        for future in futures:
            future.result()


def _successor(engine: Engine) -> EngineSpec:
    """Return what replaces an engine: with a KV pool of its size, for which requests may have been let in."""
    return engine.spec if engine.ready is None else replace(engine.spec, kv_tokens=engine.ready.kv_tokens)
