"""Drives the requests of one rollout over a rank's engines.

Threads call engines and queue events; the thread of `run` does all else.

Invariants: a request runs on one engine; it is delivered once, lost with its engine, or stopped; no call outlives
`run`. Of the drafters on idle engines' devices at most one is awake; it leaves before its engine gets requests; no
token changes; who lends or takes back waits for no process.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate

from specactor.errors import DataError, EngineError
from specactor.rollout import resume
from specactor.rollout.child_process import ChildDied
from specactor.rollout.conversations import Conversations, EnvironmentAnswer
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.refill import Refill
from specactor.rollout.session import TURN
from specactor.rollout.sglang.engine_client import Engine
from specactor.rollout.speculation.drafter_set import ABSENT
from specactor.rollout.waiting import Waiting
from specactor.types import RolloutRequest, Trajectory
from specactor.waits import LOOK_EVERY_S

REPORT_TOKENS = 64  # an engine reports a running request every so many tokens

POLL_S = 0.02  # between two looks at what other ranks have told, for which a round of engines waits
NOTICE_ROUNDS = 2.0**ABSENT  # until an engine that found no drafter looks for one again
Running = Iterable[tuple[int, int]]  # tokens emitted, and at most, of each running request


class Driver:
    """One rollout; use it once."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        notify: Callable[[Trajectory], None],
        report_tokens: int = REPORT_TOKENS,
        is_enough: Callable[[int], bool] | None = None,
        drafters: DrafterPool | None = None,
        conversations: Conversations | None = None,
        refill: Refill | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        """Take engines that are ready. `drafters` may be woken on idle engines' devices; `conversations` say what
        becomes of their responses; `refill` gives requests as groups become complete, `waiting` groups as engines have
        room; `is_enough` takes how many groups are newly complete, and says whether all ranks' are enough."""
        self.done: dict[str, Trajectory] = {}
        # begun when there were enough groups; another rollout resumes them
        self.stopped: dict[str, RolloutRequest] = {}
        self._engines, self._notify = engines, notify
        drafters = drafters if drafters is not None else DrafterPool([])
        # Also for an abort that came too early, see `_progressed`.
        self._report_tokens = report_tokens if drafters.can_lend or refill or is_enough else 0
        self._is_enough, self._refill, self._waiting = is_enough, refill, waiting
        self.added: list[RolloutRequest] = []  # by `refill` and `waiting`
        self._borrowed = BorrowedDevices(engines, drafters)
        self._running: dict[int, dict[str, RolloutRequest]] = {i: {} for i in range(len(engines))}
        self._emitted: dict[str, int] = {}  # response tokens, of those that reported
        self._rounds = 0  # most tokens that a request has emitted in this rollout
        self._conversations = conversations
        # conversations whose environment is asked, with their engine
        self._thinking: dict[str, tuple[int, RolloutRequest]] = {}
        self._turns: list[tuple[int, RolloutRequest]] = []  # to be sent, with the conversation's engine
        self._open_calls = self._unscored = 0
        self._missing: Counter[int] = Counter()
        self._stopping = False
        self._look_at_s = 0.0
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # what the thread of `run` is to do
        self._threads: list[threading.Thread] = []

    @property
    def num_woken(self) -> int:
        return self._borrowed.num_woken

    def run(self, parts: Sequence[Sequence[RolloutRequest]]) -> None:
        """Run all requests, one part per engine, until each is in `done` or `stopped`, or lost.

        Raises EngineError for a request that cannot be served; kills the engines if `notify` raises.
        """
        self._missing.update(request.group_id for part in parts for request in part)
        if self._is_enough is not None and self._is_enough(0):
            self.stopped = {request.request_id: request for part in parts for request in part}
            return
        try:
            for engine, part in enumerate(parts):
                self._begin(engine, part)
            self._draw()
            self._fill()
            while self._open_calls or self._thinking or self._waits or (self._unscored and not self._stopping):
                for act in self._next():
                    act()
                self._look()
                self._send_turns()
                self._draw()
                self._fill()
        except (EngineError, DataError):
            self._each_engine(lambda engine: engine.abort())
            raise
        except BaseException:  # such as an error of `notify`: nobody will ask for the rest
            self._each_engine(lambda engine: engine.kill())
            raise
        finally:
            for thread in self._threads:
                thread.join()

    def _begin(self, engine: int, part: Sequence[RolloutRequest]) -> None:
        ready: list[RolloutRequest] = []
        for request in part:
            if self._conversations is None or request.request_id not in self._conversations:
                ready.append(request)
            else:
                turns = self._conversations.turns(request.request_id)  # some, where its engine has died
                ready += turns
                if not turns or self._conversations.is_agent(request.request_id):
                    self._ask(engine, request, None)
        self._send(engine, ready)

    @property
    def _waits(self) -> bool:
        all_live = len(self._running) == len(self._engines)
        return self._refill is not None and all_live and not self._refill.is_over

    def _draw(self) -> None:
        if self._refill is None or not self._running:
            return
        by_group: dict[int, list[RolloutRequest]] = {}
        for request in self._refill.more():
            by_group.setdefault(request.group_id, []).append(request)
        for group in by_group.values():
            self._begin_new(min(self._running, key=lambda i: len(self._running[i])), group)
        if self._refill.kept is not None and not self._stopping:
            self._stop()

    def _fill(self) -> None:
        while self._waiting is not None and self._running:
            busy = Counter({i: len(requests) for i, requests in self._running.items()})
            busy.update(engine for engine, _ in self._thinking.values() if engine in busy)
            engine = min(busy, key=lambda i: busy[i])
            group = self._waiting.take(busy[engine])
            if not group:
                return
            self._begin_new(engine, group)

    def _begin_new(self, engine: int, group: Sequence[RolloutRequest]) -> None:
        self.added += group
        self._missing.update(request.group_id for request in group)
        self._begin(engine, group)

    def _ask(self, engine: int, request: RolloutRequest, response: Trajectory | None) -> None:
        assert self._conversations is not None
        self._thinking[request.request_id] = engine, request
        self._emitted.pop(request.request_id, None)
        self._conversations.ask(
            request.request_id, response, lambda answer: self._events.put(partial(self._answered, answer))
        )

    def _next(self) -> list[Callable[[], None]]:
        conversations, found = self._conversations, list[Callable[[], None]]()
        try:
            # Other ranks tell what they have found of their groups.
            polls = self._refill is not None or self._is_enough is not None
            waits = [conversations.wait_s() if conversations else None, POLL_S if polls else None]
            found.append(self._events.get(timeout=min((s for s in waits if s is not None), default=None)))
            while conversations:  # turns that are there together are sent together
                found.append(self._events.get_nowait())
        except queue.Empty:
            if conversations is not None and not found:
                return [partial(self._answered, answer) for answer in conversations.overdue()]
        return found

    def _send(self, position: int, requests: Sequence[RolloutRequest]) -> None:
        if not requests:
            return
        self._borrowed.give_back(position)
        by_id = self._running[position]
        by_id.update((request.request_id, request) for request in requests)
        sent = dict(by_id)

        def finish(response: Trajectory) -> None:
            self._events.put(partial(self._heard, position, sent[response.request_id], response, has_ended=True))

        def report(request: RolloutRequest, so_far: Trajectory) -> None:
            self._events.put(partial(self._heard, position, request, so_far))

        def call() -> None:
            error: BaseException | None = None
            try:
                self._engines[position].generate(
                    requests, on_finished=finish, on_progress=report, report_tokens=self._report_tokens
                )
            except BaseException as raised:  # handed to the thread of `run`
                error = raised
            self._events.put(partial(self._call_ended, position, error))

        self._open_calls += 1
        self._threads.append(threading.Thread(target=call, name=f"calls-{position}", daemon=True))
        self._threads[-1].start()

    def _call_ended(self, engine: int, error: BaseException | None) -> None:
        self._open_calls -= 1
        if error is None:
            return
        if not isinstance(error, ChildDied):
            raise error
        for lost in self._running.pop(engine, {}):
            if self._is_open(lost):  # an agent waits for it; one that gave a call up goes on
                self._thinking.pop(lost.partition(TURN)[0], None)

    def _heard(self, engine: int, request: RolloutRequest, response: Trajectory, *, has_ended: bool = False) -> None:
        """Take a response, or what there is of one."""
        self._rounds = max(self._rounds, len(response.token_ids) - resume.num_begun(request))
        if not has_ended:
            self._progressed(engine, request, response)
        elif TURN in request.request_id:
            self._answer_agent(engine, response)
        else:
            self._running.get(engine, {}).pop(request.request_id, None)
            talks = self._conversations is not None and request.request_id in self._conversations
            if talks and self._stopping:
                self._drop(request)
            elif talks and response.finish_reason != "abort":
                self._ask(engine, request, response)
            elif response.finish_reason == "abort" and self._stopping:
                self.stopped[request.request_id] = resume.going_on(request, response)
            else:
                self._keep(response)
        dry = [engine for engine, requests in self._running.items() if not requests]
        if dry:  # seldom, and there may be many conversations
            waited_for = {engine for engine, _ in self._thinking.values()}
            dry = [engine for engine in dry if engine not in waited_for]
        if dry and not self._stopping and (self._waiting is None or self._waiting.is_over):
            finished = (len(response.token_ids) for response in self.done.values())
            self._borrowed.lend(dry, self._under_way, finished, self._rounds)

    def _answer_agent(self, engine: int, response: Trajectory) -> None:
        assert self._conversations is not None
        running = self._running.get(engine, {})
        if response.finish_reason == "abort" and self._conversations.is_open(response.request_id):
            raise EngineError(f"request {response.request_id}: SGLang aborted it. See the engine's log.")
        try:
            self._conversations.hear(response, self._engines[engine].parse_tools)
        except ChildDied:  # the turn is lost with the engine
            return
        running.pop(response.request_id, None)

    def _answered(self, answer: EnvironmentAnswer) -> None:
        assert self._conversations is not None
        if answer.request_id not in self._thinking:  # over, or lost with its engine and asked again in another rollout
            return
        found = self._conversations.take(answer)
        if found is None:  # given up, and asked again or over
            return
        engine, _ = self._thinking[answer.request_id]
        if isinstance(found, list):
            self._turns += [(engine, turn) for turn in found]
            if not found:
                self._end_calls(answer.request_id)
            return
        del self._thinking[answer.request_id]
        if isinstance(found, Trajectory):
            self._end_calls(answer.request_id)
            self._keep(found)
        else:
            self._turns.append((engine, found))

    def _end_calls(self, session: str) -> None:
        """End the turns that an agent does not wait for."""
        assert self._conversations is not None
        for engine, running in self._running.items():
            of_session = [name for name in running if name.startswith(session + TURN)]
            self._abort(engine, [name for name in of_session if not self._conversations.is_open(name)])

    def _send_turns(self) -> None:
        """Send turns to their engines, a dead one's to the engine with the least to do."""
        turns, self._turns = self._turns, []
        for _, turn in turns if not self._running else ():  # they are sent when engines are started again
            self._thinking.pop(turn.request_id.partition(TURN)[0], None)
        parts: dict[int, list[RolloutRequest]] = {}
        for engine, turn in turns if self._running and not self._stopping else ():
            assert self._conversations is not None
            session, is_agents, _ = turn.request_id.partition(TURN)
            if is_agents and (session not in self._thinking or not self._conversations.is_open(turn.request_id)):
                continue  # the session is over, or the call was given up
            if engine not in self._running:
                engine = min(self._running, key=lambda i: len(self._running[i]) + len(parts.get(i, ())))
            parts.setdefault(engine, []).append(turn)
        for engine, part in parts.items():
            self._send(engine, part)

    def _drop(self, request: RolloutRequest) -> None:
        assert self._conversations is not None
        self._conversations.drop(request.request_id)
        self.stopped[request.request_id] = request

    def _is_open(self, turn: str) -> bool:
        return self._conversations is not None and self._conversations.is_open(turn)

    def _progressed(self, engine: int, request: RolloutRequest, so_far: Trajectory) -> None:
        # First news of what was asked to end: the engine may have been asked before it was given the request, which
        # happens in a thread of its own, and have passed over it.
        ends = self._stopping or (TURN in request.request_id and not self._is_open(request.request_id))
        if ends and request.request_id not in self._emitted:
            self._abort(engine, [request.request_id])
        self._emitted[request.request_id] = len(so_far.token_ids)

    def _keep(self, response: Trajectory) -> None:
        self.done[response.request_id] = response
        self._missing[response.group_id] -= 1
        self._notify(response)
        if self._refill is not None and not self._stopping:
            self._unscored += 1
            self._refill.when_scored(response, lambda: self._events.put(partial(self._scored, response)))
        if self._is_enough is not None and not self._missing[response.group_id] and self._is_enough(1):
            self._stop()

    def _scored(self, response: Trajectory) -> None:
        assert self._refill is not None
        self._unscored -= 1
        if not self._stopping:
            self._refill.done(response)

    def _look(self) -> None:
        """Stop where other ranks have completed what was missing."""
        if self._is_enough is None or self._stopping or time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + POLL_S  # many ranks ask one store
        if self._is_enough(0):
            self._stop()

    def _stop(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        for engine, requests in self._running.items():
            self._abort(engine, requests)
        for _, request in [*self._thinking.values(), *self._turns]:
            if TURN not in request.request_id:
                self._drop(request)
        self._thinking.clear()
        self._turns.clear()

    def _abort(self, engine: int, request_ids: Iterable[str]) -> None:
        """Ask the engine to answer these with what there is."""
        if names := list(request_ids):
            with contextlib.suppress(ChildDied):
                self._engines[engine].abort_requests(names)

    def _under_way(self) -> list[tuple[int, int]]:
        """Return the tokens of each running request so far, and at most."""
        return [
            (self._emitted.get(name, resume.num_begun(request)), request.sampling.max_new_tokens)
            for requests in self._running.values()
            for name, request in requests.items()
        ]

    def _each_engine(self, action: Callable[[Engine], object]) -> None:
        for engine in self._engines:
            with contextlib.suppress(ChildDied):
                action(engine)


class BorrowedDevices:
    """The devices of idle engines in one rollout, on which drafters sleep (Algorithm 3 of 2511.16193). Engines are
    positions."""

    def __init__(
        self, engines: Sequence[Engine], drafters: DrafterPool, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_woken = 0
        self._engines, self._drafters, self._clock = engines, drafters, clock
        self._began_s, self._asked_s = clock(), -float("inf")
        self._dry: set[int] = set()  # engines of which the drafters know that they have nothing to do

    def give_back(self, engine: int) -> None:
        """Call it before the engine gets requests."""
        if engine in self._dry:
            self._dry.discard(engine)
            self._drafters.sleep(self._engines[engine].index)

    def lend(self, dry: Collection[int], running: Callable[[], Running], finished: Iterable[int], rounds: int) -> None:
        """Wake the drafter that is awake soonest, if that is worth it. `finished` are lengths in tokens, `rounds` those
        of this rollout so far."""
        if not self._drafters.can_lend:
            return
        for engine in set(dry) - self._dry:
            self._dry.add(engine)
            self._drafters.free(self._engines[engine].index)
        now_s = self._clock()
        # Events come by the hundred per second. One that is awake drafts for all, also for a dead engine's successor.
        if now_s - self._asked_s < LOOK_EVERY_S or self._drafters.any_awake() or not rounds:
            return
        self._asked_s = now_s
        wakes = [(self._drafters.wake_s(self._engines[engine].index), engine) for engine in dry]
        soonest_s, engine = min(((s, engine) for s, engine in wakes if s is not None), default=(None, -1))
        if soonest_s is None:
            return
        rounds_per_s = rounds / max(now_s - self._began_s, 1e-6)
        if is_worth_waking(soonest_s * rounds_per_s + NOTICE_ROUNDS, running(), finished):
            self._drafters.wake(self._engines[engine].index)
            self.num_woken += 1


def is_worth_waking(waking_rounds: float, running: Running, finished: Iterable[int]) -> bool:
    """Return whether a request is expected to go on for twice as long as waking takes. PURE. `finished` are lengths in
    tokens."""
    # Whether drafts then pay is decided by the engines that verify them: the device has nothing else to do.
    lengths = sorted(finished)
    sums = [*accumulate(lengths, initial=0)]
    return any(expected_left(lengths, sums, emitted, limit) > 2 * waking_rounds for emitted, limit in running)


def expected_left(lengths: Sequence[int], sums: Sequence[int], emitted: int, limit: int) -> float:
    """Return the tokens left if a response goes on as longer ones did, from 1 to the limit. `lengths` rise; `sums` are
    of the first none, one, two, .. of them."""
    shorter = bisect_right(lengths, emitted)
    longer = len(lengths) - shorter
    mean = (sums[-1] - sums[shorter]) / longer if longer else float(limit)
    return max(1.0, min(mean, limit) - emitted)
