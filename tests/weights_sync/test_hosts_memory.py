"""Weights between hosts, where a rank has no memory for them: the push fails on all, or goes by buckets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from specactor.errors import WeightSyncError
from specactor.weights_sync import memory, mirrors, pulls, receiver, sender
from specactor.weights_sync.memory import LOCKED_BYTES, SharedBuffer, open_address
from tests.weights_sync.hosts_job import SIZE, Job


@pytest.fixture
def job() -> Job:
    return Job(0)


@pytest.mark.parametrize(("hosts", "size"), [((0, 0), 3000), ((0, 1, 1, 2), 1000)])
def test_a_bucket_is_as_large_as_what_goes_into_it(hosts: tuple[int, ...], size: int) -> None:
    """Its pages are locked by its rank, and by every engine rank of the host."""
    collective: Any = SimpleNamespace(rank=0)
    config: Any = SimpleNamespace(bucket_bytes=3000)
    push = sender.Push(config, collective, hosts, [], [], [], 1)
    assert [len(push._room(0, needed)) for needed in (1, size, size + 1)] == [size, size, size + 1]
    push.close()


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
@pytest.mark.parametrize("where", [mirrors, sender])
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
        job.learn()
        assert {(report.num_rounds, report.note) for report in job.reports()} == {(1, "")}, "asked again, told once"
    size = f"{SIZE} bytes are needed, and a rank may take {SIZE - 1}"
    assert note == f"rank 2: no memory for what comes from other hosts: {size}"
    assert job.right()
    for num_rounds in (1, 0):  # now there is room, and it makes the plan
        job.learn()
        assert {report.num_rounds for report in job.reports()} == {num_rounds}
        assert job.right()


def test_room_is_for_what_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large memory of another host, two bytes far apart: pages between are neither made nor locked."""
    alone: Any = SimpleNamespace(rank=0, gather=lambda value, kind: [value])
    end, locked = 100 * LOCKED_BYTES, list[int]()
    monkeypatch.setattr(memory, "register", lambda part: locked.append(part.numel()))
    monkeypatch.setattr(memory, "unregister", lambda part: None)
    mirrored = mirrors.Mirrors(alone, [0])
    cross = [mirrors.Crossing(0, 1, 0, 0, 1), mirrors.Crossing(0, 1, 0, end - 1, end)]
    for room, told in ((1, 1), (-1, 0)):
        assert mirrored.make(cross, most_bytes=room) == [
            f"no memory for what comes from other hosts: 2 bytes are needed, and a rank may take {told}"
        ]
    assert mirrored.make(cross, most_bytes=2) == [""]
    assert locked == [LOCKED_BYTES] * 2
    assert mirrored.data(0).numel() == end
    mirrored.close()


def test_pages_of_a_mirror_that_is_used_again_stay_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a push end at different bytes."""
    alone: Any = SimpleNamespace(rank=0, gather=lambda value, kind: [value])
    calls = list[int]()
    monkeypatch.setattr(memory, "register", lambda part: calls.append(part.numel() // LOCKED_BYTES))
    monkeypatch.setattr(memory, "unregister", lambda part: calls.append(-part.numel() // LOCKED_BYTES))
    mirrored = mirrors.Mirrors(alone, [0])
    for pieces in (4, 2, 3, 4, 5, 1):
        assert mirrored.make([mirrors.Crossing(0, 1, 0, 0, pieces * LOCKED_BYTES)]) == [""]
    assert calls == [4, -4, 5], "once, and again where the mirror grew"
    mirrored.close()
    assert calls[3:] == [-5]


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
