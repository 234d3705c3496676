"""A drafter process with a scripted continuer; its last line tells how many requests it still held."""

from __future__ import annotations

import json
import sys

import msgspec

from specactor.rollout.decoupled.main import serve
from specactor.rollout.decoupled.spec import State
from specactor.rollout.decoupled.transport import Keys
from tests.rollout.decoupled.scripted import Scripted


def ready(told: State) -> None:
    print(msgspec.json.encode(told).decode(), flush=True)


def main(endpoint: str, step_s: str, keys: str) -> None:
    continuer = Scripted(step_s=float(step_s))
    serve(
        continuer,
        endpoint=endpoint,
        keys=msgspec.json.decode(keys, type=Keys) if keys else None,
        owner_fd=sys.stdin.fileno(),
        on_ready=ready,
    )
    print(json.dumps({"held": len(continuer.seen), "calls": continuer.calls}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
