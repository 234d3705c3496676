"""What the engines of one host are told to read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from specactor.weights_sync.cuda_ipc import GpuMemory
from specactor.weights_sync.memory import Address, SharedBuffer
from specactor.weights_sync.messages import Holding
from specactor.weights_sync.plan import Block, Held, Span
from specactor.weights_sync.pulls import JobPlan

WIDTH = 64


def tensor(name: str, memory: int, at: int) -> Held:
    return Held(name, WIDTH, (Block(Span(memory, at, 0, WIDTH, 1), 0, 0),))


def on_gpu(buffer: SharedBuffer, uuid: str) -> Address:
    return msgspec.structs.replace(buffer.address(), gpu=GpuMemory(uuid=uuid, handles=(), parts=()))


def plan_of(holdings: list[Holding], rank: int) -> JobPlan:
    collective: Any = SimpleNamespace(rank=rank)
    return JobPlan(collective, holdings, [0] * len(holdings), None)


def test_an_engine_is_near_to_all_ranks_on_its_gpu() -> None:
    """Two ranks on one GPU have equal parts of what the first rank hands over: one has a, the other b, both have c."""
    buffers = [SharedBuffer(3 * WIDTH) for _ in range(3)]
    giver = tuple(tensor(name, 0, at * WIDTH) for at, name in enumerate("abc"))
    places = [{"a": 0, "b": WIDTH, "c": 2 * WIDTH}, {"a": WIDTH, "c": 0}, {"b": 2 * WIDTH, "c": WIDTH}]
    holdings = [
        Holding(addresses=(on_gpu(buffer, uuid),), tensors=giver if rank == 0 else (), places=places[rank])
        for rank, (buffer, uuid) in enumerate(zip(buffers, ("GPU-x", "GPU-y", "GPU-y"), strict=True))
    ]
    plan = plan_of(holdings, 0)
    near = {held.name: held.blocks[0].span for held in plan.holding.near["GPU-y"]}
    assert (near["a"].memory, near["a"].at) == (1, WIDTH)
    assert (near["b"].memory, near["b"].at) == (2, 2 * WIDTH)
    assert near["c"].memory in (1, 2)
    assert near["c"].at == places[near["c"].memory]["c"]
    assert plan.holding.near["GPU-x"] == ()
    plan.close()
    for buffer in buffers:
        buffer.close()


def test_a_memory_that_is_not_there_keeps_its_number() -> None:
    buffer = SharedBuffer(WIDTH)
    buffer.data[:] = 7
    holding = Holding(addresses=(None, buffer.address()), tensors=(tensor("a", 1, 0),))
    plan = plan_of([holding], 0)
    assert {number: int(memory[0]) for number, memory in plan._memories.items()} == {1: 7}
    plan.close()
    buffer.close()


def test_engines_are_told_why_they_cannot_read_a_gpu_of_their_own_host() -> None:
    buffers = [SharedBuffer(WIDTH) for _ in range(2)]
    holdings = [
        Holding(addresses=(buffer.address(),), tensors=(tensor(name, 0, 0),), refusals={f"GPU-{name}": name})
        for buffer, name in zip(buffers, "ab", strict=True)
    ]
    plan = plan_of(holdings, 0)
    assert plan.holding.refusals == {"GPU-a": "a", "GPU-b": "b"}
    plan.close()
    collective: Any = SimpleNamespace(rank=0)
    plan = JobPlan(collective, holdings, [0, 1], None)
    assert plan.holding.refusals == {"GPU-a": "a"}
    plan.close()
    for buffer in buffers:
        buffer.close()
