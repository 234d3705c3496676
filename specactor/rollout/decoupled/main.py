"""A drafter process: ``python -m specactor.rollout.decoupled.main --fd N``, N an inherited socket to its owner.

It becomes the guard of its own child, which alone imports torch and SGLang. The owner sends a `DrafterSpec` as one line
of JSON and gets a `Started` back; later it may ask, in a line of WORK or TRACE, for the `Work` since it asked last, or
bring new weights in a line of RENEW, to which the answer is a `Renewed`, or put it to SLEEP and WAKE it, or ask whether
it is ALIVE, to which the answer is a `Rested`. Such a line begins with the number of the question and a space, and so
does the answer's. The end of the socket is the end of the process. Standard output and error are the log.
"""

from __future__ import annotations

import argparse
import importlib
import os
import traceback
from socket import socket
from typing import TYPE_CHECKING

import msgspec

from specactor.rollout import process_guard

if TYPE_CHECKING:
    from specactor.rollout.decoupled.backend import Continuer
    from specactor.rollout.decoupled.spec import DrafterSpec

_UNBOUNDED = 1 << 40


def main() -> None:
    """Entry point; does not return."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the owner")
    fd: int = parser.parse_args().fd
    os.set_inheritable(fd, False)
    process_guard.run_guarded(fd, lambda: _draft(socket(fileno=fd)))


def _draft(owner: socket) -> None:
    from specactor.rollout.decoupled.loop import Loop, serve
    from specactor.rollout.decoupled.spec import ALIVE, RENEW, SLEEP, TRACE, WAKE, DrafterSpec, Started

    lines = owner.makefile("rb", buffering=0)  # a question that a buffer held would never make the socket readable
    line = lines.readline()
    if not line:
        return  # the owner is gone

    def tell(started: Started) -> None:
        owner.sendall(msgspec.json.encode(started) + b"\n")

    def answer(loop: Loop) -> bool:
        number, _, asked = lines.readline().partition(b" ")
        if not asked:
            return False  # the owner is gone
        said: msgspec.Struct
        if asked.startswith(RENEW):
            said = loop.renew(asked.removeprefix(RENEW))
        elif asked.strip() in (SLEEP, WAKE):
            said = loop.sleep() if asked.strip() == SLEEP else loop.wake()
        elif asked.strip() == ALIVE:
            said = loop.rested()
        else:
            said = loop.work(trace=asked.strip() == TRACE)
        owner.sendall(number + b" " + msgspec.json.encode(said) + b"\n")
        return True

    try:
        spec = msgspec.json.decode(line, type=DrafterSpec)
        if spec.core is not None:
            os.sched_setaffinity(0, {spec.core})
        continuer, max_tokens = _continuer(spec)
        serve(
            continuer,
            endpoint=spec.endpoint,
            keys=spec.keys,
            max_tokens=max_tokens,
            owner_fd=owner.fileno(),
            asleep=spec.engine is not None,
            on_ready=tell,
            on_owner=answer,
        )
    except Exception as error:  # the boundary of the process: the owner reports it, if it still waits
        traceback.print_exc()
        tell(Started(error=f"{type(error).__name__}: {error}"))


def _continuer(spec: DrafterSpec) -> tuple[Continuer, int]:
    """With the tokens of all texts that it has room for."""
    if spec.continuer != "model":
        module, _, attribute = spec.continuer.partition(":")
        made: Continuer = getattr(importlib.import_module(module), attribute)(spec)
        return made, spec.kv_tokens or _UNBOUNDED
    from specactor.rollout.sglang.draft_backend import DraftBackend

    backend = DraftBackend.start(spec)
    return backend, spec.kv_tokens or backend.max_tokens


if __name__ == "__main__":
    main()
