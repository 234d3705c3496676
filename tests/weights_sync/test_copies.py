"""Copies of the weights that differ between hosts end a run: engines that are started again would be given the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from specactor import actor
from specactor.actor import SpecActor
from specactor.config import EngineConfig
from specactor.errors import CopiesDifferError, EngineError, WeightSyncError
from specactor.weights_sync.memory import SharedBuffer
from specactor.weights_sync.messages import Answer, Holding
from specactor.weights_sync.plan import Block, Chunk, Held, Span
from specactor.weights_sync.pulls import JobPlan
from tests.weights_sync.hosts_job import SIZE, Job, Rank
from tests.weights_sync.test_pull_faults import Engine

NORM_OF_RANK_2 = 2 * SIZE - 3


class Pool:
    """The engines of one rank, replaced when they were ended."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank, self.started, self.counted = job, rank, 0, 0

    @property
    def engines(self) -> list[Engine]:
        return [self._job.engines[self._rank]] if self._rank in self._job.engines else []

    def lost(self) -> tuple[int, ...]:
        return tuple(engine.index for engine in self.engines if engine.killed)

    def restart_lost(self, ended: Collection[int] = ()) -> tuple[int, ...]:
        lost = self.lost()
        if lost:
            self._job.engines[self._rank] = Engine()
            self.started += 1
            self.counted += self.engines[0].index not in ended
        return (self._rank,) if lost else ()

    def set_version(self, version: int) -> None: ...


class Together(Rank):
    def together(self, phase: str, act: Callable[[], Any]) -> Any:
        return act()


class Actors:
    """One of each rank, with the real `SpecActor.sync`."""

    def __init__(self, job: Job, *, max_restarts: int = 3) -> None:
        ranks = range(len(job.sources))
        self._job, self._pools = job, [Pool(job, rank) for rank in ranks]
        self._actors: list[Any] = [
            SpecActor(
                config=SimpleNamespace(  # type: ignore[arg-type]
                    rollout=SimpleNamespace(engine=EngineConfig(max_restarts=max_restarts))
                ),
                trainer=None,  # type: ignore[arg-type]
                devices=SimpleNamespace(to_engines=lambda: None),  # type: ignore[arg-type]
                rollouts=SimpleNamespace(pool=self._pools[rank]),  # type: ignore[arg-type]
                sender=job.senders[rank],
                weights=job.sources[rank],
                collective=Together(job, rank),  # type: ignore[arg-type]
                progress=SimpleNamespace(note=lambda text: None),  # type: ignore[arg-type]
                distillation=None,
                on_trace=lambda step, spans: None,
                recorder=None,  # type: ignore[arg-type]
                audit=None,  # type: ignore[arg-type]
            )
            for rank in ranks
        ]

    def sync(self) -> tuple[list[Any], int, int]:
        """What it did on every rank, how many engines were started so far, and how many for deaths of their own."""
        found = list[Any]([None for _ in self._actors])

        def one(rank: int) -> None:
            self._actors[rank].version = self._job.version
            try:
                found[rank] = self._actors[rank].sync()
            except WeightSyncError as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}") for rank in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found, sum(pool.started for pool in self._pools), sum(pool.counted for pool in self._pools)


@pytest.mark.parametrize("by_plan", [True, False])
@pytest.mark.parametrize("dies", [None, 0, 3])
def test_copies_that_differ_end_the_run_at_once(by_plan: bool, dies: int | None) -> None:
    """No engine is started again; also where one dies in that sync, be it the one that took the other copy."""
    job = Job(0)
    job.senders = job.senders if by_plan else job.new_senders()
    job.learn()
    job.sources[2].buffer.data[NORM_OF_RANK_2] ^= 16
    if dies is not None:
        die(job.engines[dies])
    found, started, _ = Actors(job).sync()
    assert [type(each) for each in found] == [CopiesDifferError] * 4, found
    [text] = {str(each) for each in found}
    assert "norm is not the same on trainer ranks 0 and 2" in text
    assert "resume from a checkpoint of before this step" in text
    assert started == 0
    assert all(engine.killed for engine in job.engines.values())


