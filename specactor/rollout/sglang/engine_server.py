"""What an engine's process does: start SGLang, then answer the trainer rank's calls."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
import traceback
from pathlib import Path

import msgspec

from specactor.errors import EngineError
from specactor.rollout import frames
from specactor.rollout.frames import Failed, ProtocolError, is_final
from specactor.rollout.sglang.backend import Backend
from specactor.rollout.sglang.engine_protocol import (
    SPEC,
    TO_ENGINE,
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
from specactor.waits import ANSWER_S


def run(connection: socket.socket) -> None:
    """Serve until the end of the stream."""
    frame = frames.read(connection, SPEC)
    if frame is None:
        return
    start, _, spec = frame
    try:
        backend = _start(spec)
    except Exception as error:  # the boundary of the process
        traceback.print_exc()
        # What the trainer rank hears of a first start it takes for final; after a death it tries again.
        if is_final(error):
            connection.sendall(frames.pack(start, Failed(message=f"{type(error).__name__}: {error}")))
        return
    try:
        backend.loop.run_until_complete(_Server(backend, connection).serve(start))
    finally:
        backend.shutdown()


def _start(spec: EngineSpec) -> Backend:
    if not (Path(spec.model_dir) / "config.json").is_file():
        raise EngineError(f"model folder {spec.model_dir}: no config.json. Give a model in Hugging Face format.")
    print(f"specactor: engine {spec.index} of {spec.model_dir}, process {os.getpid()}", flush=True)
    backend = Backend(spec)
    replies = backend.rank_call("identify", b"start", timeout_s=ANSWER_S)
    ranks = [msgspec.json.decode(reply)["tp_rank"] for reply in replies]
    if ranks != list(range(spec.tensor_parallel)):
        raise EngineError(f"ranks {ranks} answered, expected 0..{spec.tensor_parallel - 1}")
    return backend


def _end_without(pid: int) -> None:
    print(f"specactor: scheduler {pid} died", flush=True)
    os._exit(1)  # the guard ends what else is there


class _Server:
    """Answers each call in its own task: an abort overtakes a generation."""

    def __init__(self, backend: Backend, connection: socket.socket) -> None:
        self._backend = backend
        self._connection = connection
        self._rank_calls = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, start: int) -> None:
        """Answer the call that started the engine, then all others."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        backend = self._backend
        ready = Ready(
            scheduler_pids=backend.scheduler_pids,
            max_sequence_tokens=backend.max_sequence_tokens,
            kv_tokens=backend.kv_tokens,
        )
        await self._send(start, ready)
        for pid in backend.scheduler_pids:  # SGLang looks at them every second, and heeds what it saw within five
            asyncio.get_running_loop().add_reader(os.pidfd_open(pid), _end_without, pid)
        while True:
            try:
                length, call, _ = frames.unpack_header(await reader.readexactly(frames.HEADER_BYTES))
                message = frames.decode(await reader.readexactly(length), TO_ENGINE)
            except (asyncio.IncompleteReadError, ConnectionResetError):
                return  # the trainer rank is gone, or wants no more
            task = asyncio.create_task(self._answer(call, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: int, message: ToEngine) -> None:
        try:
            answer = await self._dispatch(call, message)
        except Exception as error:  # the boundary of the process: the caller gets it, the engine goes on
            traceback.print_exc()
            sys.stderr.flush()
            text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            answer = Failed(message=text)
        await self._send(call, answer)

    async def _dispatch(self, call: int, message: ToEngine) -> FromEngine:
        match message:
            case Generate():
                await self._generate(call, message)
            case RankCall():
                async with self._rank_calls:
                    loop = asyncio.get_running_loop()
                    # The trainer rank gives up first, and ends the engine: a rank that hangs cannot be used again.
                    patience = message.timeout_s + 30.0
                    replies = await loop.run_in_executor(
                        None, self._backend.rank_call, message.name, message.payload, patience
                    )
                return Done(replies=replies)
            case Command():
                await self._command(message)
        return Done()

    async def _command(self, command: Command) -> None:
        match command.verb:
            case "abort":
                self._backend.abort_all()
            case "abort_requests":
                await self._backend.abort(command.request_ids)
            case "release_memory":
                await self._backend.release_memory()
            case "resume_weights":
                await self._backend.resume_memory(("weights",))
            case "resume_memory":
                await self._backend.resume_memory()
            case verb:
                raise ProtocolError(f"unknown verb {verb!r}")

    async def _generate(self, call: int, message: Generate) -> None:
        reported = time.monotonic()
        async for index, state, response in self._backend.generate(message.requests, message.report_tokens):
            if response is not None:
                await self._send(call, Finished(request=index, **response), last=False)
            elif message.report_tokens:
                news = Progress(request=index, token_ids=state[0], logprobs=state[1])
                await self._send(call, news, last=False)
            elif time.monotonic() - reported > 1.0:
                reported = time.monotonic()
                await self._send(call, Progress(), last=False)

    async def _send(self, call: int, message: FromEngine, *, last: bool = True) -> None:
        self._writer.write(frames.pack(call, message, last=last))
        await self._writer.drain()
