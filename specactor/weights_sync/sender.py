"""The trainer's end of a weight sync.

In every round each rank packs the parameters that it hands over into one of its two buckets of shared memory; then all
ranks exchange what they packed, and each engine's owner asks the engine's ranks to take the buckets, while the next
round is packed into the others.

Invariants: a rank has at most two buckets; nothing is loaded anywhere before all tensors were checked on all engine
ranks, so a corrupt stream leaves the engines at their old version; all trainer ranks return, or all raise
WeightSyncError; an engine that fails between the first load and the commit is killed, since it holds a mixture.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from specactor.config import WeightsSyncConfig
from specactor.errors import EngineError, WeightSyncError
from specactor.parallel.collective import Collective
from specactor.weights_sync.buckets import Slot, aligned
from specactor.weights_sync.digest import copy_with_digest, digest_on
from specactor.weights_sync.memory import SharedBuffer
from specactor.weights_sync.messages import CHECK, COMMIT, LOAD, Bucket, CheckReply, Commit, Round

TIMEOUT_S = 300.0
"""Longest wait for an engine to take one bucket, which takes well under a second."""


class WeightSource(Protocol):
    """Where the tensors come from, on every rank."""

    one_host: bool
    """Whether every engine can open every rank's buckets. If not, a rank's engines take that rank's buckets alone."""

    def rounds(self, capacity_bytes: int) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
        """Per round, the (Hugging Face name, whole tensor) that this rank hands over.

        Over all rounds (and, on one host, over all ranks) these are all tensors of the model, once. May be collective;
        every round is walked to its end.
        """
        ...


class TargetEngine(Protocol):
    """An engine that takes weights."""

    @property
    def index(self) -> int: ...

    def rank_call(self, name: str, payload: bytes, *, timeout_s: float) -> list[bytes]: ...

    def kill(self) -> None: ...