def test_an_engine_that_died_is_started_again() -> None:
    """So the tests above would see one that is."""
    job = Job(0)
    job.learn()
    die(job.engines[3])
    found, started, counted = Actors(job).sync()
    assert not any(isinstance(each, WeightSyncError) for each in found), found
    assert started == 1, "the other one had all of the new version"
    assert counted == 1
    assert job.right()


def steps_until_refused(happens: Callable[[Engine], None], *, apart: int = 1, most: int = 6) -> tuple[int, set[str]]:
    """How many steps go on though something happens in each one's first sync, and what the ranks say of the next."""
    job = Job(0)
    actors = Actors(job, max_restarts=2)
    for step in range(most):
        job.learn()
        job.version += apart - 1
        happens(job.engines[3])
        found, _, _ = actors.sync()
        if errors := {f"{type(each).__name__}: {each}" for each in found if isinstance(each, WeightSyncError)}:
            assert all(isinstance(each, WeightSyncError) for each in found), "all fail, or none"
            return step, errors
        assert job.right()
    return most, set()


def test_an_engine_that_lives_and_fails_in_every_step_ends_the_run() -> None:
    """Nothing else would: no restart of an engine that a failed sync ended is counted as its own."""
    steps, errors = steps_until_refused(lie)
    assert steps == 2
    [error] = errors
    assert "rollout.engine.max_restarts: 3 weight syncs failed with engines that lived, allowed are 2 in 100 " in error
    assert "Leave out a host that damages data" in error
    assert "engine 0, rank 0: experts arrived with a wrong digest" in error
    with mock.patch.object(actor, "RESTARTS_WITHIN", 0):  # the wrong version, which counts nothing
        assert steps_until_refused(lie)[0] == 6


def test_failed_syncs_of_long_ago_are_forgotten() -> None:
    assert steps_until_refused(lie, apart=50)[0] == 6  # never three within a hundred
    assert steps_until_refused(lie, apart=49)[0] == 2


def test_syncs_in_which_an_engine_died_are_counted_as_its_deaths_alone() -> None:
    assert steps_until_refused(die)[0] == 6


def lie(engine: Engine) -> None:
    """A digest in its next pull is wrong."""

    def wrong(reply: bytes) -> bytes:
        digests = msgspec.msgpack.decode(reply, type=Answer).digests
        return msgspec.msgpack.encode(Answer(digests=(digests[0] ^ 1, *digests[1:])))

    engine.answer = wrong


def die(engine: Engine) -> None:
    """In its next pull."""

    def gone(reply: bytes) -> bytes:
        engine.kill()
        raise EngineError("it is gone")

    engine.answer = gone


def test_a_copy_is_compared_with_all_that_go_to_its_places() -> None:
    """Three hosts with a copy each. Engines of the first have one rank, those of the second two, the last host has one
    of either; its copy is equal to the second's."""
    width, world = 64, 3
    job: Any = SimpleNamespace(met=threading.Barrier(world), box=[b""] * world, longest_s=60.0)
    memories = [SharedBuffer(width) for _ in range(world)]
    for rank, memory in enumerate(memories):
        memory.data.copy_(torch.full((width,), 1 if rank == 0 else 2, dtype=torch.uint8))
    tensors = (Held("norm", width, (Block(Span(0, 0, 0, width, 1), 0, 0),)),)
    holdings = [Holding(addresses=(memory.address(),), tensors=tensors) for memory in memories]
    found = [""] * world

    def one(rank: int) -> None:
        collective: Any = Rank(job, rank)
        plan = JobPlan(collective, holdings, range(world), None)
        part = (Chunk(("norm",), (Block(Span(rank, 0, 0, width, 1), 0, 0),)),)
        engines = {0: [part], 1: [part, part]}
        replies = {
            index: [Answer(chunks=each) for each in engines[index]] for index in {0: (0,), 1: (1,), 2: (0, 1)}[rank]
        }
        plan.learn(replies)
        found[rank] = plan.apart(plan.wanted(collective.gather(plan.digests(), tuple[int, ...])))
        plan.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[:2] == ["", ""]
    assert "norm is not the same on trainer ranks 0 and 2" in found[2]
