"""Engines that are killed in every stage of a weight sync: what the others hold, what is left, how it goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from specactor.config import WeightsSyncConfig
from specactor.errors import EngineError
from specactor.parallel.collective import Collective
from specactor.rollout.sglang.engine_client import Engine
from specactor.weights_sync.messages import CHECK, COMMIT, LOAD, PLAN, PULL
from specactor.weights_sync.sender import WeightSender
from tests.ending import still_runs

if TYPE_CHECKING:
    from tests.weights_sync.sync_script import Bench

STAGES = [*((False, call) for call in (CHECK, LOAD, PLAN, COMMIT)), *((True, call) for call in (PULL, COMMIT))]
MOMENTS = ("before", "during", "after")
VICTIMS = ("scheduler", "host", "guard")
FIRST = [(*stage, MOMENTS[i % 3], VICTIMS[(i + i // 3) % 3], i % 2) for i, stage in enumerate(STAGES)]
"""In `make check`: every stage once, every moment and every victim twice."""
CASES = [(*stage, *further) for stage, *further in itertools.product(STAGES, MOMENTS, VICTIMS, (0, 1))]
random.Random(0).shuffle(CASES)
CASES = [*FIRST, *(case for case in CASES if case not in FIRST)][:95]
"""By plan or not, the call in which an engine is struck, when, which process of it, which engine. Ranks are struck
22 times besides."""
GONE_S = 30.0


def campaign(bench: Bench, numbers: Iterable[int]) -> list[dict[str, Any]]:
    """What came of each of the cases; weights go back and forth between two versions. Collective."""
    shards, parameters = bench.shards(), list(bench.trainer._parameters())
    sender = WeightSender(WeightsSyncConfig(), bench.collective)
    versions = [[p.detach().clone() for p in parameters], [p.detach() * 1.25 for p in parameters]]
    known = []
    for version in versions:
        put(parameters, version)
        bench.push(shards, sender=sender)
        known.append(states(bench))
    put(parameters, [pair[i % 2] for i, pair in enumerate(zip(*versions, strict=True))])
    bench.push(shards, sender=sender)
    mixture = states(bench)
    put(parameters, versions[1])
    bench.push(shards, sender=sender)
    open_files, found = memory_files(), []
    for turn, number in enumerate(numbers):
        by_plan, call, moment, victim, index = CASES[number]
        put(parameters, versions[turn % 2])
        expected = {"new": known[turn % 2], "old": known[1 - turn % 2]}
        held = [belongings(engine.pid) for engine in bench.pool.engines]
        with striking(call, moment, victim, index) as struck:
            pushed = bench.push(shards, sender=sender if by_plan else None)
        hold = [
            next((name for name, of in expected.items() if answer == of[i]), "dead" if answer is None else "mixture")
            for i, answer in enumerate(states(bench))
        ]
        bench.collective.together("restart", bench.pool.restart_lost)
        left = [x for i, of in enumerate(held) if hold[i] == "dead" for x in remaining(*of)]
        again = bench.push(shards, sender=sender)
        found.append(
            {
                "case": [by_plan, call, moment, victim, index],
                "struck": bool(struck) or bool(bench.collective.rank),
                "failed": "error" in pushed,
                "alike": pushed["alike"],
                "hold": hold,
                "left": left,
                "again": "error" not in again and states(bench) == expected["new"],
            }
        )
    sender.close()
    found[-1]["more_memory"] = memory_files() - open_files
    found[-1]["would be seen"] = all(m not in of for m, of in zip(mixture, zip(*known, strict=True), strict=True))
    return found


def end_a_rank(bench: Bench, victim: int, by_plan: bool, exchange: int) -> None:
    """The rank is killed in a push, at the exchange of this number. Rank 0 notes before what its engines have."""
    shards, sender = bench.shards(), WeightSender(WeightsSyncConfig(), bench.collective)
    bench.push(shards, sender=sender)
    held = [belongings(engine.pid) for engine in bench.pool.engines]
    if held:
        owned = [(p.pid, p.create_time()) for processes, _ in held for p in processes]
        noted = [owned, [file for _, files in held for file in files]]
        (bench.folder / "held.json").write_text(json.dumps(noted))
    original, met = Collective.gather_bytes, itertools.count(1)

    def gather_bytes(self: Collective, payload: bytes, *, only_first: bool = False) -> list[bytes]:
        if bench.collective.rank == victim and next(met) == exchange:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, payload, only_first=only_first)

    bench.collective.barrier()
    Collective.gather_bytes = gather_bytes  # type: ignore[method-assign]
    bench.push(shards, sender=sender if by_plan else None)


def put(parameters: list[torch.nn.Parameter], version: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(parameters, version)


def states(bench: Bench) -> list[Any]:
    """What each engine of this rank answers; None: it is dead."""

    def ask(engine: Engine) -> Any:
        try:
            return bench.answers_of(engine)
        except EngineError:
            return None

    return bench.collective.together("ask", lambda: [ask(engine) for engine in bench.pool.engines])


@contextlib.contextmanager
def striking(call: str, moment: str, victim: str, index: int) -> Iterator[list[int]]:
    """One process of an engine is killed at, in or after its first call of a kind; yields whom that struck."""
    original, struck, late = Engine.rank_call, [], []

    def strike(engine: Engine) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            os.kill(process_of(engine, victim), signal.SIGKILL)

    def rank_call(self: Engine, name: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        if struck or (self.index, name) != (index, call):
            return original(self, name, payload, timeout_s=timeout_s)
        struck.append(self.pid)
        if moment == "before":
            strike(self)
        if moment == "during":
            late.append(threading.Timer(random.random() * 0.01, strike, [self]))
            late[0].start()
        reply = original(self, name, payload, timeout_s=timeout_s)
        if moment == "after":
            strike(self)
        return reply

    Engine.rank_call = rank_call  # type: ignore[method-assign]
    try:
        yield struck
    finally:
        Engine.rank_call = original  # type: ignore[method-assign]
        for timer in late:
            timer.join()


def process_of(engine: Engine, victim: str) -> int:
    """The guard around the engine, the process in it that speaks to the rank, or a scheduler."""
    if victim == "guard" or engine.ready is None:
        return engine.pid
    if victim == "host":
        return psutil.Process(engine.pid).children()[0].pid
    return engine.ready.scheduler_pids[-1]


def belongings(pid: int) -> tuple[list[psutil.Process], set[str]]:
    """An engine's processes, and the files in shared memory that they have mapped."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    lines = [line for p in processes for line in Path(f"/proc/{p.pid}/maps").read_text().splitlines()]
    return processes, {line.split()[5] for line in lines if " /dev/shm/" in line and "deleted" not in line}


def remaining(processes: list[psutil.Process], files: set[str]) -> list[str]:
    """What of a killed engine's is still there after a while."""
    deadline = time.monotonic() + GONE_S
    while True:
        left = [str(p) for p in processes if still_runs(p)]
        left += [file for file in files if Path(file).exists()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def memory_files() -> int:
    """Memory files that this process has open."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += "memfd:" in os.readlink(entry)
    return count
