"""Faults by the thousand on the way of a pull: an engine has the old weights or the new ones, or is ended."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch

from specactor.config import WeightsSyncConfig
from specactor.errors import EngineError, WeightSyncError
from specactor.weights_sync import pulls, receiver
from specactor.weights_sync.digest import copy_and_digest, digest_spans
from specactor.weights_sync.memory import SharedBuffer
from specactor.weights_sync.messages import CHECK, COMMIT, LOAD, PLAN, PULL, Answer, Holding
from specactor.weights_sync.plan import Block, Held, Span
from specactor.weights_sync.receiver import Receiver
from specactor.weights_sync.sender import WeightSender

ROWS, COLUMNS = 6, 5
NAMES = (*(f"expert.{i}" for i in range(4)), "norm")


class Model(torch.nn.Module):
    """Two parameters of an engine: stacked experts, transposed, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.zeros(4, COLUMNS, ROWS))
        self.norm = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            target = self.norm if name == "norm" else self.experts[int(name[-1])].T
            target.copy_(tensor)

    def holds(self) -> bytes:
        return torch.cat([*self.experts.mT.reshape(4, -1), self.norm.view(-1)]).detach().numpy().tobytes()


class Engine:
    """One rank, which answers as a process would."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.receiver, self.model, self.tp_rank = Receiver(), Model(), 0
        self.killed, self.flushed, self.pulled = False, 0, threading.Event()
        self.answer: Callable[[bytes], bytes] = lambda reply: reply
        self.last = self.stale = b""

    def begin_weight_update(self) -> None: ...

    def end_weight_update(self) -> None: ...

    def flush_cache(self) -> None:
        self.flushed += 1

    @torch.no_grad()
    def rank_call(self, name: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        if self.killed:
            raise EngineError("it is gone")
        r = self.receiver
        calls: dict[str, Any] = {CHECK: r.check, LOAD: r.load, PLAN: r.plan, PULL: r.pull, COMMIT: r.commit}
        reply = calls[name](self, payload)
        if name == PULL:
            self.pulled.set()
            self.stale, self.last = self.last, reply
            reply = self.answer(reply)
        return [reply]

    @property
    def alive(self) -> bool:
        return not self.killed

    def kill(self) -> None:
        self.killed = True


class Source:
    """The trainer's weights, in shared memory."""

    hosts = (0,)
    on_device = None

    def __init__(self) -> None:
        self.buffer = SharedBuffer(len(NAMES) * ROWS * COLUMNS * 4)
        self.weights = self.buffer.data.view(torch.float32).view(len(NAMES), ROWS, COLUMNS)
        size = ROWS * COLUMNS * 4
        tensors = [Held(name, size, (Block(Span(0, i * size, 0, size, 1), 0, 0),)) for i, name in enumerate(NAMES)]
        self._holding = Holding(addresses=(self.buffer.address(),), tensors=tuple(tensors))

    def rounds(self, capacity_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield list(zip(NAMES, self.weights.unbind(0), strict=True))

    def held(self, capacity_bytes: int) -> Holding:
        return self._holding

    def holds(self) -> bytes:
        return self.weights.numpy().tobytes()


class Alone:
    """A job of one rank."""

    rank = 0

    def gather(self, value: Any, kind: Any) -> list[Any]:
        return [msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)]

    def any(self, value: bool) -> bool:
        return value

    def barrier(self) -> None: ...


class Job:
    """Pushes one after the other, each with a fault."""

    def __init__(self, seed: int) -> None:
        self.rng, self.source, self.engine, self.version = random.Random(seed), Source(), Engine(), 0
        self.numbers = np.random.default_rng(seed)
        self.sender = WeightSender(WeightsSyncConfig(bucket_bytes=2**16), Alone())  # type: ignore[arg-type]

    def learn(self) -> None:
        self.source.weights.copy_(torch.from_numpy(self.numbers.standard_normal(self.source.weights.shape)))
        self.version += 1

    def push(self) -> int:
        """Rounds of buckets."""
        self.engine.pulled.clear()
        return self.sender.push(self.source, [self.engine], version=self.version).num_rounds

    def flip_in_a_parameter(self) -> AbstractContextManager[Any]:
        where = self.rng.randrange(ROWS * COLUMNS * 4)

        def copy(parameters: Any, blocks: Any, memories: Any) -> int:
            copy_and_digest(parameters, blocks, memories)
            parameters[0][blocks[0].to + where % blocks[0].span.length] ^= 1 << self.rng.randrange(8)
            return copy_and_digest(parameters, blocks, None)

        return mock.patch.object(receiver, "copy_and_digest", copy)

    def change_meanwhile(self) -> AbstractContextManager[Any]:
        def digest(memories: Any, spans: Any) -> int:
            assert self.engine.pulled.wait(60)
            self.source.buffer.data[spans[0].at + self.rng.randrange(spans[0].length)] ^= 1 << self.rng.randrange(8)
            return digest_spans(memories, spans)

        return mock.patch.object(pulls, "digest_spans", digest)

    def read_too_little(self) -> AbstractContextManager[Any]:
        keep = self.rng.random()

        def copy(parameters: Any, blocks: Any, memories: Any) -> int:
            some = int(keep * len(blocks))
            copy_and_digest(parameters[:some], blocks[:some], memories)
            return copy_and_digest(parameters, blocks, None)

        return mock.patch.object(receiver, "copy_and_digest", copy)

    def answer_of_before(self) -> AbstractContextManager[Any]:
        return mock.patch.object(self.engine, "answer", side_effect=lambda _: self.engine.stale)

    def answer_cut(self) -> AbstractContextManager[Any]:
        return mock.patch.object(self.engine, "answer", return_value=msgspec.msgpack.encode(Answer()))

    def error_at_the_end(self) -> AbstractContextManager[Any]:
        return mock.patch.object(self.engine, "answer", side_effect=EngineError("engine 0: the pipe broke"))

    def plan_lost(self) -> AbstractContextManager[Any]:
        self.engine.receiver._plan = None
        return nullcontext()

    def plan_lost_and_no_memory(self) -> AbstractContextManager[Any]:
        self.engine.receiver._plan = None
        return mock.patch("os.memfd_create", side_effect=OSError(28, "No space left"))

    def nothing(self) -> AbstractContextManager[Any]:
        return nullcontext()


