"""The trainer's end of a weight sync. Engines copy the weights by a plan. Without one a push goes by buckets, each
packed while engines take the one before, and makes the plan.

Invariants: by buckets nothing is loaded before all tensors were checked on all engine ranks; by the plan all digests
are compared before an engine goes on; all trainer ranks raise WeightSyncError or none; an engine that holds a mixture
is killed, and no engine that has all of the new version.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from specactor.config import WeightsSyncConfig
from specactor.errors import CopiesDifferError, EngineError, WeightSyncError
from specactor.parallel.collective import Collective
from specactor.waits import BULK_S
from specactor.weights_sync.memory import SharedBuffer, SharedCopy, pack, room_bytes
from specactor.weights_sync.messages import (
    CHECK,
    COMMIT,
    LOAD,
    PLAN,
    PULL,
    Answer,
    Bucket,
    Holding,
    Pull,
)
from specactor.weights_sync.mirrors import Crossing, Mirrors, taker
from specactor.weights_sync.pulls import JobPlan

if TYPE_CHECKING:
    from specactor.rollout.sglang.engine_client import Engine
    from specactor.trainer.shards import RankShards

MOST_KEPT = 128  # mirrors that a host keeps until they are loaded: each is a file and, in every engine rank, a view


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    num_bytes: int  # of the model's tensors, counted once, however many engines take them
    num_rounds: int  # of buckets; 0 where engines took the weights by the plan
    seconds: float
    link_bytes: int = 0  # of tensors, from host to host
    note: str = ""  # why there is no plan; said once
    through_host: str = ""  # why engines read host memory of what lies on their own GPU; said once

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class WeightSender:
    def __init__(self, config: WeightsSyncConfig, collective: Collective) -> None:
        self._config = config
        self._collective = collective
        self._buffers: list[SharedBuffer] = []
        self._mirrors: list[Mirrors] = []  # of other hosts' buckets, per side, and per round that is kept
        self._plan: JobPlan | None = None
        self._planned: Holding | None = None  # of which the plan is
        self._refused: Holding | None = None  # of which there will be no plan
        self._told: Holding | None = None  # of which it was said why there is none

    def push(self, source: RankShards, engines: Sequence[Engine], *, version: int) -> SyncReport:
        """Bring all engines of all ranks to `version`; `engines` are this rank's. Collective. Raises WeightSyncError on
        every rank if an engine rank did not take the weights, CopiesDifferError where new ones would not either."""
        start = time.perf_counter()
        self._mirrors = self._mirrors or [Mirrors(self._collective, source.hosts) for _ in range(2)]
        push = Push(self._config, self._collective, source.hosts, self._buffers, self._mirrors, engines, version)
        note, through_host, holding = "", "", push.held(source)
        try:
            if not self._pulled(push, holding):
                if self._plan is not None:  # engines forget it with the first bucket
                    self._plan.close()
                self._plan = None
                push.stream(CHECK, source)
                push.agree("check")
                push.stream(LOAD, source)
                note = self._make_plan(push, holding, source.on_device)
                through_host = self._plan.through_host if self._plan is not None else ""
            push.commit()
            push.agree("load")
        finally:
            push.close()
        if self._plan is not None:
            self.close()
        return SyncReport(
            num_bytes=push.num_bytes,
            num_rounds=push.num_rounds,
            seconds=time.perf_counter() - start,
            link_bytes=push.link_bytes,
            note=note,
            through_host=through_host,
        )

    def _pulled(self, push: Push, holding: Holding | None) -> bool:
        """Return whether all engines took the weights by the plan, or one met a problem. Collective: weights stay
        unchanged from here on."""
        if self._collective.any(self._plan is None or self._planned is not holding):
            return False
        assert self._plan is not None
        return push.pull(self._plan)

    def _make_plan(self, push: Push, holding: Holding | None, on_device: SharedCopy | None) -> str:
        """Make a plan of what the engines just loaded, and prove it on that; return why there is none. Collective."""
        none = self._collective.any(bool(push.first_problem) or holding is None or holding is self._refused)
        for mirrors in self._mirrors[2 if none else 0 :]:  # the plan's take as much as all of them
            mirrors.close()
        if none:
            return ""
        assert holding is not None
        note, self._plan = push.plan(holding, on_device)
        news = note if self._told is not holding else ""
        self._planned, self._told = holding, holding if note else None
        self._refused = holding if note and not push.lacks_room else None  # room may be there at the next push
        return news

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()
        for mirrors in self._mirrors:
            mirrors.close()


class RoundState(msgspec.Struct, frozen=True, kw_only=True):
    bucket: Bucket | None  # its bucket, if it packed anything
    takes: bool  # whether it has engines
    last: bool  # whether it has no more rounds
    problem: str  # the first that it or its engines met


class Push:
    """One push, on one rank. It remembers the first problem and goes on, as the other ranks do."""

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
        self.problem = ""  # after which other engines may hold a mixture
        self._alone: dict[int, str] = {}  # problems of single engines: the others have all of the new version
        self.num_bytes = 0
        self.num_rounds = 0
        self.link_bytes = 0
        self.lacks_room = False  # whether a rank had no memory for a plan
        self._config = config
        # A rank has a bucket of its own, and about one's mirror of each other host.
        self._bucket_bytes = config.bucket_bytes // len(set(hosts))
        self._collective = collective
        self._hosts = hosts
        self._buffers = buffers
        self._mirrors = mirrors
        self._engines = engines
        self._threads = ThreadPoolExecutor(max_workers=max(1, len(engines)), thread_name_prefix="weights")
        self._pending: list[tuple[int, Future[None]]] = []  # by engine
        self._answers: dict[int, list[Answer]] = {}  # by engine: of its ranks, to the last call
        self._turn = 0  # rounds that were exchanged, also those in which this rank packed nothing
        self._kept: set[int] = set()  # rounds that crossed to be checked, and are still there to be loaded
        self._keepable: int | None = None  # bytes for them on this rank, as of the first round
        self._apart = ""  # which copies of the weights differ between trainer ranks: a problem that stays
        self._touched = False  # whether engines may hold other weights than before
        self._ended: list[int] = []  # engines that lived when the push ended them
        self._device = torch.device("cpu")  # of the tensors that were packed

    def stream(self, call: str, source: RankShards) -> None:
        """Pack, exchange and send round by round, until every engine has answered to all."""
        self.num_bytes = self.num_rounds = self._turn = 0
        own_rounds = source.rounds(self._bucket_bytes * 15 // 16)  # the rest is for alignment
        last = False
        while not last:
            tensors = next(own_rounds, None)
            side = self.num_rounds % 2
            bucket = self._pack_or_note(side, tensors) if tensors is not None else None
            self._wait(lost_alone=call == LOAD)
            last = self._exchange(call, bucket, side, last=tensors is None)
        self._wait(lost_alone=call == LOAD)

    def plan(self, holding: Holding, on_device: SharedCopy | None) -> tuple[str, JobPlan | None]:
        """Have the engines plan how to pull, and compare by that plan what they loaded. Returns (why there is no plan,
        or "", the plan)."""
        holdings = self._collective.gather(holding, Holding)
        plan, refusal = None, ""
        try:
            plan = JobPlan(self._collective, holdings, self._hosts, on_device)
        except (OSError, WeightSyncError) as error:  # it may be this rank's alone
            refusal = str(error)
        replies = self._ask_all(PLAN, plan.holding) if plan is not None else {}
        refusal = self._told(refusal, replies)
        if plan is not None and not refusal:
            refusal = plan.learn(replies)
            mirrored = plan.link_bytes and not self._collective.any(bool(refusal))
            refusal = self._told(refusal, self._ask_all(PLAN, plan.holding) if mirrored else {})
        if plan is None or refusal:
            if plan is not None:
                plan.close()
            self.lacks_room = self._collective.any(plan is not None and plan.lacks_room)
            return "" if self._collective.any(bool(self.first_problem)) else refusal, None
        so_far = self.num_rounds, self.link_bytes
        self.pull(plan, copy=False)
        self.num_rounds, self.link_bytes = so_far
        return "", plan

    def _told(self, refusal: str, replies: Mapping[int, Sequence[Answer]]) -> str:
        """Return the first refusal, or problem, of all. Collective."""
        refusals = [refusal, *(reply.refusal for ranks in replies.values() for reply in ranks), self.first_problem]
        told = self._collective.gather(next(filter(None, refusals), ""), str)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), "")

    def pull(self, plan: JobPlan, *, copy: bool = True) -> bool:
        """Have the engines copy what they need, and compare digests. False where one knows no plan."""
        if copy:
            plan.bring()
        digests, message = list[tuple[int, ...]](), Pull(version=self.version, key=plan.key, copy=copy)
        replies = self._ask_all(PULL, message, meanwhile=lambda: digests.append(plan.digests()))
        unplanned = any(
            engine not in plan.chunks or reply.unplanned for engine, ranks in replies.items() for reply in ranks
        )
        own = Answer(digests=digests[0], unplanned=unplanned, problem=self.first_problem)
        states = self._collective.gather(own, Answer)
        self._touched = copy
        if any(state.unplanned for state in states) and not any(state.problem for state in states):
            return False
        wanted = plan.wanted([state.digests for state in states])
        self._apart = plan.apart(wanted)
        self.problem = self._apart or self.problem
        self._alone |= plan.differences(replies, wanted)
        self.num_bytes, self.num_rounds, self.link_bytes = plan.num_bytes, 0, plan.link_bytes
        return True

    def commit(self) -> None:
        """Finish on all engines, and end those that failed alone; or end all, where they may hold a mixture."""
        all_of_them = self._collective.any(bool(self.problem))
        if not all_of_them:
            self._submit(COMMIT, self.version)
            self._wait(all_alone=True)
        self._touched = True
        self._end_engines([e for e in self._engines if all_of_them or e.index in self._alone])

    def _end_engines(self, engines: Sequence[Engine]) -> None:
        self._ended += [engine.index for engine in engines if engine.alive]
        for engine in engines:
            engine.kill()

    @property
    def first_problem(self) -> str:
        return self.problem or next(iter(self._alone.values()), "")

    def agree(self, stage: str) -> None:
        """Raise WeightSyncError on all ranks if one has a problem: the one that stays."""
        own = self.first_problem, bool(self._apart), bool(self.problem)
        told = self._collective.gather(own, tuple[str, bool, bool])
        for rank, (problem, stays, _) in sorted(enumerate(told), key=lambda each: not each[1][1]):
            if problem:
                kind = CopiesDifferError if stays else WeightSyncError
                if self._touched and stage == "check":
                    self._end_engines(self._engines)
                stopped = "The engines were stopped" if any(of_all for *_, of_all in told) else "It was stopped"
                raise kind(
                    f"weight sync to version {self.version} failed in its {stage} stage on rank {rank}: {problem}. "
                    + (f"{stopped}." if self._touched else "The engines keep the old version."),
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
        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                self._device = tensor.device
                yield name, tensor

        slots = pack(noted(), partial(self._room, side))
        if not slots:
            return None
        address, of_gpu = self._buffers[side].address(), self._device.type == "cuda"
        return Bucket(version=self.version, address=address, slots=slots, of_gpu=of_gpu)

    def _room(self, side: int, num_bytes: int) -> torch.Tensor:
        """Return the bucket, grown where one tensor or alignment needs it."""
        while len(self._buffers) <= side:
            self._buffers.append(SharedBuffer(max(num_bytes, self._bucket_bytes)))
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
        takers = {self._hosts[rank] for rank, state in enumerate(states) if state.takes}
        several = packed and len(set(self._hosts)) > 1
        taken = self._mirrored(call, packed, sorted(takers), side) if several else list(packed.values())
        self._turn += 1
        if taken:
            self._submit(call, tuple(taken))
        return all(state.last for state in states)

    def _mirrored(self, call: str, packed: dict[int, Bucket], takers: Sequence[int], side: int) -> list[Bucket]:
        """Have new buckets cross; return them as engines of this host see them. Collective."""
        here, number = self._hosts[self._collective.rank], self._turn
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
                self.problem = self.problem or problems[self._collective.rank]
                return []
            mirrors.fill(crossings, lambda _: self._buffers[side].data)
            self.link_bytes += sum(c.end for c in crossings)
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

    def _submit(self, call: str, message: tuple[Bucket, ...] | Holding | Pull | int) -> None:
        payload = msgspec.msgpack.encode(message)
        for engine in (each for each in self._engines if each.index not in self._alone):
            self._pending.append((engine.index, self._threads.submit(self._ask, engine, call, payload)))

    def _ask_all(
        self, call: str, message: Holding | Pull, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[int, list[Answer]]:
        """Ask engines that each have all of one version."""
        self._answers = {}
        self._submit(call, message)
        meanwhile()
        self._wait(all_alone=True)
        return self._answers

    def _ask(self, engine: Engine, call: str, payload: bytes) -> None:
        replies = engine.rank_call(call, payload, timeout_s=BULK_S)
        answers = [msgspec.msgpack.decode(reply, type=Answer) for reply in replies]
        for rank, answer in enumerate(answers):
            if answer.problem:
                raise WeightSyncError(f"engine {engine.index}, rank {rank}: {answer.problem}")
        self._answers[engine.index] = answers

    def _wait(self, *, all_alone: bool = False, lost_alone: bool = False) -> None:
        """Wait for all answers. Args: whether any problem is its engine's alone, or that of an engine which does not
        answer; other problems leave others with a mixture."""
        for engine, future in self._pending:
            try:
                future.result()
            except (EngineError, WeightSyncError) as error:
                if all_alone or (lost_alone and isinstance(error, EngineError)):
                    self._alone[engine] = str(error)
                else:
                    self.problem = self.problem or str(error)
        self._pending = []
