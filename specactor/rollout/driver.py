"""Drives the requests of one rollout over a rank's engines, moves and replicas included.

Engines are called in threads, which only put events into one queue; everything is decided and changed in the thread of
`run`, one event after the other.

Invariants: a request runs at most once on an engine; it is delivered once, lost with its engine, or stopped; of
replicas the first to end is kept and the others are compared with it; no call is open when `run` returns or raises.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specactor.errors import EngineError, PlanError
from specactor.rollout import continuation
from specactor.rollout.lending import Lending, Sleepers
from specactor.rollout.sglang.engine import Engine, EngineDied
from specactor.rollout.tail_plan import EngineLoad, Lend, Move, Replica, Running, Standing, TailPolicy, is_news
from specactor.types import RolloutRequest, Trajectory

REPORT_TOKENS = 64
"""A policy hears of a running request after this many tokens of it."""


@dataclass(frozen=True, kw_only=True)
class TailCounts:
    """What became of the tail of a rollout."""

    moved: int = 0
    """Requests that went on on another engine."""
    moved_tokens: int = 0
    """Their prefixes, computed again there."""
    replicas: int = 0
    replicas_won: int = 0
    """Replicas that ended before the original."""
    lost_tokens: int = 0
    """Emitted by attempts that were not kept."""
    differing: int = 0
    """Attempts at one request that did not emit the same tokens: a tie that rounding decided (`continuation`), or an
    error of the engines."""
    lent: int = 0
    """Times that the drafter on a dry engine's device was woken."""
    set_aside: int = 0
    """Engines that were given no requests, for drafters on their devices."""

    def __add__(self, other: TailCounts) -> TailCounts:
        names = self.__dataclass_fields__
        return TailCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(slots=True)
class _Attempt:
    """A request on one engine."""

    request: RolloutRequest
    """As it was sent there."""
    engine: int
    is_replica: bool = False
    so_far: Trajectory | None = None
    move_to: int | None = None
    ending: bool = False
    """It was asked to end."""

    @property
    def place(self) -> int:
        """The engine that it is on, or on its way to."""
        return self.engine if self.move_to is None else self.move_to


@dataclass(frozen=True, slots=True)
class _Event:
    """From the thread of a call. At most one of the last three is given: progress, a response, or the call's end."""

    engine: int
    attempts: tuple[_Attempt, ...]
    progress: Trajectory | None = None
    response: Trajectory | None = None
    ended: bool = False
    error: BaseException | None = None