HARMLESS = {"nothing": 0, "plan_lost": 1}
"""Rounds of buckets that the push takes."""
FAULTS = (
    "flip_in_a_parameter",
    "change_meanwhile",
    "read_too_little",
    "answer_of_before",
    "answer_cut",
    "error_at_the_end",
    "plan_lost_and_no_memory",
    *HARMLESS,
)


def run(count: int, seed: int) -> None:
    job = Job(seed)
    for number in range(count):
        if number == 0 or job.engine.killed:
            job.engine = Engine()
            job.learn()
            assert job.push() == 1
            job.learn()
            assert job.push() == 0
        old, flushed = job.engine.model.holds(), job.engine.flushed
        job.learn()
        fault = FAULTS[number % len(FAULTS)]
        with getattr(job, fault)():
            if fault in HARMLESS:
                assert job.push() == HARMLESS[fault], fault
                assert job.engine.model.holds() == job.source.holds()
                assert job.engine.flushed == flushed + 1
                continue
            with pytest.raises(WeightSyncError, match="version"):
                job.push()
        assert job.engine.killed or (job.engine.model.holds() == old and fault == "plan_lost_and_no_memory"), fault
    job.sender.close()


def test_an_engine_has_the_old_weights_or_the_new_or_is_ended() -> None:
    run(20 * len(FAULTS), seed=0)


@pytest.mark.deep
def test_ten_thousand_faults() -> None:
    run(10_000, seed=1)


def test_what_differs_is_named() -> None:
    job = Job(2)
    job.learn()
    job.push()
    with (
        job.flip_in_a_parameter(),
        pytest.raises(WeightSyncError, match="rank 0: experts arrived with a wrong digest"),
    ):
        job.push()
    assert job.engine.killed


@pytest.mark.parametrize("fault", ["answer_of_before", "answer_cut", "error_at_the_end"])
def test_an_engine_that_fails_in_a_pull_ends_no_other(fault: str) -> None:
    """The other has all of the new version; then both are brought to it."""
    job, other = Job(4), Engine(1)

    def push() -> int:
        return job.sender.push(job.source, [job.engine, other], version=job.version).num_rounds

    for rounds in (1, 0, 0):
        job.learn()
        assert push() == rounds
    flushed = other.flushed
    job.learn()
    with getattr(job, fault)(), pytest.raises(WeightSyncError, match=r"engine 0.* It was stopped") as caught:
        push()
    assert caught.value.ended == (0,), "it lived: the fault is not counted as a death of its own"
    assert (job.engine.killed, other.killed) == (True, False)
    assert other.model.holds() == job.source.holds()
    assert other.flushed == flushed + 1, "keys and values of old weights are gone"
    job.engine = Engine()
    for rounds in (1, 0):
        assert push() == rounds
        assert job.engine.model.holds() == other.model.holds() == job.source.holds()
        job.learn()
    job.sender.close()


def cast(model: Model, name: str, tensor: torch.Tensor) -> None:
    (model.norm if name == "norm" else model.experts[int(name[-1])].T).copy_(tensor.double())


def computed(model: Model, name: str, tensor: torch.Tensor) -> None:
    (model.norm if name == "norm" else model.experts[int(name[-1])].T).copy_(tensor + 0)


def aside(model: Model, name: str, tensor: torch.Tensor) -> None:
    torch.zeros(ROWS, COLUMNS).copy_(tensor)
    (model.norm if name == "norm" else model.experts[int(name[-1])].T).copy_(tensor)


def padded(model: Model, name: str, tensor: torch.Tensor) -> None:
    torch.zeros(3).fill_(1)
    model.norm[ROWS:].fill_(0)
    (model.norm if name == "norm" else model.experts[int(name[-1])].T).copy_(tensor)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (cast, "is loaded from what the trainer did not send"),
        (computed, "is loaded from what the trainer did not send"),
        (aside, "is loaded into what is no parameter"),
        (padded, ""),
    ],
)
def test_what_cannot_be_planned_goes_through_buckets_and_is_told_once(
    loader: Callable[[Model, str, torch.Tensor], None], reason: str
) -> None:
    job = Job(3)
    job.engine.model.load_weights = lambda weights: [loader(job.engine.model, *pair) for pair in weights]  # type: ignore
    notes = []
    for _ in range(3):
        job.learn()
        report = job.sender.push(job.source, [job.engine], version=job.version)
        notes.append(report.note)
        assert job.engine.model.holds() == job.source.holds()
    assert report.num_rounds == (1 if reason else 0)
    assert reason in notes[0]
    assert bool(notes[0]) == bool(reason)
    assert notes[1:] == ["", ""]
