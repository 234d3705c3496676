"""The order in which engines and the trainer take a GPU's memory, on a device that refuses what it has no room for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from specactor import device_memory
from specactor.device_memory import DeviceMemory
from specactor.planning.memory import PHASES

T = TypeVar("T")
CAPACITY, STATIC = 80.0, 0.8
"""GB of the device; share of it for an engine's weights, keys and values, of what is free when it starts."""
WEIGHTS, POLICY, LEARNING, SYNC = 15.0, 8.0, 30.0, 20.0
"""GB of an engine's weights; of the trainer's parameters; of gradients and optimizer; of a sync's buffers."""


class OutOfMemoryError(Exception):
    pass


class Gpu:
    """What each owner has, and what happened."""

    def __init__(self) -> None:
        self.used: dict[str, float] = {}
        self.events: list[str] = []

    @property
    def free(self) -> float:
        return CAPACITY - sum(self.used.values())

    def take(self, owner: str, size: float) -> None:
        if size > self.free:
            raise OutOfMemoryError(f"{owner} wants {size:.0f} of {self.free:.0f} GB")
        self.used[owner] = size
        self.events.append(f"+{owner}")

    def give(self, owner: str) -> None:
        if self.used.pop(owner, None) is not None:
            self.events.append(f"-{owner}")


class Engine:
    """As SGLang's: it takes its share when it looks, at any time after its start, and the same again later."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.size = 0.0

    def wait_ready(self) -> None:
        self.size = self.gpu.free - (1 - STATIC) * CAPACITY
        if self.size < WEIGHTS + 20:
            raise OutOfMemoryError("too little is left for keys and values")
        self.resume_weights()
        self.resume_memory()

    def release_memory(self) -> None:
        self.gpu.give("weights")
        self.gpu.give("caches")

    def resume_weights(self) -> None:
        if "weights" not in self.gpu.used:
            self.gpu.take("weights", WEIGHTS)

    def resume_memory(self) -> None:
        self.resume_weights()
        if "caches" not in self.gpu.used:
            self.gpu.take("caches", self.size - WEIGHTS)


class Trainer:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        gpu.take("policy", POLICY)
        gpu.take("learning", LEARNING)

    def offload(self) -> None:
        self.gpu.give("learning")

    def reload(self) -> None:
        self.gpu.take("learning", LEARNING)


class Alone:
    """A job of one rank."""

    def together(self, phase: str, work: Callable[[], T]) -> T:
        return work()

    def barrier(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "in_use", lambda: 0)


def memory(gpu: Gpu, *, is_shared: bool = True) -> DeviceMemory:
    return DeviceMemory(Alone(), Engine(gpu), is_shared=is_shared)  # type: ignore[arg-type]


def test_engines_start_alone_and_give_way_to_the_trainer() -> None:
    gpu = Gpu()
    devices = memory(gpu)
    trainer = devices.start(lambda: Trainer(gpu), others=[("drafters", lambda: gpu.events.append("drafters"))])
    engines, trainers = ["+weights", "+caches", "-weights", "-caches"], ["+policy", "+learning"]
    assert gpu.events == ["drafters", *engines, *trainers]
    devices.to_weights(trainer)
    assert gpu.events[-2:] == ["-learning", "+weights"]
    for _ in range(3):
        gpu.take("what a sync needs", SYNC)
        gpu.give("what a sync needs")
        devices.to_engines()
        devices.to_engines()  # where an engine died, after another sync
        caches = STATIC * CAPACITY - WEIGHTS
        assert gpu.used == {"policy": POLICY, "weights": WEIGHTS, "caches": caches}, "their share is not left to chance"
        gpu.events.clear()
        devices.to_trainer(trainer)
        devices.to_weights(trainer)
        assert gpu.events == ["-weights", "-caches", "+learning", "-learning", "+weights"]


def test_what_is_in_use_is_looked_at_while_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of each phase, before anything is given back."""
    gpu = Gpu()
    monkeypatch.setattr(device_memory, "in_use", lambda: round(CAPACITY - gpu.free))
    devices = memory(gpu)
    trainer = devices.start(lambda: Trainer(gpu))
    devices.to_weights(trainer)
    devices.to_engines()
    devices.to_trainer(trainer)
    gpu.take("activations", 5.0)
    devices.to_weights(trainer)
    gpu.give("activations")
    gpu.take("buckets", 2.0)
    devices.to_engines()
    used = {"rollout": STATIC * CAPACITY + POLICY, "train": POLICY + LEARNING + 5, "sync": POLICY + WEIGHTS + 2}
    assert devices.used_bytes == used
    assert set(used) == set(PHASES), "those that are predicted"


@pytest.mark.parametrize("wrong", ["the trainer is made first", "it keeps its optimizer", "engines keep theirs"])
def test_wrong_orders_run_out_of_memory(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    devices = memory(gpu, is_shared=wrong != "the trainer is made first")
    if wrong == "it keeps its optimizer":
        monkeypatch.setattr(Trainer, "offload", lambda self: None)
    if wrong == "engines keep theirs":
        monkeypatch.setattr(Engine, "release_memory", lambda self: None)

    def begin() -> None:
        devices.to_weights(devices.start(lambda: Trainer(gpu)))
        devices.to_engines()

    with pytest.raises(OutOfMemoryError):
        begin()


def test_without_gpus_the_trainer_is_made_while_engines_start() -> None:
    gpu = Gpu()
    order: list[str] = []

    class Ready(Engine):
        def wait_ready(self) -> None:
            order.append("engines are ready")

    DeviceMemory(Alone(), Ready(gpu), is_shared=False).start(  # type: ignore[arg-type]
        lambda: order.append("trainer") or Trainer(gpu)  # type: ignore[func-returns-value]
    )
    assert order == ["trainer", "engines are ready"]
    assert "learning" in gpu.used, "nothing is handed over"


def test_pinned_memory_is_as_large_as_was_asked_for() -> None:
    """By the settings of the installed PyTorch, which without a GPU ignores names that it does not know, and refuses
    a value that is none."""
    known, change = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings
    before = known()
    try:
        change("garbage_collection_threshold:0.5")
        for _ in range(2):
            device_memory.pin_as_asked()
            assert known() == "garbage_collection_threshold:0.5," + device_memory._AS_ASKED
        for name in (part.partition(":")[0] for part in device_memory._AS_ASKED.split(",")):
            with pytest.raises(ValueError, match="stoull"):
                change(f"{name}:x")
    finally:
        change(before)
