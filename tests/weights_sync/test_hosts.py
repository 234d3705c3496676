"""Weights between hosts, with faults on the link: engines have the old weights or the new ones, or are ended."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import msgspec
import pytest

from specactor.errors import WeightSyncError
from specactor.weights_sync import mirrors, sender
from specactor.weights_sync.messages import Bucket
from specactor.weights_sync.sender import SyncReport
from tests.weights_sync.hosts_job import ENGINES, HOSTS, SIZE, Job


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
    made, real = mirrors.Mirrors.make, sender.room_bytes

    def room_bytes(local_ranks: int) -> int:
        return 0 if threading.current_thread().name == f"rank {lacking}" and why == "room" else real(local_ranks)

    def make(self: mirrors.Mirrors, crossings: Sequence[mirrors.Crossing], **most: Any) -> list[str]:
        problems = made(self, crossings, **most)
        kept = all(self is not each for one in job.senders for each in one._mirrors[:2])
        full = why == "making" and kept and lacking in {crossing.taker for crossing in crossings}
        return ["no memory"] * len(HOSTS) if full else problems

    job.senders, job.passed = job.new_senders(), [0] * len(HOSTS)
    job.learn()
    most = 3 if why == "many" and lacking is not None else sender.MOST_KEPT
    with (
        mock.patch.object(sender, "room_bytes", room_bytes),
        mock.patch.object(mirrors.Mirrors, "make", make),
        mock.patch.object(sender, "MOST_KEPT", most),
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
    assert not any(each._buffers for one in job.senders for each in one._mirrors), "the plan needs none"


def test_room_is_for_all_that_is_kept(job: Job) -> None:
    """Rank 2 takes both of rank 0's tensors, and has room for one: the round of the second crosses twice."""
    for rank, source in enumerate(job.sources):
        source.before, source.singly = rank, True
    job.senders, job.passed = job.new_senders(), [0] * len(HOSTS)
    job.learn()
    with mock.patch.object(sender, "room_bytes", return_value=SIZE * 3 // 2):
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
    assert not any(each._buffers for one in job.senders for each in one._mirrors[2:])


def ended_or_new(job: Job) -> set[str]:
    """What became of the engines: who had what is wrong is ended, and no other."""
    kinds = [(engine.killed, engine.model.holds() == job.model) for engine in job.engines.values()]
    return {"ended" if killed else "new" if is_new else "mixture" for killed, is_new in kinds}


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
        assert ended_or_new(job) == {"ended", "new"}, fault
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


def test_a_mirrored_bucket_that_changed_before_it_is_loaded_ends_the_engines(job: Job) -> None:
    job.senders = job.new_senders()
    job.learn()
    load = job.engines[3].receiver.load

    def damaged(rank: Any, payload: bytes) -> bytes:
        [mirror] = job.senders[2]._mirrors[2]._buffers.values()  # of the first round
        mirror.data[9] ^= 4 if msgspec.msgpack.decode(payload, type=tuple[Bucket, ...]) else 0  # once
        return load(rank, payload)

    job.engines[3].receiver.load = damaged  # type: ignore[method-assign]
    found = job.push()
    assert all("expert.0 arrived with a wrong digest" in str(each) for each in found), found
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
        assert ended_or_new(job) == {"ended", "new"}
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
