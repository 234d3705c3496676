"""Four ranks on two hosts, which are threads here; memory, plans, mirrors, senders and receivers are real."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from specactor.config import WeightsSyncConfig
from specactor.errors import WeightSyncError
from specactor.weights_sync.memory import SharedBuffer
from specactor.weights_sync.messages import Holding
from specactor.weights_sync.plan import Block, Held, Span
from specactor.weights_sync.sender import SyncReport, WeightSender
from tests.weights_sync.test_pull_faults import COLUMNS, NAMES, ROWS, Engine

HOSTS = (0, 0, 1, 1)
ENGINES = (0, 3)
"""Ranks that own one."""
HELD = (("expert.0", "norm"), ("expert.1",), ("expert.2", "norm"), ("expert.3",))
SIZE = ROWS * COLUMNS * 4
LONGEST_S = 60.0
Passed = list[tuple[torch.Tensor, int]]


class Rank:
    """As a `Collective`; what all ranks share is the job's."""

    def __init__(self, job: Job, rank: int) -> None:
        self.rank, self._job = rank, job

    def gather(self, value: Any, kind: Any) -> list[Any]:
        self._job.box[self.rank] = msgspec.msgpack.encode(value)
        self._job.met.wait(self._job.longest_s)
        found = [msgspec.msgpack.decode(part, type=kind) for part in self._job.box]
        self._job.met.wait(self._job.longest_s)
        return found

    def any(self, value: bool) -> bool:
        return any(self.gather(value, bool))

    def barrier(self) -> None:
        self.any(False)

    def pass_bytes(self, outgoing: Iterable[tuple[torch.Tensor, int]], incoming: Passed) -> None:
        passed = [(data.clone(), to) for data, to in outgoing]
        if self.rank in self._job.faulty:
            passed = self._job.fault(self.rank, passed)
        for data, to in passed:
            self._job.link[self.rank, to].put(data)
            self._job.passed[self.rank] += data.numel()
        for data, of in incoming:
            arrived = self._job.link[of, self.rank].get(timeout=self._job.longest_s)
            data[: len(arrived)] = arrived  # what is missing keeps what was there


class Source:
    """One rank's weights."""

    hosts = HOSTS
    on_device = None

    def __init__(self, rank: int) -> None:
        self.names = HELD[rank]
        self.buffer = SharedBuffer(len(self.names) * SIZE)
        self.weights = self.buffer.data.view(torch.float32).view(len(self.names), ROWS, COLUMNS)
        self._round = [i for i, name in enumerate(self.names) if name != "norm" or rank == 0]
        self.before = 0  # rounds, in which it hands over nothing
        self.singly = False  # a tensor per round
        tensors = [Held(name, SIZE, (Block(Span(0, i * SIZE, 0, SIZE, 1), 0, 0),)) for i, name in enumerate(self.names)]
        self._holding = Holding(addresses=(self.buffer.address(),), tensors=tuple(tensors))

    def rounds(self, capacity_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield from ([] for _ in range(self.before))
        for part in [[i] for i in self._round] if self.singly else [self._round]:
            yield [(self.names[i], self.weights[i]) for i in part]

    def held(self, capacity_bytes: int) -> Holding:
        return self._holding


class Job:
    """Pushes one after the other, each with a fault on the link."""

    def __init__(self, seed: int) -> None:
        self.rng, self.numbers, self.version = random.Random(seed), np.random.default_rng(seed), 0
        self.met, self.box = threading.Barrier(len(HOSTS)), [b""] * len(HOSTS)
        ranks = range(len(HOSTS))
        self.link = {(a, b): queue.Queue[torch.Tensor]() for a in ranks for b in ranks}
        self.longest_s = LONGEST_S
        self.passed, self.faulty, self.old = [0] * len(HOSTS), set[int](), dict[int, Passed]()
        self.fault: Callable[[int, Passed], Passed] = lambda rank, passed: passed
        self.sources = [Source(rank) for rank in range(len(HOSTS))]
        self.senders = self.new_senders()
        self.engines: dict[int, Engine] = {}
        self.start()

    def new_senders(self) -> list[WeightSender]:
        config = WeightsSyncConfig(bucket_bytes=2**16)
        return [WeightSender(config, Rank(self, rank)) for rank in range(len(HOSTS))]  # type: ignore[arg-type]

    def start(self) -> None:
        """New engines, a first push by buckets, and one by the plan."""
        self.engines = {rank: Engine() for rank in ENGINES}
        for num_rounds in (1, 0):
            self.learn()
            [report, *others] = self.reports()
            assert all(other.num_rounds == report.num_rounds == num_rounds for other in others)
            assert self.right()

    def learn(self) -> None:
        self.version += 1
        model = {name: torch.from_numpy(self.numbers.standard_normal((ROWS, COLUMNS))) for name in NAMES}
        for source in self.sources:
            source.weights.copy_(torch.stack([model[name] for name in source.names]))
        self.model = torch.stack([model[name] for name in NAMES]).float().numpy().tobytes()

    def right(self) -> bool:
        return all(engine.model.holds() == self.model for engine in self.engines.values())

    def mirrored(self) -> list[dict[int, int]]:
        """By rank, bytes of its mirrors for the plan."""
        plans: Any = [sender._plan for sender in self.senders]
        return [{number: b.data.numel() for number, b in plan._mirrors._buffers.items()} for plan in plans]

    def push(self) -> list[SyncReport | BaseException]:
        """What came of it on every rank."""
        found: list[Any] = [None] * len(HOSTS)

        def one(rank: int) -> None:
            engines = [self.engines[rank]] if rank in self.engines else []
            try:
                found[rank] = self.senders[rank].push(self.sources[rank], engines, version=self.version)
            except Exception as error:
                found[rank] = error
                if not isinstance(error, WeightSyncError):
                    self.met.abort()  # a process that ends takes the others' connections along

        threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}") for rank in range(len(HOSTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def reports(self) -> list[SyncReport]:
        found = self.push()
        assert all(isinstance(each, SyncReport) for each in found), found
        return found  # type: ignore[return-value]

    # What can happen to what a rank sends.

    def flipped(self, rank: int, passed: Passed) -> Passed:
        data, _ = self.rng.choice(passed)
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        return passed

    def short(self, rank: int, passed: Passed) -> Passed:
        which = self.rng.randrange(len(passed))
        return [(d[: self.rng.randrange(len(d))] if i == which else d, to) for i, (d, to) in enumerate(passed)]

    def stale(self, rank: int, passed: Passed) -> Passed:
        return self.old[rank]

    def of_another_owner(self, rank: int, passed: Passed) -> Passed:
        """The expert of the other rank of this host."""
        other = self.sources[rank ^ 1].buffer.data
        return [(other[: len(data)].clone(), to) for data, to in passed]

    def late(self, rank: int, passed: Passed) -> Passed:
        threading.Event().wait(0.05)
        return passed

    def cut(self, rank: int, passed: Passed) -> Passed:
        raise RuntimeError("Connection closed by peer")
