"""Conversations of the policy with environments and agents.

A turn is a request whose prompt is the conversation so far, token in, token out. Noise is keyed by the conversation's
seed and positions, so no token depends on where turns are cut, or on engines.

Invariants: a conversation holds the sampled tokens and what was said between; an environment has one call at a time,
which ends in time or is given up; a failure says why, also of `close`; nothing is left but a thread that an
environment blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from specactor.data import chat
from specactor.data.environment import Agent, Environment, Said, checked, environment_of
from specactor.errors import DataError
from specactor.rollout import resume
from specactor.rollout.endpoint import ChatCall, Endpoint, is_refusal
from specactor.rollout.session import TURN, Parse, Session
from specactor.types import Problem, RolloutRequest, Trajectory
from specactor.waits import MOMENT_S


@dataclass(frozen=True, kw_only=True)
class EnvironmentAnswer:
    """The outcome of an environment's call; for an agent, that there is news."""

    request_id: str
    call: int = 0
    value: object = None
    error: BaseException | None = None


@dataclass(kw_only=True)
class _Conversation:
    request: RolloutRequest  # as it was asked for
    problem: Problem
    kind: type[Environment] | type[Agent]
    environment: Environment | Agent | None = None  # made in its thread, by the first call
    session: Session | None = None  # of an agent
    calls: queue.SimpleQueue[ChatCall] = field(default_factory=queue.SimpleQueue)  # an agent's, not yet taken
    result: EnvironmentAnswer | None = None  # of an agent that has ended
    answered: Callable[[EnvironmentAnswer], None] = lambda answer: None
    key: str = ""
    so_far: Trajectory | None = None  # None: the environment has not started
    turn: RolloutRequest | None = None  # what an engine is to generate, or generates
    loop: asyncio.AbstractEventLoop | None = None
    call: int = 0
    asked_s: float = 0.0  # since when there is a deadline
    deadline_s: float | None = None  # of the call under way
    spent_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    busy: bool = False  # a thread has the loop
    abandoned: bool = False  # the thread that has the loop is to close it
    is_closing: bool = False  # its `close` has not returned, and nobody has said so


