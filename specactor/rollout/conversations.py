"""Conversations of the policy with environments: what happens between two of its turns.

A turn is a request whose prompt is the whole conversation so far: token in, token out, and since noise is keyed by
(seed, position), with the conversation's seed and positions in the whole of it, no token depends on where a turn was
cut, or on which engine goes on.

Invariants: a conversation holds the tokens that were sampled, one by one, and what was said in between; an environment
has one call at a time, which ends within its time or is given up; a conversation that failed says why; when it is over
nothing of it is left but, where an environment blocks its thread, that thread, which ends with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from specactor.data import chat
from specactor.data.environment import Environment, Said, checked, environment_of
from specactor.errors import DataError
from specactor.rollout.resume import joined
from specactor.types import Problem, RolloutRequest, Trajectory, VersionSpan

GRACE_S = 1.0
"""Beyond its time, until a call that does not heed its cancellation is given up."""
FILES_OF_LOOP, FREE_FILES = 3, 1024
"""Open files of an event loop, and for everything else."""
MAX_CHARACTERS_PER_TOKEN = 64
"""A longer observation, for the tokens that are left, is not even put into tokens."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of one call of an environment."""

    request_id: str
    call: int
    value: object = None
    error: BaseException | None = None


@dataclass(kw_only=True)
class _Conversation:
    request: RolloutRequest
    """As it was asked for."""
    problem: Problem
    environment: Environment
    so_far: Trajectory | None = None
    """None: the environment has not started."""
    turn: RolloutRequest | None = None
    """What an engine is to generate next, or generates."""
    loop: asyncio.AbstractEventLoop | None = None
    call: int = 0
    asked_s: float = 0.0
    deadline_s: float | None = None
    """Of the call under way."""
    spent_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    busy: bool = False
    """Whether a thread has the loop."""
    abandoned: bool = False
    """The thread that has the loop is to close it."""