class Driver:
    """One rollout; use it once."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        notify: Callable[[Trajectory], None],
        policy: TailPolicy | None = None,
        report_tokens: int = REPORT_TOKENS,
        enough_groups: int | None = None,
        drafters: Sleepers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: engines that are ready; what sees each response; when to stop: with that many groups complete; what may
        draft on devices of engines that have run dry."""
        self.done: dict[str, Trajectory] = {}
        self.stopped: dict[str, RolloutRequest] = {}
        self._engines = engines
        self._notify = notify
        self._policy = policy
        # Also for an abort that came too early, see `_progressed`.
        self._report_tokens = report_tokens if policy is not None or enough_groups is not None else 0
        self._enough = enough_groups
        self._lending = Lending(engines, drafters, clock=clock)
        self._longest = 0
        """Most tokens that an attempt has emitted."""
        self._attempts: dict[str, dict[int, _Attempt]] = {}
        self._loaded: Counter[int] = Counter()
        """Per engine, the number of attempts that `_loads` would tell of."""
        self._asked: Standing | None = None
        """When the policy was asked last, if nothing was to be done then."""
        self._dead: set[int] = set()
        """Engines whose end was heard of: what they had is gone, though some calls may have to end yet."""
        self._missing: Counter[int] = Counter()
        self._complete = 0
        self._stopping = False
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_calls = 0
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> TailCounts:
        return TailCounts(lent=self._lending.times, **self._counts)

    def run(self, parts: Sequence[Sequence[RolloutRequest]], aside: Sequence[int] = ()) -> None:
        """Until all requests ended, one part per engine; `aside`: engines without any, whose drafters draft while they
        live, and which get none either until then. `done` and `stopped` hold what became of them; the others were
        lost with their engine. Raises EngineError when a request cannot be served; ends the engines if `notify` raises.
        """
        self._missing.update(request.group_id for part in parts for request in part)
        if self._enough is not None and self._enough <= 0:
            self.stopped = {request.request_id: request for part in parts for request in part}
            return
        self._lending.set_aside(aside)
        self._counts["set_aside"] += len(aside)
        try:
            for engine, part in enumerate(parts):
                self._send(engine, [_Attempt(request, engine) for request in part])
            while self._num_calls:
                self._take(self._events.get())
        except EngineError:
            self._each_engine(lambda engine: engine.abort())
            raise
        except BaseException:  # an interrupt, or an error of `notify`: nobody will ask for the rest
            self._each_engine(lambda engine: engine.kill())
            raise
        finally:
            for thread in self._threads:
                thread.join()

    def _send(self, position: int, attempts: Sequence[_Attempt]) -> None:
        """Generate these on one engine, in a thread of their own."""
        if not attempts:
            return
        self._lending.busy(position)
        by_id = {attempt.request.request_id: attempt for attempt in attempts}
        for request_id, attempt in by_id.items():
            self._attempts.setdefault(request_id, {})[position] = attempt
            self._loaded[position] += request_id not in self.done

        def put(response: Trajectory) -> None:
            self._events.put(_Event(position, (by_id[response.request_id],), response=response))

        def report(request: RolloutRequest, so_far: Trajectory) -> None:
            self._events.put(_Event(position, (by_id[request.request_id],), progress=so_far))

        def call() -> None:
            error: BaseException | None = None
            try:
                self._engines[position].generate(
                    [attempt.request for attempt in attempts],
                    on_finished=put,
                    on_progress=report,
                    report_tokens=self._report_tokens,
                )
            except BaseException as raised:  # handed to the thread of `run`
                error = raised
            self._events.put(_Event(position, tuple(attempts), ended=True, error=error))

        self._num_calls += 1
        self._threads.append(threading.Thread(target=call, name=f"calls-{position}", daemon=True))
        self._threads[-1].start()

    def _take(self, event: _Event) -> None:
        if event.ended:
            self._num_calls -= 1
            if event.error is not None and not isinstance(event.error, EngineDied):
                raise event.error
            if event.error is not None:
                self._dead.add(event.engine)
            for attempt in event.attempts:  # of a dead engine, what it still had
                here = self._attempts.get(attempt.request.request_id, {})
                if here.get(event.engine) is attempt:
                    self._forget(attempt)
            return
        [attempt] = event.attempts
        if (told := event.response or event.progress) is not None:
            self._longest = max(self._longest, len(told.token_ids) - continuation.num_begun(attempt.request))
        if event.response is not None:
            self._forget(attempt)
            self._ended(attempt, event.response)
        elif event.progress is not None:
            self._progressed(attempt, event.progress)
        if self._policy is not None and not self._stopping and (self._any_dry() or not self._policy.needs_dry):
            self._ask(self._policy)

    def _ask(self, policy: TailPolicy) -> None:
        requests = {i: self._loaded[i] for i in self._usable()}
        self._lending.dry(i for i, count in requests.items() if not count)
        standing = Standing(requests=requests, longest=self._longest)
        if policy.needs_dry and not is_news(self._asked, standing):
            return
        plan = policy.decide(self._loads(), [len(t.token_ids) for t in self.done.values()])
        self._asked = None if plan else standing
        self._act(plan)

    def _forget(self, attempt: _Attempt) -> None:
        del self._attempts[attempt.request.request_id][attempt.engine]
        self._loaded[attempt.place] -= attempt.request.request_id not in self.done

    def _any_dry(self) -> bool:
        """Whether `_loads` would have an engine without requests; without a look at each request."""
        return any(not self._loaded[i] for i in self._usable())

    def _usable(self) -> list[int]:
        """Engines that may be given requests."""
        without = self._dead | self._lending.aside()
        return [i for i in range(len(self._engines)) if i not in without]

    def _progressed(self, attempt: _Attempt, so_far: Trajectory) -> None:
        """First news of what was asked to end: the engine may have been asked before it was given the request, which
        happens in a thread of its own, and have passed over it."""
        unheard = attempt.so_far is None
        attempt.so_far = so_far
        if attempt.ending and unheard:
            self._abort([attempt])

    def _ended(self, attempt: _Attempt, response: Trajectory) -> None:
        request_id = response.request_id
        if request_id in self.done:
            self._lose(attempt, response, self.done[request_id])
        elif response.finish_reason == "abort" and attempt.ending:
            self._go_on(attempt, response)
        else:
            self._keep(attempt, response)

    def _keep(self, attempt: _Attempt, response: Trajectory) -> None:
        for other in self._attempts[response.request_id].values():
            self._loaded[other.place] -= 1
        self.done[response.request_id] = response
        self.stopped.pop(response.request_id, None)
        self._counts["replicas_won"] += attempt.is_replica
        self._end(self._attempts[response.request_id].values())
        self._missing[response.group_id] -= 1
        self._complete += self._missing[response.group_id] == 0
        self._notify(response)
        if self._enough is not None and self._complete >= self._enough and not self._stopping:
            self._stopping = True
            self._end(a for some in self._attempts.values() for a in some.values())

    def _lose(self, attempt: _Attempt, response: Trajectory, kept: Trajectory) -> None:
        self._counts["lost_tokens"] += len(response.token_ids) - continuation.num_begun(attempt.request)
        self._counts["differing"] += not continuation.agree(response.token_ids, kept.token_ids)

    def _go_on(self, attempt: _Attempt, response: Trajectory) -> None:
        """With what was asked to end: on another engine, or in another rollout."""
        request = continuation.going_on(attempt.request, response)
        if self._stopping:
            other = self.stopped.get(request.request_id, attempt.request)
            if continuation.num_begun(request) >= continuation.num_begun(other):
                self.stopped[request.request_id] = request
            return
        target = attempt.move_to
        assert target is not None
        if not self._engines[target].alive:
            target = attempt.engine
        self._counts["moved"] += 1
        self._counts["moved_tokens"] += len(request.prompt_ids) + continuation.num_begun(request)
        self._send(target, [_Attempt(request, target)])

    def _act(self, plan: Sequence[Move | Replica | Lend]) -> None:
        leaving: list[_Attempt] = []
        replicas: dict[int, list[_Attempt]] = {}
        for action in plan:
            if isinstance(action, Lend):
                self._lending.wake(action.engine)
                continue
            attempt = self._checked(action)
            if isinstance(action, Move):
                self._loaded[attempt.place] -= 1
                attempt.move_to = action.target
                self._loaded[attempt.place] += 1
                leaving.append(attempt)
            else:
                replicas.setdefault(action.target, []).append(self._replica(attempt, action.target))
        self._end(leaving)
        for target, attempts in replicas.items():
            self._counts["replicas"] += len(attempts)
            self._send(target, attempts)

    def _replica(self, attempt: _Attempt, target: int) -> _Attempt:
        request = attempt.request
        if attempt.so_far is not None and not self._engines[target].spec.config.routed_experts:
            request = continuation.going_on(request, attempt.so_far)  # what runs cannot say its experts yet
        return _Attempt(request, target, is_replica=True)

    def _checked(self, action: Move | Replica) -> _Attempt:
        """The attempt that is moved or replicated. Raises PlanError for a plan that cannot be carried out."""
        here = {i: a for i, a in self._attempts.get(action.request_id, {}).items() if i not in self._dead}
        staying = [attempt for attempt in here.values() if not attempt.ending]
        longest = max(staying, key=lambda attempt: _running(attempt).emitted, default=None)
        source = action.source if isinstance(action, Move) else longest.engine if longest else -1
        attempt = here.get(source)
        fits = 0 <= action.target < len(self._engines) and action.target not in {*here, *self._dead}
        if attempt is None or attempt.ending or not fits or (isinstance(action, Move) and len(here) > 1):
            raise PlanError(
                f"tail: got {action}, but the request runs on engines {sorted(here)}; expected a request that runs and "
                "is not on its way, and an engine that does not have it."
            )
        return attempt

    def _end(self, attempts: Iterable[_Attempt]) -> None:
        """Ask engines to end these; they answer with what there is."""
        staying = [attempt for attempt in attempts if not attempt.ending]
        for attempt in staying:
            attempt.ending = True
        self._abort(staying)

    def _abort(self, attempts: Sequence[_Attempt]) -> None:
        by_engine: dict[int, list[str]] = {}
        for attempt in attempts:
            by_engine.setdefault(attempt.engine, []).append(attempt.request.request_id)
        for position, ids in by_engine.items():
            with contextlib.suppress(EngineDied):
                self._engines[position].abort_requests(ids)

    def _loads(self) -> list[EngineLoad]:
        running: dict[int, list[Running]] = {i: [] for i in self._usable()}
        for request_id, here in self._attempts.items():
            if request_id in self.done:
                continue
            for attempt in here.values():
                if attempt.place in running:
                    running[attempt.place].append(_running(attempt))
        waking = self._lending.wake_rounds([i for i, some in running.items() if not some], self._longest)
        return [
            EngineLoad(
                engine=i,
                slots=self._engines[i].spec.config.max_running_requests,
                running=tuple(running[i]),
                wake_rounds=waking.get(i),
            )
            for i in running
        ]

    def _each_engine(self, action: Callable[[Engine], object]) -> None:
        for engine in self._engines:
            with contextlib.suppress(EngineDied):
                action(engine)


def _running(attempt: _Attempt) -> Running:
    request = attempt.request
    emitted = len(attempt.so_far.token_ids) if attempt.so_far else continuation.num_begun(request)
    return Running(
        request_id=request.request_id,
        length=len(request.prompt_ids) + emitted,
        emitted=emitted,
        max_new_tokens=request.sampling.max_new_tokens,
        on_its_way=attempt.ending,
    )