class Conversations(contextlib.AbstractContextManager["Conversations"]):
    """All of one rank and rollout, called from one thread."""

    def __init__(
        self,
        requests: Sequence[RolloutRequest],
        problems: Sequence[Problem],
        tokenizer: PreTrainedTokenizerBase,
        *,
        timeout_s: float,
        max_prompt_tokens: int,
        prompt_limit: str = "",
        unreleased: Callable[[str], object] = lambda why: None,
    ) -> None:
        """Begin the conversations of `requests`, if their problem has an environment, whose calls get `timeout_s`.
        `prompt_limit` says why `max_prompt_tokens`; `unreleased` is told, by other threads and maybe later, of each
        environment whose `close` fails."""
        self._tokenizer, self._timeout_s, self._longest = tokenizer, timeout_s, max_prompt_tokens
        self._limit, self._unreleased = prompt_limit, unreleased
        self._patience_s = timeout_s + MOMENT_S  # until a call that ignores its cancellation is given up
        self._closing: list[tuple[threading.Thread, _Conversation]] = []
        # by time, since all calls have as long; outdated ones are skipped
        self._deadlines: deque[tuple[float, str]] = deque()
        self._endpoint: Endpoint | None = None
        self._open: dict[str, _Conversation] = {}
        self.add(requests, problems)

    def add(self, requests: Sequence[RolloutRequest], problems: Sequence[Problem]) -> None:
        for request, problem in zip(requests, problems, strict=True):
            if (found := environment_of(problem.verifier)) is None:
                continue
            one = _Conversation(request=request, problem=problem, kind=found)
            if hasattr(found, "run"):
                one.session = Session(request, self._tokenizer, max_prompt_tokens=self._longest)
                self._endpoint = self._endpoint or Endpoint()
            self._open[request.request_id] = one

    def __exit__(self, *_: object) -> None:
        for name in list(self._open):
            self.drop(name)
        until = time.monotonic() + self._patience_s
        for thread, conversation in self._closing:
            thread.join(max(0.0, until - time.monotonic()))
            self._end_close(conversation, _OverdueError())  # where it blocks its thread
        if self._endpoint is not None:
            self._endpoint.close()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def turns(self, request_id: str) -> list[RolloutRequest]:
        """Return the turns to generate; without any, the environment is to be asked."""
        one = self._open[request_id]
        return one.session.turns if one.session is not None else [one.turn] if one.turn is not None else []

    def is_agent(self, request_id: str) -> bool:
        return self._open[request_id].session is not None

    def is_open(self, turn_id: str) -> bool:
        """Return whether an agent waits for its turn."""
        session = self._session(turn_id)
        return session is not None and session.is_open(turn_id)

    def hear(self, response: Trajectory, parse: Parse) -> None:
        if (session := self._session(response.request_id)) is not None:
            session.hear(response, parse)
            if not session.turns:
                self._give_time(self._open[response.request_id.partition(TURN)[0]])

    def _session(self, turn_id: str) -> Session | None:
        name, is_agents, _ = turn_id.partition(TURN)
        return self._open[name].session if is_agents and name in self._open else None

    def ask(self, request_id: str, response: Trajectory | None, answered: Callable[[EnvironmentAnswer], None]) -> None:
        """Give the environment a response, or start it; `answered` is called in another thread."""
        conversation = self._open[request_id]
        if conversation.session is not None:
            self._ask_agent(conversation, answered)
            return
        method, argument = "start", cast("object", conversation.problem)
        if response is not None:
            assert conversation.so_far is not None
            conversation.turn, conversation.so_far = None, resume.heard(conversation.so_far, response)
            text = self._tokenizer.decode(list(response.token_ids), skip_special_tokens=True)
            method, argument = "step", text
        conversation.call += 1
        call = conversation.call
        self._give_time(conversation)

        def ended(value: object, error: BaseException | None) -> None:
            answered(EnvironmentAnswer(request_id=request_id, call=call, value=value, error=error))

        self._run(conversation, method, argument, timeout_s=self._timeout_s, ended=ended)

    def _ask_agent(self, conversation: _Conversation, answered: Callable[[EnvironmentAnswer], None]) -> None:
        name, endpoint = conversation.request.request_id, self._endpoint
        assert endpoint is not None
        conversation.answered = answered
        if conversation.key:
            answered(EnvironmentAnswer(request_id=name))
            return

        def take(call: ChatCall) -> None:
            conversation.calls.put(call)
            conversation.answered(EnvironmentAnswer(request_id=name))

        def ended(value: object, error: BaseException | None) -> None:
            conversation.result = EnvironmentAnswer(request_id=name, value=value, error=error)
            conversation.answered(EnvironmentAnswer(request_id=name))

        conversation.key = endpoint.open(take)
        self._give_time(conversation)
        arguments = conversation.problem, endpoint.base_url, conversation.key
        self._run(conversation, "run", *arguments, timeout_s=None, ended=ended)

    def _run(
        self,
        conversation: _Conversation,
        method: str,
        *arguments: object,
        timeout_s: float | None,
        ended: Callable[[object, BaseException | None], None],
    ) -> None:
        conversation.busy = True

        async def call() -> object:
            if conversation.environment is None:
                conversation.environment = conversation.kind()
            return await getattr(conversation.environment, method)(*arguments)

        def work() -> None:
            value, error = None, None
            try:
                with conversation.lock:
                    if conversation.abandoned:  # before there was a loop in which to cancel anything
                        raise asyncio.CancelledError
                    conversation.loop = conversation.loop or _new_loop()
                value = conversation.loop.run_until_complete(_bounded(call, timeout_s))
            except BaseException as raised:  # code of others, which may also exit; told by `take`
                error = raised
            with conversation.lock:
                conversation.busy = False
            ended(value, error)
            if conversation.abandoned and conversation.loop is not None:
                self._close(conversation, conversation.loop)

        try:
            threading.Thread(target=work, name="environment", daemon=True).start()
        except RuntimeError as error:  # the system gives no further thread: those that are there go on
            conversation.busy = False
            ended(None, error)

    def take(self, answer: EnvironmentAnswer) -> RolloutRequest | list[RolloutRequest] | Trajectory | None:
        """Return the next turn, an agent's turns, or the whole conversation, which has failed where its environment
        did; None for a call that was given up."""
        conversation = self._open.get(answer.request_id)
        if conversation is None or conversation.call != answer.call:
            return None
        method = "run" if conversation.session is not None else "step" if conversation.so_far else "start"
        take = self._take_of_environment if conversation.session is None else self._take_of_agent
        try:
            found = take(conversation, answer)
        except Exception as error:  # of what code of others said; other conversations go on
            return self._end(conversation, failure=_told(conversation, method, error))
        return self._end(conversation, reward=found) if isinstance(found, float) else found

    def _take_of_environment(self, conversation: _Conversation, answer: EnvironmentAnswer) -> RolloutRequest | float:
        self._note_time(conversation)
        value = _value_of(answer, "step" if conversation.so_far else "start")
        return value if isinstance(value, float) else self._go_on(conversation, value)

    def _take_of_agent(self, conversation: _Conversation, answer: EnvironmentAnswer) -> list[RolloutRequest] | float:
        session, turns = cast("Session", conversation.session), list[RolloutRequest]()
        while not conversation.calls.empty():
            turns += session.ask(conversation.calls.get())
        if session.turns:
            self._note_time(conversation)
        elif conversation.deadline_s is None:  # it gave up what was open
            self._give_time(conversation)
        end = conversation.result or (answer if answer.error is not None else None)
        if end is None:
            return turns
        reward = 0.0
        if not (session.is_full and is_refusal(end.error)):
            reward = cast("float", _value_of(end, "run"))
        if not session.whole().token_ids:
            raise DataError("it ended without an answer of the policy")
        return reward

    def _give_time(self, conversation: _Conversation) -> None:
        self._note_time(conversation)
        conversation.asked_s = time.monotonic()
        conversation.deadline_s = conversation.asked_s + self._patience_s
        self._deadlines.append((conversation.deadline_s, conversation.request.request_id))

    @staticmethod
    def _note_time(conversation: _Conversation) -> None:
        """End what time was given: the policy has its turn, or the conversation is over."""
        if conversation.deadline_s is not None:
            conversation.spent_s += time.monotonic() - conversation.asked_s
            conversation.deadline_s = None

    def _is_due(self, deadline_s: float, name: str) -> bool:
        return name in self._open and self._open[name].deadline_s == deadline_s

    def wait_s(self) -> float | None:
        """Return the seconds until a call is overdue; None where none is under way."""
        while self._deadlines and not self._is_due(*self._deadlines[0]):
            self._deadlines.popleft()
        return max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else None

    def overdue(self) -> list[EnvironmentAnswer]:
        """Answer for environments that block their threads."""
        now = time.monotonic()
        past = [at for at in takewhile(lambda at: at[0] <= now, self._deadlines) if self._is_due(*at)]
        names = dict.fromkeys(name for _, name in past)
        return [EnvironmentAnswer(request_id=name, call=self._open[name].call, error=_OverdueError()) for name in names]

    def drop(self, request_id: str) -> None:
        conversation = self._open.pop(request_id)
        if conversation.session is not None and self._endpoint is not None:
            self._endpoint.forget(conversation.key)
            conversation.session.refuse_open()
        with conversation.lock:
            conversation.abandoned = conversation.busy
            if conversation.abandoned and conversation.session is not None and conversation.loop is not None:
                conversation.loop.call_soon_threadsafe(_cancel, conversation.loop)
        if conversation.loop is not None and not conversation.abandoned:
            arguments = (conversation, conversation.loop)
            thread = threading.Thread(target=self._close, args=arguments, name="environment", daemon=True)
            try:
                thread.start()
                self._closing.append((thread, conversation))
            except RuntimeError as error:
                conversation.loop.close()  # at least its files
                if hasattr(conversation.environment, "close"):
                    self._unreleased(_told(conversation, "close", error))

    def _close(self, conversation: _Conversation, loop: asyncio.AbstractEventLoop) -> None:
        """Let the environment release what it holds, and end what it left running."""
        close: Any = getattr(conversation.environment, "close", None)

        async def closed() -> None:
            if inspect.isawaitable(found := close()):
                await found

        conversation.is_closing = close is not None
        with contextlib.suppress(BaseException):  # it takes what `drop` may have cancelled when the call was over
            loop.run_until_complete(asyncio.sleep(0))
        try:
            if close is not None:
                loop.run_until_complete(_bounded(closed, self._timeout_s))
            self._end_close(conversation, None)
        except BaseException as error:  # code of others; the conversation is over, whatever it does
            self._end_close(conversation, error)
        _end_loop(loop, self._timeout_s)

    def _end_close(self, conversation: _Conversation, error: BaseException | None) -> None:
        """Tell how its `close` went, once."""
        with conversation.lock:
            is_first, conversation.is_closing = conversation.is_closing, False
        if is_first and error is not None:
            self._unreleased(_told(conversation, "close", error))

    def _go_on(self, conversation: _Conversation, said: Said) -> RolloutRequest | float:
        """Return the next turn; without room for one, the reward."""
        request, so_far = conversation.request, conversation.so_far
        if so_far is None:
            ids = chat.prompt_ids(self._tokenizer, said)
            if not 1 <= len(ids) <= self._longest:
                limit = self._limit if ids else ""
                raise DataError(f"it said {len(ids)} tokens, expected 1 to {self._longest} {limit}".rstrip())
            conversation.turn = replace(request, prompt_ids=ids)
            conversation.so_far = resume.nothing_of(conversation.turn)
            return conversation.turn
        room = request.sampling.max_new_tokens - len(so_far.token_ids)
        texts = [said] if isinstance(said, str) else [str(message["content"]) for message in said]
        ids = ()
        is_short = sum(map(len, texts)) <= 64 * room  # longer ones are not even tokenized: no token is as long
        if is_short:
            ids = chat.observation_ids(self._tokenizer, said, last_token=so_far.token_ids[-1])
        if room > 0 and is_short and not ids:
            raise DataError(f"it said {said!r:.80}, which has no tokens. Say what the policy is to go on from")
        if not is_short or len(ids) >= room:
            conversation.so_far = replace(so_far, finish_reason="length")
            return 0.0
        so_far = resume.said(so_far, ids)
        conversation.so_far = so_far
        conversation.turn = replace(
            request,
            prompt_ids=(*so_far.prompt_ids, *so_far.token_ids),
            num_earlier=len(so_far.token_ids),
            sampling=replace(request.sampling, max_new_tokens=room - len(ids)),
        )
        return conversation.turn

    def _end(self, conversation: _Conversation, *, reward: float = 0.0, failure: str = "") -> Trajectory:
        self.drop(conversation.request.request_id)
        if conversation.session is not None:
            self._note_time(conversation)
            conversation.so_far = conversation.session.whole()
        whole = conversation.so_far or resume.nothing_of(replace(conversation.request, prompt_ids=()))
        return replace(
            whole,
            loss_mask=() if all(whole.loss_mask) else whole.loss_mask,
            reward=reward,
            failure=failure,
            environment_s=max(1e-6, round(conversation.spent_s, 6)),
        )


