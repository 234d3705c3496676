"""Copies of the weights that differ between hosts end a run: engines that are started again would be given the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specactor.actor import SpecActor
from specactor.config import EngineConfig
from specactor.errors import CopiesDifferError, EngineError, WeightSyncError
from specactor.weights_sync.memory import SharedBuffer
from specactor.weights_sync.messages import Holding, PlanReply
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

    def any_lost(self) -> bool:
        return any(engine.killed for engine in self.engines)

    def restart_lost(self, ended: Collection[int] = ()) -> tuple[int, ...]:
        lost = self.any_lost()
        if lost:
            self._job.engines[self._rank] = Engine()
            self.started += 1
            self.counted += self.engines[0].index not in ended
        return (self._rank,) if lost else ()

    def set_version(self, version: int) -> None: ...


class Together(Rank):
    def together(self, phase: str, act: Callable[[], Any]) -> Any:
        return act()


def sync(job: Job) -> tuple[list[Any], int, int]:
    """What `SpecActor.sync` did on every rank, how many engines it started, and how many for deaths of their own."""
    ranks = range(len(job.sources))
    pools, found = [Pool(job, rank) for rank in ranks], list[Any]([None for _ in ranks])

    def one(rank: int) -> None:
        actor: Any = SpecActor(
            config=SimpleNamespace(rollout=SimpleNamespace(engine=EngineConfig())),  # type: ignore[arg-type]
            trainer=None,  # type: ignore[arg-type]
            devices=SimpleNamespace(to_engines=lambda: None),  # type: ignore[arg-type]
            rollouts=SimpleNamespace(pool=pools[rank]),  # type: ignore[arg-type]
            sender=job.senders[rank],
            weights=job.sources[rank],
            collective=Together(job, rank),  # type: ignore[arg-type]
            progress=SimpleNamespace(note=lambda text: None),  # type: ignore[arg-type]
            distillation=None,
            on_trace=lambda step, spans: None,
            recorder=None,  # type: ignore[arg-type]
            audit=None,  # type: ignore[arg-type]
            version=job.version,
        )
        try:
            found[rank] = actor.sync()
        except WeightSyncError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}") for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, sum(pool.started for pool in pools), sum(pool.counted for pool in pools)


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
    found, started, _ = sync(job)
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
    found, started, counted = sync(job)
    assert not any(isinstance(each, WeightSyncError) for each in found), found
    assert started == 2  # none may keep a mixture
    assert counted == 1, "the other one lived until the sync ended it"
    assert job.right()


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
            index: [PlanReply(chunks=each) for each in engines[index]] for index in {0: (0,), 1: (1,), 2: (0, 1)}[rank]
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
