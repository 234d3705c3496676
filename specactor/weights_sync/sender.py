"""The trainer's end of a weight sync.

Engines of this host copy the weights by a plan out of the trainer's memory, while the trainer digests the same bytes.
The plan is learned from a first push, and from any that finds an engine without it, as follows: in every round each
rank packs the parameters that it hands over into one of its two buckets of shared memory; then all ranks exchange what
they packed, and each engine's owner asks the engine's ranks to take the buckets, while the next round is packed into
the others. All pushes go that way where there is no plan, as over several hosts.

Invariants: a rank has at most two buckets; in a push by buckets nothing is loaded anywhere before all tensors were
checked on all engine ranks, so a corrupt stream leaves the engines at their old version; in one by the plan every
digest of what an engine's parameters hold is compared before it goes on; all trainer ranks return, or all raise
WeightSyncError; an engine that fails between the first write and the commit is killed, since it holds a mixture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
import torch

from specactor.config import WeightsSyncConfig
from specactor.errors import EngineError, WeightSyncError
from specactor.parallel.collective import Collective
from specactor.weights_sync.buckets import Slot, aligned
from specactor.weights_sync.device_pull import SharedCopy
from specactor.weights_sync.digest import copy_with_digest, digest_of, digest_on, digest_spans
from specactor.weights_sync.memory import SharedBuffer, read_only
from specactor.weights_sync.messages import (
    CHECK,
    COMMIT,
    LOAD,
    PLAN,
    PULL,
    Bucket,
    CheckReply,
    Commit,
    Holding,
    PlanReply,
    Pull,
    PullReply,
    Round,
)
from specactor.weights_sync.plan import Chunk, Span, merged

T = TypeVar("T")

TIMEOUT_S = 300.0  # longest wait for an engine to take one bucket, which takes well under a second


class WeightSource(Protocol):
    """It says where the tensors come from, on every rank."""

    one_host: bool
    """Whether every engine can open every rank's buckets. If not, a rank's engines take that rank's buckets alone."""

    @property
    def on_device(self) -> SharedCopy | None:
        """What is held and lies on a GPU; None where it lies in the memory that engines read."""
        ...

    def rounds(self, capacity_bytes: int) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
        """Per round, the (Hugging Face name, whole tensor) that this rank hands over.

        Over all rounds (and, on one host, over all ranks) these are all tensors of the model, once. May be collective;
        every round is walked to its end.
        """
        ...

    def held(self, capacity_bytes: int) -> Holding | None:
        """Return what this rank hands over as it lies in memory that engines can read, current until the next change;
        None where there is none, or it would take more than `capacity_bytes` besides. The same object while nothing
        moves."""
        ...


class TargetEngine(Protocol):
    """An engine that takes weights."""

    @property
    def index(self) -> int: ...

    def rank_call(self, name: str, payload: bytes, *, timeout_s: float) -> list[bytes]: ...

    def kill(self) -> None: ...


class RoundState(msgspec.Struct, frozen=True, kw_only=True):
    """This is what a rank tells the others after packing a round."""

    bucket: Bucket | None  # its bucket, if it packed anything
    last: bool  # whether it has no more rounds
    problem: str  # the first that it or its engines met


class PullState(msgspec.Struct, frozen=True, kw_only=True):
    """This is what a rank tells the others after a pull."""

    digests: tuple[int, ...]  # of its own chunks, in the order of the plan
    unplanned: bool  # whether one of its engines has no such plan
    problem: str


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """This is what one push moved. Equal on all ranks but for the time."""

    num_bytes: int  # of the model's tensors, counted once, however many engines take them
    num_rounds: int  # of buckets; 0 where engines took the weights by the plan
    seconds: float
    note: str = ""  # why there will be no plan; said once

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


_Spans = tuple[Span, ...]


class _Plan:
    """It says how all engines of all ranks pull, as seen by one rank."""

    def __init__(
        self,
        collective: Collective,
        holdings: Sequence[Holding],
        everything: Holding,
        chunks: dict[int, list[tuple[Chunk, ...]]],
        on_device: SharedCopy | None,
    ) -> None:
        """Collective. Args: chunks: see the attribute; on_device: see `WeightSource`."""
        self._on_device = on_device
        self.chunks = chunks  # by engine of this rank, per rank of it
        self.key = digest_of(memoryview(msgspec.msgpack.encode(everything)))
        self.num_bytes = sum(tensor.num_bytes for tensor in everything.tensors)
        mine = dict.fromkeys(chunk.spans for ranks in chunks.values() for part in ranks for chunk in part)
        spans = [spans for part in collective.gather(tuple(mine), tuple[_Spans, ...]) for spans in part]
        owner = [rank for rank, each in enumerate(holdings) for _ in each.addresses]
        self.order: list[list[_Spans]] = [[] for _ in holdings]  # what each rank digests
        for each in dict.fromkeys(spans):
            self.order[owner[each[0].memory]].append(each)
        self._own = self.order[collective.rank]
        first = owner.index(collective.rank)
        self._memories = dict(enumerate(map(read_only, holdings[collective.rank].addresses), first))

    def digests(self) -> tuple[int, ...]:
        """Return digests of what this rank holds now."""
        if self._on_device is not None:
            return self._on_device.digests(self._own)
        return tuple(digest_spans(self._memories, spans) for spans in self._own)


