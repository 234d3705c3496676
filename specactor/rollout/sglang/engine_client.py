"""A rollout engine as its trainer rank sees it.

Invariants: no wait is unbounded; a death of server, scheduler or SGLang is a `ChildDied`, before which `on_finished`
had every response that came; after `stop` or `kill` no process of the engine is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from specactor.cpu import sglang as cpu
from specactor.errors import EngineError
from specactor.parallel.layout import ENGINE_RESERVED_OF_INPUT
from specactor.rollout import resume
from specactor.rollout.child_process import Call, ChildDied, ChildProcess
from specactor.rollout.frames import Failed
from specactor.rollout.sglang import speculation_calls
from specactor.rollout.sglang.engine_protocol import (
    FROM_ENGINE,
    Command,
    Done,
    EngineSpec,
    Finished,
    FromEngine,
    Generate,
    Progress,
    RankCall,
    Ready,
    ToEngine,
)
from specactor.rollout.speculation.counters import Counts
from specactor.trace import Span
from specactor.types import RolloutRequest, Trajectory
from specactor.waits import ANSWER_S

__all__ = ["Engine", "EngineSpec"]


class Engine(ChildProcess[FromEngine]):
    """One engine. Methods may be called from several threads."""

    def __init__(
        self, spec: EngineSpec, *, run: str = "specactor.rollout.sglang.engine_server:run", **environment: str
    ) -> None:
        """Start its process, without waiting. Args: run: what the process does. environment: further variables of
        it."""
        self.spec, self.index = spec, spec.index
        self.ready: Ready | None = None
        self.version = 0  # of the weights that the engine holds; trajectories of later calls carry it
        super().__init__(
            run,
            spec,
            name=f"engine {spec.index}",
            answers=FROM_ENGINE,
            environment=cpu.process_environment(spec.devices) | environment | speculation_calls.start_environment(spec),
            log_file=spec.log_file,
        )

    def wait_ready(self, timeout_s: float) -> Ready:
        """Wait until it takes requests. Raises EngineError, with the end of the log, otherwise."""
        if self.ready is None:
            ready = super().wait_ready(timeout_s)
            assert isinstance(ready, Ready)
            self.ready = ready
        return self.ready

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        on_finished: Callable[[Trajectory], None] | None = None,
        on_progress: Callable[[RolloutRequest, Trajectory], None] | None = None,
        report_tokens: int = 0,
    ) -> list[Trajectory]:
        """Return responses in the order of `requests`; callbacks run in the caller's thread.

        `on_progress` sees what a request has after every `report_tokens` tokens, without experts.

        Raises ChildDied when the engine dies or shows no progress for `EngineConfig.request_timeout_s`, and
        EngineError, the engine being unharmed, when a request cannot be served.
        """
        if not requests:
            return []
        if self.ready is None:
            raise EngineError(f"{self.name} is not ready. Call wait_ready first.")
        check_servable(requests, self.spec, self.ready)
        finished: dict[int, Trajectory] = {}
        running: dict[int, _Parts] = {}
        bare = [resume.bare(request) for request in requests]
        with self.call(Generate(requests=bare, report_tokens=report_tokens)) as call:
            while True:
                message = self._next(call)
                if isinstance(message, Done):
                    break
                if isinstance(message, Failed):
                    raise EngineError(f"{self.name}: {message.message}")
                if isinstance(message, Finished):
                    trajectory = whole_response(requests[message.request], message, self.spec, self.version)
                    finished[message.request] = trajectory
                    if on_finished is not None:
                        on_finished(trajectory)
                if isinstance(message, Progress) and message.request is not None and on_progress is not None:
                    request, parts = requests[message.request], running.setdefault(message.request, ([], []))
                    on_progress(request, response_so_far(request, message, parts, self.version))
        return [finished[i] for i in range(len(requests))]

    def rank_call(self, name: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Run a function of `rank_calls` in every rank, between two steps; return an answer per rank. Raises
        EngineError, the engine being unharmed, when it raised on a rank, and ChildDied when a rank is not back within
        `timeout_s`."""
        message = self._ask(RankCall(name=name, payload=payload, timeout_s=timeout_s), timeout_s)
        if isinstance(message, Done):
            return message.replies
        raise EngineError(f"{self.name}: rank call {name!r}: {_text(message)}")

    def flush(self) -> None:
        """Drop the prefix cache. Raises EngineError when requests are running."""
        for _ in range(20):  # the last response comes a moment before the scheduler counts itself idle
            if all(self.rank_call("flush", b"", timeout_s=ANSWER_S)):
                return
            time.sleep(0.1)
        raise EngineError(f"{self.name}: flush: requests are still running. Abort them or wait for them first.")

    def parse_tools(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        """Return a response without its tool calls, and each call's name and arguments in JSON."""
        payload = msgspec.json.encode((text, tools))
        answer = self.rank_call("parse_tools", payload, timeout_s=ANSWER_S)[0]
        return msgspec.json.decode(answer, type=tuple[str, list[tuple[str, str]]])

    def abort(self) -> None:
        """End all running requests, with finish reason ``abort``."""
        self._do(Command(verb="abort"))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End these requests, where they run."""
        self._do(Command(verb="abort_requests", request_ids=list(request_ids)))

    def speculation_counts(self) -> dict[str, Counts]:
        """Return what speculation did since the last call, per drafter."""
        if self.spec.speculation.mode == "off":
            return {}
        reply = self.rank_call(speculation_calls.REPORT, b"", timeout_s=ANSWER_S)[0]  # rank 0 decides
        return msgspec.json.decode(reply, type=dict[str, Counts])

    def trace(self, *, on: bool) -> list[Span]:
        """Return the spans since the last call; record from now on, or do not."""
        if self.spec.speculation.mode == "off":
            return []
        reply = self.rank_call(speculation_calls.TRACE, b"on" if on else b"off", timeout_s=ANSWER_S)[0]
        return msgspec.msgpack.decode(reply, type=list[Span])

    def release_memory(self) -> None:
        """Free the device's memory, where the platform can. Raises EngineError when requests are running."""
        self.flush()  # SGLang's scheduler dies of a release before it counts itself idle
        self._do(Command(verb="release_memory"))

    def resume_weights(self) -> None:
        """Take the memory for weights again, undefined until the next sync."""
        self._do(Command(verb="resume_weights"))

    def resume_memory(self) -> None:
        """Take all other memory again."""
        self._do(Command(verb="resume_memory"))

    def _next(self, call: Call[FromEngine]) -> FromEngine:
        """Return the next message; an engine that makes no progress is ended (ChildDied)."""
        patience, began = self.spec.config.request_timeout_s, time.monotonic()
        # It may wait for others of this engine.
        while (left := patience - (time.monotonic() - max(began, self.moved_s))) > 0:
            with suppress(TimeoutError):
                return call.next(left)
        raise self._given_up(f"made no progress for {patience:g} s and was ended.")

    def _do(self, message: Command) -> None:
        answer = self._ask(message, ANSWER_S)
        if not isinstance(answer, Done):
            raise EngineError(f"{self.name}: {_text(answer)}")

    def _ask(self, message: ToEngine, timeout_s: float) -> FromEngine:
        """Return its answer. An engine that gives none in time is ended (ChildDied)."""
        try:
            return self.ask(message, timeout_s)
        except TimeoutError:
            raise self._given_up(f"did not answer within {timeout_s:g} s and was ended.") from None

    def _given_up(self, why: str) -> ChildDied:
        self.kill()
        return ChildDied(self.with_log(why))


def _text(message: FromEngine) -> str:
    return message.message if isinstance(message, Failed) else f"unexpected answer {type(message).__name__}"


@contextmanager
def running(spec: EngineSpec, **environment: str) -> Iterator[Engine]:
    """Run an engine for the block. Raises EngineError if it does not start."""
    engine = Engine(spec, **environment)
    try:
        engine.wait_ready(spec.config.start_timeout_s)
        yield engine
    finally:
        engine.stop()


_Parts = tuple[list[int], list[float]]  # tokens and log-probabilities that a request has reported so far


def check_servable(requests: Sequence[RolloutRequest], spec: EngineSpec, ready: Ready) -> None:
    """Raise EngineError for a request that is too long, or has a wrong beginning."""
    limit = ready.max_sequence_tokens
    for request in requests:
        resume.check(request, with_experts=spec.config.routed_experts)
        prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens
        if not 1 <= prompt <= limit - new:
            raise EngineError(
                f"request {request.request_id}: prompt of {prompt} tokens and rollout.max_new_tokens = {new}, "
                f"expected 1 <= prompt <= {limit} - max_new_tokens: engine {spec.index} has a context of "
                f"{spec.context_length} and a KV pool of {ready.kv_tokens} tokens. Shorten one of them, "
                "or raise rollout.engine.max_total_tokens."
            )
        given = prompt + resume.num_begun(request)
        longest = limit + spec.reserved_tokens - ENGINE_RESERVED_OF_INPUT
        if given > longest:
            raise EngineError(
                f"request {request.request_id}: {given} tokens of prompt and beginning, expected <= {longest}: SGLang "
                f"takes no longer input on engine {spec.index}, however few tokens are to follow. Shorten prompts by "
                f"{given - longest}, or raise rollout.engine.max_total_tokens."
            )


def whole_response(request: RolloutRequest, message: Finished, spec: EngineSpec, version: int) -> Trajectory:
    """Return the whole response. One that was aborted while it waited is empty where experts are wanted. Raises
    EngineError for any other without them."""
    dropped = spec.config.routed_experts and bool(message.token_ids) and not message.routed_experts
    if dropped and message.finish_reason != "abort":
        raise EngineError(
            f"request {request.request_id}: a response of {len(message.token_ids)} tokens that ended with "
            f"{message.finish_reason!r} without routed experts, expected those of every token with "
            "enable_return_routed_experts. Engine and SGLang disagree: check its version with specactor doctor."
        )
    # Aborted while it waited: nobody can say by now which experts computed what it had emitted, so it is empty.
    return resume.whole(
        request,
        token_ids=() if dropped else message.token_ids,
        logprobs=() if dropped else message.logprobs,
        finish_reason=message.finish_reason,
        version=version,
        routed_experts=message.routed_experts,
    )


def response_so_far(request: RolloutRequest, news: Progress, parts: _Parts, version: int) -> Trajectory:
    """Add the news to `parts`, and return what the request has, without experts."""
    tokens, logprobs = parts
    tokens += news.token_ids
    logprobs += news.logprobs
    return resume.whole(request, token_ids=tokens, logprobs=logprobs, finish_reason="abort", version=version)
