"""Process of `earlier_code`: contestants of the checkout in PYTHONPATH play what they are told to.

This file is of the present code. What it uses of `benchmarks` and `specactor` is there in both.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

import specactor
from specactor.types import RolloutRequest


class Order(msgspec.Struct, frozen=True):
    way: str
    requests: list[RolloutRequest]
    timeout_s: float


class Emitted(msgspec.Struct, frozen=True):
    request_id: str
    token_ids: tuple[int, ...]


class Played(msgspec.Struct, frozen=True):
    seconds: float
    emitted: list[Emitted]


def main() -> None:
    from benchmarks import speculation_speed as speed  # which imports this file where it is the present one
    from benchmarks.trained_models import Models

    target, draft, head, batch, folder, clock, *names = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what is printed must not stand between answers
    answers.write(f"{specactor.__file__}\n".encode())
    with_head = {"head": Path(head)} if "head" in Models.__dataclass_fields__ else {}  # which earlier code lacks
    models = Models(target=Path(target), draft=Path(draft), **with_head)
    with speed.contestants(models, int(batch), Path(folder), names) as players:
        ways = {player.name: player for player in players}
        answers.write(b"ready\n")
        last = ""
        for line in sys.stdin.buffer:
            order = msgspec.json.decode(line, type=Order)
            player = ways[order.way]
            if order.way != last:
                player.begin()
                last = order.way
            now = speed.processor_s if clock == "processor" else lambda engine: time.perf_counter()
            started = now(player.engine)
            responses = player.engine.generate(order.requests, timeout_s=order.timeout_s)
            seconds = now(player.engine) - started
            emitted = [Emitted(r.request_id, tuple(r.token_ids)) for r in responses]
            answers.write(msgspec.json.encode(Played(seconds, emitted)) + b"\n")


if __name__ == "__main__":
    main()