class WeightSender:
    """Pushes versions of the policy into the engines; keeps its buffers, or the plan, between pushes."""

    def __init__(self, config: WeightsSyncConfig, collective: Collective) -> None:
        self._config = config
        self._collective = collective
        self._buffers: list[SharedBuffer] = []
        self._plan: _Plan | None = None
        self._planned: Holding | None = None  # of which the plan is
        self._refused: Holding | None = None  # of which there is no plan

    def push(self, source: WeightSource, engines: Sequence[TargetEngine], *, version: int) -> SyncReport:
        """Bring all engines of all ranks to `version`. Collective; `engines` are those that this rank owns.

        Raises WeightSyncError on every rank when any engine rank did not take the weights.
        """
        start = time.perf_counter()
        push = _Push(self._config, self._collective, self._buffers, engines, version)
        note, holding = "", push.held(source)
        try:
            if not self._pulled(push, holding):
                push.stream(CHECK, source)
                push.agree("check")
                if push.num_rounds > 2:
                    push.stream(LOAD, source)
                else:  # the buckets still hold the whole model
                    push.resend()
                note = self._make_plan(push, holding, source.on_device)
            push.commit()
            push.agree("load")
        finally:
            push.close()
        if self._plan is not None:
            self.close()
        return SyncReport(
            num_bytes=push.num_bytes, num_rounds=push.num_rounds, seconds=time.perf_counter() - start, note=note
        )

    def _pulled(self, push: _Push, holding: Holding | None) -> bool:
        """Return whether all engines of all ranks took the weights by the plan, or one met a problem. Collective, and
        so also the point from which on no rank changes its weights."""
        if self._collective.any(self._plan is None or self._planned is not holding):
            return False
        assert self._plan is not None
        return push.pull(self._plan)

    def _make_plan(self, push: _Push, holding: Holding | None, on_device: SharedCopy | None) -> str:
        """Make the plan of what the engines just loaded, and prove it on that; why there is none. Collective."""
        self._plan = None
        if self._collective.any(bool(push.problem) or holding is None or holding is self._refused):
            return ""
        assert holding is not None
        note, self._plan = push.plan(holding, on_device)
        self._planned, self._refused = holding, holding if note else None
        return note

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
        self._replies: dict[int, list[bytes]] = {}  # by engine: of its ranks, to the last call
        self._sent: list[tuple[Bucket, ...]] = []
        self._packed: dict[int, Bucket] = {}
        self._touched = False  # whether engines may hold other weights than before
        self._device = torch.device("cpu")  # of the tensors that were packed

    def stream(self, call: str, source: WeightSource) -> None:
        """Pack, exchange and send round by round. Returns when every engine has answered to all."""
        self.num_bytes = self.num_rounds = 0
        self._sent, self._packed = [], {}
        own_rounds = source.rounds(self._config.bucket_bytes * 15 // 16)  # the rest is for alignment
        last = False
        while not last:
            tensors = next(own_rounds, None)
            side = self.num_rounds % 2
            bucket = self._pack_or_note(side, tensors) if tensors is not None else None
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

    def plan(self, holding: Holding, on_device: SharedCopy | None) -> tuple[str, _Plan | None]:
        """Have the engines plan how to pull, and compare by that plan what they loaded; why there can be none."""
        holdings = self._collective.gather(holding, Holding)
        try:
            tensors = merged([(len(part.addresses), part.tensors) for part in holdings])
        except WeightSyncError as error:  # on all ranks
            return str(error), None
        everything = Holding(addresses=tuple(a for part in holdings for a in part.addresses), tensors=tensors)
        replies = self._ask_all(PLAN, everything, PlanReply)
        refusals = [reply.refusal for ranks in replies.values() for reply in ranks if reply.refusal]
        if any(told := self._collective.gather("".join(refusals[:1]), str)):
            return next(text for text in told if text), None
        if self._collective.any(bool(self.problem)):
            return "", None
        chunks = {engine: [reply.chunks for reply in ranks] for engine, ranks in replies.items()}
        plan = _Plan(self._collective, holdings, everything, chunks, on_device)
        num_rounds = self.num_rounds
        self.pull(plan, copy=False)
        self.num_rounds = num_rounds
        return "", plan

    def pull(self, plan: _Plan, *, copy: bool = True) -> bool:
        """Have the engines copy all they need, digest the same here, and compare. False where one knows no plan."""
        digests: list[tuple[int, ...]] = []
        message = Pull(version=self.version, key=plan.key, copy=copy)
        replies = self._ask_all(PULL, message, PullReply, meanwhile=lambda: digests.append(plan.digests()))
        unplanned = any(
            engine not in plan.chunks or reply.unplanned for engine, ranks in replies.items() for reply in ranks
        )
        state = PullState(digests=digests[0], unplanned=unplanned, problem=self.problem)
        states = self._collective.gather(state, PullState)
        self._touched = copy
        if any(state.unplanned for state in states) and not any(state.problem for state in states):
            return False
        wanted = {
            spans: digest
            for each, state in zip(plan.order, states, strict=True)
            for spans, digest in zip(each, state.digests, strict=True)
        }
        for engine, ranks in replies.items():
            for rank, (reply, chunks) in enumerate(zip(ranks, plan.chunks[engine], strict=True)):
                if not self.problem and (problem := _difference(chunks, reply.digests, wanted)):
                    self.problem = f"engine {engine}, rank {rank}: {problem}"
        self.num_bytes, self.num_rounds = plan.num_bytes, 0
        return True

    def commit(self) -> None:
        """Finish on all engines; where a rank has met a problem before, end all engines instead.

        An engine that fails in the commit itself ends those of its rank; the push then fails on all ranks.
        """
        failed = self._collective.any(bool(self.problem))
        if not failed:
            self._submit(COMMIT, Commit(version=self.version))
            self._wait()
        self._touched = True
        if failed or self.problem:
            self._end_engines()

    def _end_engines(self) -> None:
        for engine in self._engines:
            engine.kill()

    def agree(self, stage: str) -> None:
        """Raise WeightSyncError on all ranks if one has met a problem."""
        for rank, problem in enumerate(self._collective.gather(self.problem, str)):
            if problem:
                if self._touched and stage == "check":
                    self._end_engines()
                raise WeightSyncError(
                    f"weight sync to version {self.version} failed in its {stage} stage on rank {rank}: {problem}. "
                    + ("The engines were stopped." if self._touched else "The engines keep the old version.")
                )

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def held(self, source: WeightSource) -> Holding | None:
        """Return what the source holds; where its memory cannot be shared, a problem."""
        try:
            return source.held(self._config.bucket_bytes)
        except OSError as error:
            self.problem = f"memory could not be shared: {error}"
        return None

    def _pack_or_note(self, side: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Bucket | None:
        walk = iter(tensors)
        try:
            return self._pack(side, walk)
        except OSError as error:  # the other ranks wait for this one
            self.problem = self.problem or f"a bucket could not be made: {error}"
            for _ in walk:
                pass
        return None

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

    def _submit(self, call: str, message: Round | Holding | Pull | Commit) -> None:
        payload = msgspec.msgpack.encode(message)
        self._pending += [self._threads.submit(self._ask, engine, call, payload) for engine in self._engines]

    def _ask_all(
        self, call: str, message: Holding | Pull, kind: type[T], meanwhile: Callable[[], None] = lambda: None
    ) -> dict[int, list[T]]:
        """Return all ranks' answers, of this rank's engines that answered."""
        self._replies = {}
        self._submit(call, message)
        meanwhile()
        self._wait()
        decoder = msgspec.msgpack.Decoder(kind)
        return {engine: [decoder.decode(reply) for reply in ranks] for engine, ranks in self._replies.items()}

    def _ask(self, engine: TargetEngine, call: str, payload: bytes) -> None:
        replies = engine.rank_call(call, payload, timeout_s=TIMEOUT_S)
        for rank, reply in enumerate(replies):
            problem = msgspec.msgpack.decode(reply, type=CheckReply).problem
            if problem:
                raise WeightSyncError(f"engine {engine.index}, rank {rank}: {problem}")
        self._replies[engine.index] = replies

    def _wait(self) -> None:
        """Until this rank's engines have read all that was submitted."""
        for future in self._pending:
            try:
                future.result()
            except (EngineError, WeightSyncError) as error:
                self.problem = self.problem or str(error)
        self._pending = []


def _difference(chunks: Sequence[Chunk], digests: Sequence[int], wanted: dict[_Spans, int]) -> str:
    """Return which parameters do not hold what the trainer has; empty if all do."""
    if len(digests) != len(chunks):
        return f"{len(digests)} of {len(chunks)} digests came back"
    for chunk, digest in zip(chunks, digests, strict=True):
        if wanted[chunk.spans] != digest:
            return f"{', '.join(dict.fromkeys(chunk.parameters))} arrived with a wrong digest"
    return ""
