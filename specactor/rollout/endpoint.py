"""OpenAI's chat completions over HTTP on the loopback, for agents.

Invariants: a call needs an open session's key; what it asks for is done or refused, never ignored; `close` leaves no
port, thread or task.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from specactor.waits import ANSWER_S, MOMENT_S

MODEL = "policy"  # the name of what is trained; calls may give any other


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    messages: list[dict[str, Any]]
    model: str = MODEL
    n: int | None = 1
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None


class Refusal(Exception):  # noqa: N818  (an answer, like an HTTP status)
    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


def is_refusal(error: BaseException | None) -> bool:
    """Return whether a refusal ended an agent; each HTTP client has its own error for it."""
    left, seen = [error], list[int]()
    while left:
        if (one := left.pop()) is None or id(one) in seen:
            continue
        seen.append(id(one))
        for of in (one, getattr(one, "response", None)):
            if any(getattr(of, name, None) in (400, 410) for name in ("status_code", "status", "code")):
                return True
        left += [one.__cause__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
    return False


@dataclass(frozen=True, kw_only=True)
class Part:
    """One choice of an answer."""

    choice: int
    delta: dict[str, Any]
    tokens: list[tuple[str, float]] = field(default_factory=list)  # with their log-probabilities
    finish_reason: str
    num_prompt: int = 0
    num_completion: int = 0


@dataclass(kw_only=True)
class ChatCall:
    """One call under way; any thread may call `tell`."""

    body: Body
    loop: asyncio.AbstractEventLoop
    answers: asyncio.Queue[Part | Refusal] = field(default_factory=asyncio.Queue)
    missing: int = 1  # choices that are not answered; what was answered is sent when none is
    is_given_up: bool = False  # its client hung up before

    def tell(self, answer: Part | Refusal) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.answers.put_nowait, answer)


class Endpoint:
    """Serves all sessions of a rank, in its own thread."""

    def __init__(self) -> None:
        self._sessions: dict[str, Callable[[ChatCall], None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()
        try:
            self.base_url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self._end()
            raise

    def open(self, take: Callable[[ChatCall], None]) -> str:
        """Return a session's key; `take` gets its calls, in the endpoint's thread; one that is given up once more."""
        key = secrets.token_urlsafe(32)
        self._sessions[key] = take
        return key

    def forget(self, key: str) -> None:
        self._sessions.pop(key, None)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> str:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=MOMENT_S, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # calls whose clients have just hung up
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=MOMENT_S)

    def _session(self, request: web.Request) -> Callable[[ChatCall], None]:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self._sessions:
            raise Refusal("api_key: not that of a session under way. Use the one that run() was given.", "key", 401)
        return self._sessions[key]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            take = self._session(request)
            body = msgspec.json.decode(await request.read(), type=Body)
            call = ChatCall(body=body, loop=self._loop, missing=body.n or 1)
            head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": body.model}
            take(call)
            try:
                return await _answer(request, call, head)
            except (asyncio.CancelledError, ConnectionError):  # the client has hung up
                if call.missing:
                    call.is_given_up = True
                    take(call)
                raise
        except Refusal as refusal:
            return _refused(refusal)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _refused(Refusal(f"body: {error}. Correct or leave it out."))


async def _answer(request: web.Request, call: ChatCall, head: dict[str, Any]) -> web.StreamResponse:
    """Send the choices when all are there, and until then, from `ANSWER_S` on, what clients read over: OpenAI's hangs
    up after 600 s without a byte, and asks again, so that long answers would never arrive."""
    kind = "text/event-stream" if call.body.stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
    waiting = asyncio.ensure_future(_parts(call))
    try:
        while not (await asyncio.wait({waiting}, timeout=ANSWER_S))[0]:
            if not response.prepared:
                await response.prepare(request)
            await response.write(b":\n\n" if call.body.stream else b" ")
    finally:
        waiting.cancel()
    if response.prepared and waiting.exception() and request.transport is not None:
        request.transport.abort()  # it is too late for another status
        return response
    parts = waiting.result()
    if not response.prepared:
        await response.prepare(request)
    await response.write(_events(call, head, parts) if call.body.stream else _whole(call, head, parts))
    await response.write_eof()
    return response


async def _parts(call: ChatCall) -> list[Part]:
    parts: list[Part] = []
    while call.missing:
        answer = await call.answers.get()
        if isinstance(answer, Refusal):
            raise answer
        call.missing -= 1
        parts.append(answer)
    return sorted(parts, key=lambda part: part.choice)


def _whole(call: ChatCall, head: dict[str, Any], parts: Sequence[Part]) -> bytes:
    choices = [
        {
            "index": part.choice,
            "message": {"role": "assistant", "content": None, **part.delta},
            "logprobs": _logprobs(call, part),
            "finish_reason": part.finish_reason,
        }
        for part in parts
    ]
    return msgspec.json.encode({**head, "object": "chat.completion", "choices": choices, "usage": _usage(parts)})


def _events(call: ChatCall, head: dict[str, Any], parts: Sequence[Part]) -> bytes:
    """Return each choice whole, as a server-sent event."""
    head |= {"object": "chat.completion.chunk"}
    events: list[dict[str, Any]] = []
    for part in parts:
        choice = {"index": part.choice, "delta": {"role": "assistant"} | part.delta, "logprobs": _logprobs(call, part)}
        events.append({**head, "choices": [{**choice, "finish_reason": part.finish_reason}]})
    if (call.body.stream_options or {}).get("include_usage"):
        events.append({**head, "choices": [], "usage": _usage(parts)})
    return b"".join(b"data: %b\n\n" % data for data in (*map(msgspec.json.encode, events), b"[DONE]"))


def _logprobs(call: ChatCall, part: Part) -> dict[str, Any] | None:
    if not call.body.logprobs:
        return None
    tokens = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in part.tokens
    ]
    return {"content": tokens}


def _usage(parts: Sequence[Part]) -> dict[str, int]:
    prompt, completion = parts[0].num_prompt, sum(part.num_completion for part in parts)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _refused(refusal: Refusal) -> web.Response:
    error = {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": refusal.code}
    return web.json_response(body=msgspec.json.encode({"error": error}), status=refusal.status)
