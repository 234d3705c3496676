"""Weights between hosts, with faults on the link: engines have the old weights or the new ones, or are ended.

Four ranks on two hosts are threads here; memory, plans, mirrors, senders and receivers are real.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch

from specactor.config import WeightsSyncConfig
from specactor.errors import WeightSyncError
from specactor.weights_sync import memory, mirrors, pulls, push, receiver
from specactor.weights_sync.memory import SharedBuffer, open_address
from specactor.weights_sync.messages import Holding, Round
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


@pytest.fixture
def job() -> Job:
    return Job(0)


def test_what_a_host_lacks_crosses_once(job: Job) -> None:
    """The plan sends each host the two experts that it lacks; the norm is on both."""
    job.learn()
    job.passed = [0] * len(HOSTS)
    assert {report.link_bytes for report in job.reports()} == {4 * SIZE}
    assert job.passed == [SIZE] * 4
    assert job.right()
    assert job.mirrored() == [{2: SIZE}, {3: SIZE}, {0: SIZE}, {1: SIZE}]  # the norm lies behind an expert


def test_a_copy_on_another_host_that_differs_is_found(job: Job) -> None:
    """One bit of it, before engines of that host go on with it; in a push by the plan, and by buckets."""
    for by_plan in (True, False):
        job.senders = job.senders if by_plan else job.new_senders()
        job.learn()
        own = job.sources[2].buffer.data[SIZE:]  # the norm, which rank 0 has, too
        own[job.rng.randrange(SIZE)] ^= 1 << job.rng.randrange(8)
        found = job.push()
        assert all(isinstance(each, WeightSyncError) for each in found), found
        [text] = {str(each) for each in found}
        assert "norm is not the same on trainer ranks 0 and 2" in text
        assert "resume from a checkpoint of before this step" in text
        assert all(engine.killed for engine in job.engines.values())
        job.start()


@pytest.mark.parametrize("why", ["room", "making", "many"])
@pytest.mark.parametrize("lacking", [None, 1])
def test_a_first_push_crosses_once_where_there_is_memory(job: Job, lacking: int | None, why: str) -> None:
    """In rounds that are more than the buckets hold; one rank may have no memory to keep its own in: it has been told
    so, or finds out, or there are too many memories."""
    for rank, source in enumerate(job.sources):
        source.before = rank
    made, real = mirrors.Mirrors.make, push.room_bytes

    def room_bytes(local_ranks: int) -> int:
        return 0 if threading.current_thread().name == f"rank {lacking}" and why == "room" else real(local_ranks)

    def make(self: mirrors.Mirrors, crossings: Sequence[mirrors.Crossing], **most: Any) -> list[str]:
        problems = made(self, crossings, **most)
        kept = all(self is not each for sender in job.senders for each in sender._mirrors[:2])
        full = why == "making" and kept and lacking in {crossing.taker for crossing in crossings}
        return ["no memory"] * len(HOSTS) if full else problems

    job.senders, job.passed = job.new_senders(), [0] * len(HOSTS)
    job.learn()
    most = 3 if why == "many" and lacking is not None else push.MOST_KEPT
    with (
        mock.patch.object(push, "room_bytes", room_bytes),
        mock.patch.object(mirrors.Mirrors, "make", make),
        mock.patch.object(push, "MOST_KEPT", most),
    ):
        reports = job.reports()
    assert job.right()
    assert [report.num_rounds for report in reports] == [4] * 4
    crossed = [2 * SIZE, SIZE, SIZE, SIZE]  # what each rank hands over; aligned, the norm is a little behind
    again = [SIZE if why != "many" and lacking == (rank + 2) % 4 else 0 for rank in range(4)]
    if most == 3:  # of four rounds the last crosses again
        again[3] = SIZE
    assert [passed // SIZE * SIZE for passed in job.passed] == [a + b for a, b in zip(crossed, again, strict=True)]
    assert {report.link_bytes for report in reports} == {sum(job.passed)}
    assert not any(each._buffers for sender in job.senders for each in sender._mirrors), "the plan needs none"


def test_room_is_for_all_that_is_kept(job: Job) -> None:
    """Rank 2 takes both of rank 0's tensors, and has room for one: the round of the second crosses twice."""
    for rank, source in enumerate(job.sources):
        source.before, source.singly = rank, True
    job.senders, job.passed = job.new_senders(), [0] * len(HOSTS)
    job.learn()
    with mock.patch.object(push, "room_bytes", return_value=SIZE * 3 // 2):
        assert {report.num_rounds for report in job.reports()} == {4}
    assert job.right()
    assert [passed // SIZE for passed in job.passed] == [3, 2, 1, 1]


def test_what_was_kept_goes_back_where_no_plan_is_made(job: Job) -> None:
    for rank, source in enumerate(job.sources):
        source.before = rank
    job.senders = job.new_senders()
    job.learn()
    with ExitStack() as stack:
        for source in job.sources:
            stack.enter_context(mock.patch.object(source, "held", return_value=None))
        assert {report.num_rounds for report in job.reports()} == {4}
    assert job.right()
    assert not any(each._buffers for sender in job.senders for each in sender._mirrors[2:])


@pytest.mark.parametrize("deep", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_an_engine_has_the_old_weights_or_the_new_or_is_ended(job: Job, deep: bool) -> None:
    faults = ("flipped", "short", "stale", "of_another_owner", "late")
    for number in range(500 if deep else 40):
        fault, rank = faults[number % len(faults)], job.rng.randrange(len(HOSTS))
        job.old[rank] = [(job.sources[rank].buffer.data[:SIZE].clone(), (rank + 2) % 4)]
        job.learn()
        job.fault, job.faulty = getattr(job, fault), {rank}
        found = job.push()
        job.faulty = set()
        if fault == "late":
            assert all(isinstance(each, SyncReport) for each in found), found
            assert job.right()
            continue
        assert all(isinstance(each, WeightSyncError) for each in found), (fault, found)
        assert len({str(each) for each in found}) == 1
        assert "arrived with a wrong digest" in str(found[0])
        assert all(engine.killed for engine in job.engines.values()), fault
        job.start()


def test_a_link_that_is_cut_ends_the_push_before_any_engine_is_asked(job: Job) -> None:
    before = [engine.model.holds() for engine in job.engines.values()]
    flushed = [engine.flushed for engine in job.engines.values()]
    job.learn()
    job.fault, job.faulty, job.longest_s = job.cut, {2}, 5.0
    assert all(isinstance(each, Exception) for each in job.push())
    assert [engine.model.holds() for engine in job.engines.values()] == before
    assert [engine.flushed for engine in job.engines.values()] == flushed


def test_a_bucket_that_changed_on_the_link_leaves_the_engines_at_the_old_version(job: Job) -> None:
    before = [engine.model.holds() for engine in job.engines.values()]
    job.senders = job.new_senders()  # they have no plan
    job.learn()
    job.fault, job.faulty = job.flipped, {1}
    found = job.push()
    assert all("failed in its check stage" in str(each) and "expert.1 arrived" in str(each) for each in found), found
    assert [engine.model.holds() for engine in job.engines.values()] == before
    job.faulty = set()
    assert [report.num_rounds for report in job.reports()] == [1] * 4
    assert job.right()


def test_a_mirrored_bucket_that_changes_while_it_is_loaded_ends_the_engines(job: Job) -> None:
    """Its taker looks at it once more, as an owner does at its own."""
    job.senders = job.new_senders()
    job.learn()
    load = job.engines[3].receiver.load

    def damaged(rank: Any, payload: bytes) -> bytes:
        [mirror] = job.senders[2]._mirrors[2]._buffers.values()  # of the first round
        mirror.data[9] ^= 4 if msgspec.msgpack.decode(payload, type=Round).buckets else 0  # once
        return load(rank, payload)

    job.engines[3].receiver.load = damaged  # type: ignore[method-assign]
    found = job.push()
    assert all("expert.0 changed while it was loaded" in str(each) for each in found), found
    assert all(engine.killed for engine in job.engines.values())


def test_a_mirror_that_changes_is_found(job: Job) -> None:
    """By the owner's digest, though the link was right."""
    for rank in ENGINES:
        job.learn()
        bring, made = job.senders[rank]._plan.bring, job.senders[rank]._plan._mirrors  # type: ignore[union-attr]
        [number, *_] = made._buffers

        def damaged(bring: Any = bring, made: Any = made, number: int = number) -> None:
            bring()
            made.data(number)[7] ^= 2

        job.senders[rank]._plan.bring = damaged  # type: ignore[union-attr, method-assign]
        assert all("arrived with a wrong digest" in str(each) for each in job.push())
        assert all(engine.killed for engine in job.engines.values())
        job.start()


def test_a_host_without_engines_receives_nothing(job: Job) -> None:
    del job.engines[3]
    job.senders = job.new_senders()
    for number in range(3):
        job.learn()
        job.passed = [0] * len(HOSTS)
        job.reports()
        assert job.right()
        if number:
            assert job.passed == [0, 0, SIZE, SIZE]
            assert job.mirrored() == [{2: SIZE}, {3: SIZE}, {}, {}]


LOCK = WeightSyncError("CUDA could not lock 120 bytes of shared memory (error 2)")
FULL = OSError(12, "Cannot allocate memory")


def failing(rank: int, error: Exception, real: Callable[..., Any], good: int = 0) -> Callable[..., Any]:
    """As `real`, but for one rank, whose calls after the first `good` ones fail."""
    left = [good]

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == f"rank {rank}":
            left[0] -= 1
            if left[0] < 0:
                raise error
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("error", [LOCK, FULL])
@pytest.mark.parametrize("where", [mirrors, push])
def test_a_rank_without_memory_for_a_bucket_fails_the_push_on_all(job: Job, error: Exception, where: Any) -> None:
    before = [engine.model.holds() for engine in job.engines.values()]
    job.senders = job.new_senders()
    job.learn()
    with mock.patch.object(where, "SharedBuffer", failing(2, error, SharedBuffer)):
        found = job.push()
    assert all(isinstance(each, WeightSyncError) for each in found), found
    [text] = {str(each) for each in found}
    assert "failed in its check stage on rank 2" in text
    assert str(error) in text
    assert [engine.model.holds() for engine in job.engines.values()] == before
    assert not any(engine.killed for engine in job.engines.values())
    assert [report.num_rounds for report in job.reports()] == [1] * 4
    assert job.right()


@pytest.mark.parametrize("error", [LOCK, FULL])
@pytest.mark.parametrize("lacking", ["mirror", "own"])
def test_a_rank_that_cannot_take_part_in_the_plan_has_all_use_buckets(job: Job, error: Exception, lacking: str) -> None:
    job.senders = job.new_senders()
    job.learn()
    where: Any = {
        "mirror": (mirrors, "SharedBuffer", failing(2, error, SharedBuffer, good=1)),  # that of a bucket
        "own": (pulls, "open_address", failing(2, error, open_address)),
    }[lacking]
    with mock.patch.object(*where):
        reports = job.reports()
    [note] = {report.note for report in reports}
    assert "rank 2: " in note
    assert str(error) in note
    assert job.right()
    job.learn()
    assert {(report.num_rounds, report.note) for report in job.reports()} == {(1, "")}
    assert job.right()


def test_a_rank_without_room_for_what_comes_from_other_hosts_has_all_use_buckets(job: Job) -> None:
    """Nothing fails where it is only reserved: the kernel would end the rank when it is written."""

    def room_bytes(local_ranks: int) -> int:
        return SIZE - (threading.current_thread().name == "rank 2")

    job.senders = job.new_senders()
    job.learn()
    with mock.patch.object(pulls, "room_bytes", room_bytes):
        [note] = {report.note for report in job.reports()}
    size = f"{SIZE} bytes are needed, and a rank may take {SIZE - 1}"
    assert note == f"rank 2: no memory for what comes from other hosts: {size}"
    assert job.right()
    job.learn()
    assert {report.num_rounds for report in job.reports()} == {1}
    assert job.right()


@pytest.mark.parametrize("error", [LOCK, FULL])
def test_a_rank_that_cannot_share_its_weights_fails_the_push_on_all(job: Job, error: Exception) -> None:
    job.learn()
    with mock.patch.object(job.sources[1], "held", failing(1, error, job.sources[1].held)):
        found = job.push()
    [text] = {str(each) for each in found}
    assert f"stage on rank 1: memory could not be shared: {error}" in text


def test_an_engine_that_cannot_open_a_mirror_has_all_use_buckets(job: Job) -> None:
    job.senders = job.new_senders()
    job.learn()
    opened = iter(range(10))

    def read_only(address: Any) -> Any:
        if next(opened) == 6:  # after the two memories of its host that each engine opens, and two mirrors of one
            raise FULL
        return memory.read_only(address)

    with mock.patch.object(receiver, "read_only", read_only):
        [note] = {report.note for report in job.reports()}
    assert str(FULL) in note
    assert job.right()
    job.learn()
    assert {report.num_rounds for report in job.reports()} == {1}
    assert job.right()
