"""What a drafter process does: `run` starts what drafts, and answers the process's owner between two batches."""

from __future__ import annotations

import importlib
import os
import traceback
from socket import socket

from specactor.rollout import frames
from specactor.rollout.decoupled.backend import Continuer
from specactor.rollout.decoupled.loop import Loop, serve
from specactor.rollout.decoupled.spec import (
    TO_DRAFTER,
    AskAlive,
    AskWork,
    DrafterSpec,
    FromDrafter,
    Renew,
    Sleep,
    Start,
    ToDrafter,
    Wake,
)
from specactor.rollout.frames import Failed, ProtocolError

_UNBOUNDED = 1 << 40


def run(owner: socket) -> None:
    """Draft until the end of the stream. The first message names the drafter (`Start`)."""
    frame = frames.read(owner, TO_DRAFTER)
    if frame is None:
        return
    start = frame[1]
    if not isinstance(start, Start):
        raise ProtocolError(f"first message {type(start).__name__}, expected Start")

    def say(call: int, message: FromDrafter) -> None:
        owner.sendall(frames.pack(call, message))

    def answer(loop: Loop) -> bool:
        frame = frames.read(owner, TO_DRAFTER)
        if frame is None:
            return False  # the owner is gone, or wants no more
        header, message = frame
        say(header.call, _answer(loop, message))
        return True

    try:
        if start.spec.core is not None:
            os.sched_setaffinity(0, {start.spec.core})
        continuer, max_tokens = _continuer(start.spec)
        serve(
            continuer,
            endpoint=start.spec.endpoint,
            keys=start.spec.keys,
            max_tokens=max_tokens,
            owner_fd=owner.fileno(),
            asleep=start.spec.engine is not None,
            on_ready=lambda started: say(frames.START, started),
            on_owner=answer,
        )
    except Exception as error:  # the boundary of the process: the owner reports it, if it still waits
        traceback.print_exc()
        say(frames.START, Failed(message=f"{type(error).__name__}: {error}"))


def _answer(loop: Loop, message: ToDrafter) -> FromDrafter:
    match message:
        case AskWork():
            return loop.work(trace=message.trace)
        case Renew():
            return loop.renew(message.weights)
        case Sleep():
            return loop.sleep()
        case Wake():
            return loop.wake()
        case AskAlive():
            return loop.rested()
        case Start():
            raise ProtocolError("a second Start")


def _continuer(spec: DrafterSpec) -> tuple[Continuer, int]:
    """With the tokens of all texts that it has room for."""
    if spec.continuer != "model":
        module, _, attribute = spec.continuer.partition(":")
        made: Continuer = getattr(importlib.import_module(module), attribute)(spec)
        return made, spec.kv_tokens or _UNBOUNDED
    from specactor.rollout.sglang.draft_backend import DraftBackend

    backend = DraftBackend.start(spec)
    return backend, spec.kv_tokens or backend.max_tokens