class Conversations:
    """Of one rank and one rollout, over deaths of engines. All methods are called from one thread."""

    def __init__(
        self,
        requests: Sequence[RolloutRequest],
        problems: Sequence[Problem],
        tokenizer: PreTrainedTokenizerBase,
        *,
        timeout_s: float,
        max_prompt_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            requests: those to problems without an environment are passed over.
            problems: one per request.
            timeout_s: longest that one call of an environment may take.
        """
        self._tokenizer, self._timeout_s, self._longest = tokenizer, timeout_s, max_prompt_tokens
        self._clock = clock
        self._threads: list[threading.Thread] = []
        self._open = {
            request.request_id: _Conversation(request=request, problem=problem, environment=found())
            for request, problem in zip(requests, problems, strict=True)
            if (found := environment_of(problem.verifier)) is not None
        }
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = FREE_FILES + FILES_OF_LOOP * len(self._open)
        if soft < wanted:  # of engines and shared memory there are few; of loops as many as conversations
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))

    def __enter__(self) -> Conversations:
        return self

    def __exit__(self, *_: object) -> None:
        """What is not over is dropped; environments get their time to clean up."""
        for name in list(self._open):
            self.drop(name)
        until = self._clock() + self._timeout_s + GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def turn(self, request_id: str) -> RolloutRequest | None:
        """The turn that an engine is to generate; None: the environment is to be asked first."""
        return self._open[request_id].turn

    def ask(self, request_id: str, response: Trajectory | None, answered: Callable[[Answer], None]) -> None:
        """Tell the environment of a response, or to start; `answered` is called in another thread, for `take`."""
        conversation = self._open[request_id]
        environment = conversation.environment
        if response is None:
            coroutine: Callable[[], Awaitable[object]] = lambda: environment.start(conversation.problem)  # noqa: E731
        else:
            self._hear(conversation, response)
            text = self._tokenizer.decode(list(response.token_ids), skip_special_tokens=True)
            coroutine = lambda: environment.step(text)  # noqa: E731
        conversation.call += 1
        call, conversation.asked_s = conversation.call, self._clock()
        conversation.deadline_s = conversation.asked_s + self._timeout_s + GRACE_S
        conversation.busy = True

        def work() -> None:
            value, error = None, None
            try:
                conversation.loop = conversation.loop or asyncio.new_event_loop()
                value = conversation.loop.run_until_complete(_bounded(coroutine, self._timeout_s))
            except BaseException as raised:  # code of others, which may also exit; told by `take`
                error = raised
            with conversation.lock:
                conversation.busy = False
            answered(Answer(request_id=request_id, call=call, value=value, error=error))
            if conversation.abandoned and conversation.loop is not None:
                _close(conversation.loop, environment, self._timeout_s)

        threading.Thread(target=work, name="environment", daemon=True).start()

    def take(self, answer: Answer) -> RolloutRequest | Trajectory | None:
        """The next turn, or the whole conversation; None: the call had been given up.

        Raises DataError for what no environment may return.
        """
        conversation = self._open.get(answer.request_id)
        if conversation is None or conversation.call != answer.call:
            return None
        conversation.deadline_s = None
        conversation.spent_s += self._clock() - conversation.asked_s
        name, method = conversation.problem.verifier, "step" if conversation.so_far else "start"
        if answer.error is not None:
            why = "no answer in time" if isinstance(answer.error, TimeoutError) else repr(answer.error)
            return self._end(conversation, failure=f"{name}: {method}: {why:.300}")
        value = checked(name, method, answer.value)
        if isinstance(value, float):
            return self._end(conversation, reward=value)
        return self._go_on(conversation, value)

    def wait_s(self) -> float | None:
        """Until a call is overdue, if one is under way."""
        deadlines = [c.deadline_s for c in self._open.values() if c.deadline_s is not None]
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None

    def overdue(self) -> list[Answer]:
        """In the name of calls whose environments block their threads."""
        now = self._clock()
        return [
            Answer(request_id=name, call=c.call, error=TimeoutError())
            for name, c in self._open.items()
            if c.deadline_s is not None and c.deadline_s <= now
        ]

    def drop(self, request_id: str) -> None:
        """The conversation is over, whatever its environment is doing."""
        conversation = self._open.pop(request_id)
        with conversation.lock:
            conversation.abandoned = conversation.busy
        if conversation.loop is not None and not conversation.abandoned:
            arguments = (conversation.loop, conversation.environment, self._timeout_s)
            self._threads.append(threading.Thread(target=_close, args=arguments, name="environment", daemon=True))
            self._threads[-1].start()

    def _hear(self, conversation: _Conversation, response: Trajectory) -> None:
        """Append what was sampled."""
        before = conversation.so_far
        assert before is not None
        start = len(before.token_ids)
        spans = [replace(s, start=s.start + start, end=s.end + start) for s in response.spans]
        conversation.turn = None
        conversation.so_far = replace(
            before,
            token_ids=(*before.token_ids, *response.token_ids),
            logprobs=(*before.logprobs, *response.logprobs),
            finish_reason=response.finish_reason,
            spans=joined((*before.spans, *spans)),
            loss_mask=before.loss_mask + (True,) * len(response.token_ids),
            routed_experts=response.routed_experts if not start else b"",
        )

    def _go_on(self, conversation: _Conversation, said: Said) -> RolloutRequest | Trajectory:
        """Append what the environment said, and make the next turn of it, if there is room for one."""
        request, so_far = conversation.request, conversation.so_far
        if so_far is None:
            ids = self._first(conversation, said)
            conversation.turn = replace(request, prompt_ids=ids)
            conversation.so_far = _nothing_of(conversation.turn)
            return conversation.turn
        room = request.sampling.max_new_tokens - len(so_far.token_ids)
        texts = [said] if isinstance(said, str) else [str(message["content"]) for message in said]
        ids = ()
        if sum(map(len, texts)) <= MAX_CHARACTERS_PER_TOKEN * room:
            ids = chat.observation_ids(self._tokenizer, said, last_token=so_far.token_ids[-1])
            if len(ids) >= room:
                ids = ()
        if not ids:
            conversation.so_far = replace(so_far, finish_reason="length")
            return self._end(conversation, reward=0.0)
        start, end = len(so_far.token_ids), len(so_far.token_ids) + len(ids)
        span = VersionSpan(version=so_far.spans[-1].version, start=start, end=end)
        so_far = replace(
            so_far,
            token_ids=(*so_far.token_ids, *ids),
            logprobs=(*so_far.logprobs, *(0.0 for _ in ids)),
            spans=joined((*so_far.spans, span)),
            loss_mask=so_far.loss_mask + (False,) * len(ids),
        )
        conversation.so_far = so_far
        conversation.turn = replace(
            request,
            prompt_ids=(*so_far.prompt_ids, *so_far.token_ids),
            num_earlier=end,
            sampling=replace(request.sampling, max_new_tokens=room - len(ids)),
        )
        return conversation.turn

    def _first(self, conversation: _Conversation, said: Said) -> tuple[int, ...]:
        """Tokens of the prompt. Raises DataError when there are too many, or none."""
        ids, problem = chat.prompt_ids(self._tokenizer, said), conversation.problem
        if not 1 <= len(ids) <= self._longest:
            raise DataError(
                f"environment {problem.verifier}: problem {problem.index}: start said {len(ids)} tokens, expected 1 to "
                f"{self._longest} (the model's context less rollout.max_new_tokens). Let it say less."
            )
        return ids

    def _end(self, conversation: _Conversation, *, reward: float = 0.0, failure: str = "") -> Trajectory:
        self.drop(conversation.request.request_id)
        whole = conversation.so_far or _nothing_of(replace(conversation.request, prompt_ids=()))
        mask = () if all(whole.loss_mask) else whole.loss_mask
        return replace(
            whole, loss_mask=mask, reward=reward, failure=failure, environment_s=round(conversation.spent_s, 6)
        )


def _nothing_of(request: RolloutRequest) -> Trajectory:
    return Trajectory(
        request_id=request.request_id,
        group_id=request.group_id,
        prompt_ids=request.prompt_ids,
        token_ids=(),
        logprobs=(),
        finish_reason="stop",
        spans=(),
        seed=request.seed,
    )


async def _bounded(coroutine: Callable[[], Awaitable[object]], timeout_s: float) -> object:
    try:
        async with asyncio.timeout(timeout_s):
            return await coroutine()
    except (SystemExit, KeyboardInterrupt) as error:  # which would pass through the loop and leave it torn
        raise RuntimeError(repr(error)) from error


def _close(loop: asyncio.AbstractEventLoop, environment: Environment, timeout_s: float) -> None:
    """Let the environment clean up, and end what it has left running."""
    with contextlib.suppress(BaseException):  # code of others; the conversation is over, whatever it does
        if close := getattr(environment, "close", None):
            loop.run_until_complete(_bounded(close, timeout_s))
    with contextlib.suppress(BaseException):
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout_s))
        loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