class RoundState(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others after packing a round."""

    bucket: Bucket | None
    """Its bucket, if it packed anything."""
    last: bool
    """Whether it has no more rounds."""
    problem: str
    """The first that it or its engines met."""


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one push moved. Equal on all ranks but for the time."""

    num_bytes: int
    """Of the model's tensors, counted once, however many engines take them."""
    num_rounds: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class WeightSender:
    """Pushes versions of the policy into the engines; keeps its buffers between pushes."""

    def __init__(self, config: WeightsSyncConfig, collective: Collective) -> None:
        self._config = config
        self._collective = collective
        self._buffers: list[SharedBuffer] = []

    def push(self, source: WeightSource, engines: Sequence[TargetEngine], *, version: int) -> SyncReport:
        """Bring all engines of all ranks to `version`. Collective; `engines` are those that this rank owns.

        Raises WeightSyncError on every rank when any engine rank did not take the weights.
        """
        start = time.perf_counter()
        push = _Push(self._config, self._collective, self._buffers, engines, version)
        try:
            push.stream(CHECK, source)
            push.agree("check")
            if push.num_rounds > 2:
                push.stream(LOAD, source)
            else:  # the buckets still hold the whole model
                push.resend()
            push.commit()
            push.agree("load")
        finally:
            push.close()
        return SyncReport(num_bytes=push.num_bytes, num_rounds=push.num_rounds, seconds=time.perf_counter() - start)

    def close(self) -> None:
        """Give the buffers back."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()


class _Push:
    """One push on one rank. It remembers the first problem and goes on walking, as the other ranks do."""

    def __init__(
        self,
        config: WeightsSyncConfig,
        collective: Collective,
        buffers: list[SharedBuffer],
        engines: Sequence[TargetEngine],
        version: int,
    ) -> None:
        self.version = version
        self.problem = ""
        self.num_bytes = 0
        self.num_rounds = 0
        self._config = config
        self._collective = collective
        self._buffers = buffers
        self._engines = engines
        self._threads = ThreadPoolExecutor(max_workers=max(1, len(engines)), thread_name_prefix="weights")
        self._pending: list[Future[None]] = []
        self._sent: list[tuple[Bucket, ...]] = []
        self._packed: dict[int, Bucket] = {}
        self._device = torch.device("cpu")
        """Of the tensors that were packed."""

    def stream(self, call: str, source: WeightSource) -> None:
        """Pack, exchange and send round by round. Returns when every engine has answered to all."""
        self.num_bytes = self.num_rounds = 0
        self._sent, self._packed = [], {}
        own_rounds = source.rounds(self._config.bucket_bytes * 15 // 16)  # the rest is for alignment
        last = False
        while not last:
            tensors = next(own_rounds, None)
            side = self.num_rounds % 2
            bucket = self._pack(side, tensors) if tensors is not None else None
            if bucket is not None:
                self._packed[side] = bucket
            self._wait()
            last = self._exchange(call, bucket, last=tensors is None, one_host=source.one_host)
        self._wait()

    def resend(self) -> None:
        """Have the buckets loaded as they are, and check that they still were what they had been: in all that time
        nothing else wrote them, so what was wrong while it was loaded is wrong afterwards.

        A bucket is checked while the next one is loaded.
        """
        for side, buckets in enumerate(self._sent):
            self._submit(LOAD, Round(buckets=buckets, checked=True))
            if side > 0:
                self._recheck(side - 1)
            self._wait()
            self._collective.barrier()  # the other ranks' engines have read this rank's buckets, too
        self._recheck(len(self._sent) - 1)

    def _recheck(self, side: int) -> None:
        bucket = self._packed.get(side)
        for slot in bucket.slots if bucket is not None else ():
            data = self._buffers[side].data[slot.offset : slot.offset + slot.num_bytes]
            if digest_on(self._device, data) != slot.digest:
                self.problem = self.problem or f"{slot.name} changed while it was loaded"

    def commit(self) -> None:
        """Finish on all engines; where a rank has met a problem before, end all engines instead.

        An engine that fails in the commit itself ends those of its rank; the push then fails on all ranks.
        """
        failed = self._collective.any(bool(self.problem))
        if not failed:
            self._submit(COMMIT, Commit(version=self.version))
            self._wait()
        if failed or self.problem:
            for engine in self._engines:
                engine.kill()

    def agree(self, stage: str) -> None:
        """Raise WeightSyncError on all ranks if one has met a problem."""
        for rank, problem in enumerate(self._collective.gather(self.problem, str)):
            if problem:
                raise WeightSyncError(
                    f"weight sync to version {self.version} failed in its {stage} stage on rank {rank}: {problem}. "
                    + ("The engines keep the old version." if stage == "check" else "The engines were stopped.")
                )

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def _pack(self, side: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Bucket | None:
        """Copy the round's tensors into one bucket; None when there are none. That bucket's last reader is done."""
        slots: list[Slot] = []
        used = 0
        for name, tensor in tensors:
            source = tensor.detach().contiguous().view(-1).view(torch.uint8)
            offset = aligned(used)
            used = offset + source.numel()
            data, self._device = self._room(side, used), source.device
            slots.append(
                Slot(
                    name=name,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    offset=offset,
                    digest=copy_with_digest(data[offset:used], source),
                )
            )
        if not slots:
            return None
        address, of_gpu = self._buffers[side].address(), self._device.type == "cuda"
        return Bucket(version=self.version, address=address, slots=tuple(slots), of_gpu=of_gpu)

    def _room(self, side: int, num_bytes: int) -> torch.Tensor:
        """The bucket's memory, grown where one tensor alone is larger than a bucket, or alignment needs it."""
        while len(self._buffers) <= side:
            self._buffers.append(SharedBuffer(max(num_bytes, self._config.bucket_bytes)))
        old = self._buffers[side]
        if old.data.numel() < num_bytes:
            self._buffers[side] = SharedBuffer(num_bytes)
            self._buffers[side].data[: old.data.numel()].copy_(old.data)
            old.close()
        return self._buffers[side].data

    def _exchange(self, call: str, bucket: Bucket | None, *, last: bool, one_host: bool) -> bool:
        """Tell all ranks what was packed, and have this rank's engines take it; whether all ranks are done."""
        states = self._collective.gather(RoundState(bucket=bucket, last=last, problem=self.problem), RoundState)
        packed = [state.bucket for state in states if state.bucket is not None]
        sizes = [sum(slot.num_bytes for slot in b.slots) for b in packed]
        self.num_rounds += bool(packed)
        self.num_bytes += sum(sizes) if one_host else max(sizes, default=0)
        taken = packed if one_host else [bucket] if bucket is not None else []
        self._sent.append(tuple(taken))
        if taken and not any(state.problem for state in states):
            self._submit(call, Round(buckets=tuple(taken)))
        return all(state.last for state in states)

    def _submit(self, call: str, message: Round | Commit) -> None:
        payload = msgspec.msgpack.encode(message)
        self._pending += [self._threads.submit(self._ask, engine, call, payload) for engine in self._engines]

    def _ask(self, engine: TargetEngine, call: str, payload: bytes) -> None:
        for rank, reply in enumerate(engine.rank_call(call, payload, timeout_s=TIMEOUT_S)):
            problem = msgspec.msgpack.decode(reply, type=CheckReply).problem
            if problem:
                raise WeightSyncError(f"engine {engine.index}, rank {rank}: {problem}")

    def _wait(self) -> None:
        """Until this rank's engines have read all that was submitted."""
        for future in self._pending:
            try:
                future.result()
            except (EngineError, WeightSyncError) as error:
                self.problem = self.problem or str(error)
        self._pending = []
