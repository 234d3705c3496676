"""One push of weights, on one rank of the trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

from specactor.config import WeightsSyncConfig
from specactor.errors import CopiesDifferError, EngineError, WeightSyncError
from specactor.parallel.collective import Collective
from specactor.weights_sync.buckets import Slot, aligned
from specactor.weights_sync.digest import copy_with_digest, digest_on
from specactor.weights_sync.memory import SharedBuffer, SharedCopy, room_bytes
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
from specactor.weights_sync.mirrors import Crossing, Mirrors, taker
from specactor.weights_sync.pulls import JobPlan

if TYPE_CHECKING:
    from specactor.rollout.sglang.engine_client import Engine
    from specactor.trainer.shards import RankShards

T = TypeVar("T")

TIMEOUT_S = 300.0  # longest wait for an engine's answer to any call: to a bucket, or to copy a whole model by a plan
MOST_KEPT = 128  # mirrors that a host keeps until they are loaded: each is a file and, in every engine rank, a view


class RoundState(msgspec.Struct, frozen=True, kw_only=True):
    bucket: Bucket | None  # its bucket, if it packed anything
    takes: bool  # whether it has engines
    last: bool  # whether it has no more rounds
    problem: str  # the first that it or its engines met


class PullState(msgspec.Struct, frozen=True, kw_only=True):
    digests: tuple[int, ...]  # of its own chunks, in the order of the plan
    unplanned: bool  # whether one of its engines has no such plan
    problem: str


class Push:
    """It remembers the first problem and goes on, as the other ranks do."""

    def __init__(
        self,
        config: WeightsSyncConfig,
        collective: Collective,
        hosts: Sequence[int],
        buffers: list[SharedBuffer],
        mirrors: list[Mirrors],
        engines: Sequence[Engine],
        version: int,
    ) -> None:
        self.version = version
        self.problem = ""
        self.num_bytes = 0
        self.num_rounds = 0
        self.link_bytes = 0
        self.lacks_room = False  # whether a rank had no memory for a plan
        self._config = config
        self._collective = collective
        self._hosts = hosts
        self._buffers = buffers
        self._mirrors = mirrors
        self._engines = engines
        self._threads = ThreadPoolExecutor(max_workers=max(1, len(engines)), thread_name_prefix="weights")
        self._pending: list[Future[None]] = []
        self._replies: dict[int, list[bytes]] = {}  # by engine: of its ranks, to the last call
        self._sent: list[tuple[Bucket, ...]] = []
        self._packed: dict[int, list[tuple[torch.Tensor, Bucket]]] = {}  # by side: own, and mirrored by this rank
        self._kept: set[int] = set()  # rounds that crossed to be checked, and are still there to be loaded
        self._keepable: int | None = None  # bytes for them on this rank, as of the first round
        self._apart = ""  # which copies of the weights differ between trainer ranks: a problem that stays
        self._touched = False  # whether engines may hold other weights than before
        self._ended: list[int] = []  # engines that lived when the push ended them
        self._device = torch.device("cpu")  # of the tensors that were packed

    def stream(self, call: str, source: RankShards) -> None:
        """Pack, exchange and send round by round, until every engine has answered to all."""
        self.num_bytes = self.num_rounds = 0
        self._sent, self._packed = [], {}
        num_hosts = len(set(self._hosts))  # a rank has a bucket of its own, and about one's mirror of each other host
        own_rounds = source.rounds(self._config.bucket_bytes * 15 // 16 // num_hosts)  # the rest is for alignment
        last = False
        while not last:
            tensors = next(own_rounds, None)
            side = self.num_rounds % 2
            bucket = self._pack_or_note(side, tensors) if tensors is not None else None
            self._wait()
            last = self._exchange(call, bucket, side, last=tensors is None)
        self._wait()

    def resend(self) -> None:
        """Have the buckets loaded, each checked while the next is."""
        # Nothing else writes them meanwhile: what is wrong while it is loaded is wrong afterwards.
        for side, buckets in enumerate(self._sent):
            self._submit(LOAD, Round(buckets=buckets, checked=True))
            if side > 0:
                self._recheck(side - 1)
            self._wait()
            self._collective.barrier()  # the other ranks' engines have read this rank's buckets, too
        self._recheck(len(self._sent) - 1)

    def _recheck(self, side: int) -> None:
        for data, bucket in self._packed.get(side, ()):
            device = torch.device("cuda" if bucket.of_gpu else "cpu")
            for slot in bucket.slots:
                if digest_on(device, data[slot.offset : slot.offset + slot.num_bytes]) != slot.digest:
                    self.problem = self.problem or f"{slot.name} changed while it was loaded"

    def plan(self, holding: Holding, on_device: SharedCopy | None) -> tuple[str, JobPlan | None]:
        """Have the engines plan how to pull, and compare by that plan what they loaded. Returns (why there is no plan,
        or "", the plan)."""
        holdings = self._collective.gather(holding, Holding)
        plan, refusal = None, ""
        try:
            plan = JobPlan(self._collective, holdings, self._hosts, on_device)
        except (OSError, WeightSyncError) as error:  # it may be this rank's alone
            refusal = str(error)
        replies = self._ask_all(PLAN, plan.holding, PlanReply) if plan is not None else {}
        refusal = self._told(refusal, replies)
        if plan is not None and not refusal:
            refusal = plan.learn(replies)
            mirrored = plan.link_bytes and not self._collective.any(bool(refusal))
            refusal = self._told(refusal, self._ask_all(PLAN, plan.holding, PlanReply) if mirrored else {})
        if plan is None or refusal:
            if plan is not None:
                plan.close()
            self.lacks_room = self._collective.any(plan is not None and plan.lacks_room)
            return "" if self._collective.any(bool(self.problem)) else refusal, None
        so_far = self.num_rounds, self.link_bytes
        self.pull(plan, copy=False)
        self.num_rounds, self.link_bytes = so_far
        return "", plan

    def _told(self, refusal: str, replies: Mapping[int, Sequence[PlanReply]]) -> str:
        """Return the first refusal, or problem, of all. Collective."""
        refusals = [refusal, *(reply.refusal for ranks in replies.values() for reply in ranks), self.problem]
        told = self._collective.gather(next(filter(None, refusals), ""), str)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), "")

    def pull(self, plan: JobPlan, *, copy: bool = True) -> bool:
        """Have the engines copy what they need, and compare digests. False where one knows no plan."""
        if copy:
            plan.bring()
        digests, message = list[tuple[int, ...]](), Pull(version=self.version, key=plan.key, copy=copy)
        replies = self._ask_all(PULL, message, PullReply, meanwhile=lambda: digests.append(plan.digests()))
        unplanned = any(
            engine not in plan.chunks or reply.unplanned for engine, ranks in replies.items() for reply in ranks
        )
        state = PullState(digests=digests[0], unplanned=unplanned, problem=self.problem)
        states = self._collective.gather(state, PullState)
        self._touched = copy
        if any(state.unplanned for state in states) and not any(state.problem for state in states):
            return False
        wanted = plan.wanted([state.digests for state in states])
        self._apart = plan.apart(wanted)
        self.problem = self._apart or self.problem or plan.difference(replies, wanted)
        self.num_bytes, self.num_rounds, self.link_bytes = plan.num_bytes, 0, plan.link_bytes
        return True

    def commit(self) -> None:
        """Finish on all engines, or end all after a problem. One that fails in the commit ends those of its rank, and
        the push."""
        failed = self._collective.any(bool(self.problem))
        if not failed:
            self._submit(COMMIT, Commit(version=self.version))
            self._wait()
        self._touched = True
        if failed or self.problem:
            self._end_engines()

    def _end_engines(self) -> None:
        self._ended += [engine.index for engine in self._engines if engine.alive]
        for engine in self._engines:
            engine.kill()

    def agree(self, stage: str) -> None:
        """Raise WeightSyncError on all ranks if one has a problem: the one that stays."""
        told = self._collective.gather((self.problem, bool(self._apart)), tuple[str, bool])
        for rank, (problem, stays) in sorted(enumerate(told), key=lambda each: not each[1][1]):
            if problem:
                kind = CopiesDifferError if stays else WeightSyncError
                if self._touched and stage == "check":
                    self._end_engines()
                raise kind(
                    f"weight sync to version {self.version} failed in its {stage} stage on rank {rank}: {problem}. "
                    + ("The engines were stopped." if self._touched else "The engines keep the old version."),
                    ended=self._ended,
                )

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def held(self, source: RankShards) -> Holding | None:
        """Return what the source holds; where its memory cannot be shared, note a problem."""
        try:
            return source.held(self._config.bucket_bytes)
        except (OSError, WeightSyncError) as error:
            self.problem = f"memory could not be shared: {error}"
        return None

    def _pack_or_note(self, side: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Bucket | None:
        walk = iter(tensors)
        try:
            return self._pack(side, walk)
        except (OSError, WeightSyncError) as error:  # the other ranks wait for this one
            self.problem = self.problem or f"a bucket could not be made: {error}"
            for _ in walk:
                pass
        return None

    def _pack(self, side: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Bucket | None:
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
        """Return the bucket, grown where one tensor or alignment needs it."""
        while len(self._buffers) <= side:
            self._buffers.append(SharedBuffer(max(num_bytes, self._config.bucket_bytes)))
        old = self._buffers[side]
        if old.data.numel() < num_bytes:
            self._buffers[side] = SharedBuffer(num_bytes)
            self._buffers[side].data[: old.data.numel()].copy_(old.data)
            old.close()
        return self._buffers[side].data

    def _exchange(self, call: str, bucket: Bucket | None, side: int, *, last: bool) -> bool:
        """Return whether all ranks are done. Collective."""
        own = RoundState(bucket=bucket, takes=bool(self._engines), last=last, problem=self.problem)
        states = self._collective.gather(own, RoundState)
        packed = {rank: state.bucket for rank, state in enumerate(states) if state.bucket is not None}
        self.num_rounds += bool(packed)
        self.num_bytes += sum(slot.num_bytes for bucket in packed.values() for slot in bucket.slots)
        if any(state.problem for state in states):
            packed = {}
        if packed:
            self._packed[side] = [(self._buffers[side].data, bucket)] if bucket is not None else []
        takers = {self._hosts[rank] for rank, state in enumerate(states) if state.takes}
        several = packed and len(set(self._hosts)) > 1
        taken = self._mirrored(call, packed, sorted(takers), side) if several else list(packed.values())
        self._sent.append(tuple(taken))
        if taken:
            self._submit(call, Round(buckets=tuple(taken)))
        return all(state.last for state in states)

    def _mirrored(self, call: str, packed: dict[int, Bucket], takers: Sequence[int], side: int) -> list[Bucket]:
        """Have new buckets cross; return them as engines of this host see them. Collective."""
        here, rank, number = self._hosts[self._collective.rank], self._collective.rank, len(self._sent)
        ends = {owner: max(slot.offset + slot.num_bytes for slot in bucket.slots) for owner, bucket in packed.items()}
        crossings = [
            Crossing(owner, owner, taker(self._hosts, owner, host), 0, end)
            for owner, end in ends.items()
            for host in takers
            if host != self._hosts[owner]
        ]
        crosses = number not in self._kept
        if call == CHECK and self._has_room(number, crossings):
            self._kept.add(number)
        mirrors = self._mirrors[number + 2 if number in self._kept else side]
        if crosses:
            problems = mirrors.make(crossings)
            if any(problems) and mirrors is not self._mirrors[side]:  # it may still cross twice
                mirrors.close()
                self._kept.discard(number)
                mirrors = self._mirrors[side]
                problems = mirrors.make(crossings)
            if any(problems):
                self.problem = self.problem or problems[rank]
                return []
            mirrors.fill(crossings, lambda _: self._buffers[side].data)
            self.link_bytes += sum(c.end for c in crossings)
        self._packed[side] += [(mirrors.data(c.memory), packed[c.memory]) for c in crossings if c.taker == rank]
        return [
            bucket if self._hosts[owner] == here else msgspec.structs.replace(bucket, address=mirrors.addresses[owner])
            for owner, bucket in packed.items()
            if here in takers
        ]

    def _has_room(self, number: int, crossings: Sequence[Crossing]) -> bool:
        """Return whether every host can keep a round until it is loaded. Collective."""
        while len(self._mirrors) <= number + 2:
            self._mirrors.append(Mirrors(self._collective, self._hosts))
        if self._keepable is None:
            self._keepable = room_bytes(self._hosts.count(self._hosts[self._collective.rank]))
        lacking = sum(self._mirrors[number + 2].lacking(crossings).values())
        of_hosts = Counter(self._hosts[crossing.taker] for crossing in crossings)
        many = (len(self._kept) + 1) * max(of_hosts.values(), default=0) > MOST_KEPT
        if self._collective.any(many or lacking > self._keepable):
            return False
        self._keepable -= lacking
        return True

    def _submit(self, call: str, message: Round | Holding | Pull | Commit) -> None:
        payload = msgspec.msgpack.encode(message)
        self._pending += [self._threads.submit(self._ask, engine, call, payload) for engine in self._engines]

    def _ask_all(
        self, call: str, message: Holding | Pull, kind: type[T], meanwhile: Callable[[], None] = lambda: None
    ) -> dict[int, list[T]]:
        self._replies = {}
        self._submit(call, message)
        meanwhile()
        self._wait()
        decoder = msgspec.msgpack.Decoder(kind)
        return {engine: [decoder.decode(reply) for reply in ranks] for engine, ranks in self._replies.items()}

    def _ask(self, engine: Engine, call: str, payload: bytes) -> None:
        replies = engine.rank_call(call, payload, timeout_s=TIMEOUT_S)
        for rank, reply in enumerate(replies):
            # Of whatever kind it is: a CheckReply passes over other fields, and has no problem where a kind has none.
            if problem := msgspec.msgpack.decode(reply, type=CheckReply).problem:
                raise WeightSyncError(f"engine {engine.index}, rank {rank}: {problem}")
        self._replies[engine.index] = replies

    def _wait(self) -> None:
        for future in self._pending:
            try:
                future.result()
            except (EngineError, WeightSyncError) as error:
                self.problem = self.problem or str(error)
        self._pending = []