class _OverdueError(TimeoutError):
    """A call took longer than `rollout.environment_timeout_s`."""


def _told(conversation: _Conversation, method: str, error: BaseException) -> str:
    """Return in one line what an environment did."""
    why = type(error).__name__
    with contextlib.suppress(Exception):  # of an error that cannot be told
        why = str(error) if isinstance(error, DataError) else _why(error, "answer")
    told = f"{conversation.problem.verifier}: {method}: {why:.300}"
    return told.encode(errors="backslashreplace").decode()


def _why(error: BaseException, waited_for: str) -> str:
    return f"no {waited_for} in time" if isinstance(error, _OverdueError) else repr(error)


def _value_of(answer: EnvironmentAnswer, method: str) -> Said | float:
    """Return what an environment said, or its reward. Raises DataError for anything else."""
    if answer.error is None:
        return checked(method, answer.value)
    raise DataError(_why(answer.error, "call" if method == "run" else "answer"))


async def _bounded(coroutine: Callable[[], Awaitable[object]], timeout_s: float | None) -> object:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await coroutine()
    except TimeoutError as error:
        if limit.expired():
            raise _OverdueError from error
        raise  # a limit of its own
    except (SystemExit, KeyboardInterrupt) as error:  # which would pass through the loop and leave it torn
        raise RuntimeError(repr(error)) from error


class _Tasks(weakref.WeakSet["asyncio.Task[Any]"]):
    """The tasks of one loop; `asyncio.all_tasks` looks through all loops."""

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        self.add(task := asyncio.Task(coroutine, loop=loop, **options))
        return task


def _new_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(_Tasks())
    return loop


def _cancel(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    own = loop.get_task_factory()
    tasks = own if isinstance(own, _Tasks) else asyncio.all_tasks(loop)  # an environment may have set its own
    return [task for task in tasks if task.cancel()]


def _end_loop(loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
    with contextlib.suppress(BaseException):
        if tasks := _cancel(loop):
            loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout_s))
    with contextlib.suppress(BaseException):
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), timeout_s))
    loop.close()
