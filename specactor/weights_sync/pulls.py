"""How the engines of all hosts pull: which memory each reads, what crosses, who digests what.

Invariants: what crosses does so once per host, and only what no rank of it holds and an engine reads; digests are their
owner's, and equal where bytes go to one place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from specactor.parallel.collective import Collective
from specactor.weights_sync.digest import digest_of, digest_spans
from specactor.weights_sync.memory import SharedCopy, open_address, room_bytes
from specactor.weights_sync.messages import Answer, Holding
from specactor.weights_sync.mirrors import Crossing, Mirrors, crossings
from specactor.weights_sync.plan import Chunk, Held, Span, merged, nearer

Spans = tuple[Span, ...]
Digests = npt.NDArray[np.uint64]
"""By number of what is digested: ranks one after the other, each in its order."""


class JobPlan:
    def __init__(
        self, collective: Collective, holdings: Sequence[Holding], hosts: Sequence[int], on_device: SharedCopy | None
    ) -> None:
        """Raises WeightSyncError on all ranks where `holdings`, by rank, are not all of the model. `hosts`,
        `on_device`: see `RankShards`."""
        self._collective, self._hosts, self._on_device = collective, hosts, on_device
        self._owner = [rank for rank, each in enumerate(holdings) for _ in each.addresses]
        here, addresses = hosts[collective.rank], [address for each in holdings for address in each.addresses]
        tensors = merged([(len(each.addresses), each.tensors) for each in holdings], hosts, here)
        self._mirrors = Mirrors(collective, hosts)
        seen = tuple(a if hosts[owner] == here else None for a, owner in zip(addresses, self._owner, strict=True))
        on_gpu = {number: address.gpu for number, address in enumerate(seen) if address is not None and address.gpu}
        places = {number: holdings[self._owner[number]].places for number in on_gpu}
        near: defaultdict[str, dict[str, Held]] = defaultdict(dict)  # by name
        for number, gpu in on_gpu.items():  # trainer ranks on one GPU may hold different parts
            found = near[gpu.uuid]
            found |= {one.name: one for one in nearer([found.get(t.name, t) for t in tensors], places, number)}
        of_host = [each for host, each in zip(hosts, holdings, strict=True) if host == here]
        self.holding = Holding(  # for the engines of this host
            addresses=seen,
            tensors=tensors,
            near={uuid: tuple(found.values()) for uuid, found in near.items()},
            refusals={uuid: reason for each in of_host for uuid, reason in each.refusals.items()},
        )
        self.key = _digest(self.holding)  # engines that took it know their plan by that
        self.num_bytes = sum(tensor.num_bytes for tensor in tensors)
        self.link_bytes = 0
        self.lacks_room = False  # whether this rank cannot take part for want of memory, which may come
        self.through_host = ""  # why engines read host memory of what lies on their own GPU
        self.chunks: dict[int, list[tuple[Chunk, ...]]] = {}  # by engine of this rank, per rank of it
        self._order: list[list[Spans]] = [[] for _ in holdings]  # what each rank digests
        # Numbers of what is to have the same digest, of other owners; a large job has millions, looked at in each push.
        self._alike = np.zeros((0, 2), np.int64)
        self._numbers: dict[int, list[npt.NDArray[np.int64]]] = {}  # of `chunks`
        self._crossings: list[Crossing] = []
        first = self._owner.index(collective.rank)
        own = holdings[collective.rank].addresses
        self._memories = {first + i: open_address(each, locked=False) for i, each in enumerate(own) if each is not None}

    def learn(self, replies: Mapping[int, Sequence[Answer]]) -> str:
        """Take what this rank's engines planned; return why it cannot take part. If anything crosses, `holding` is
        afterwards that of the mirrors. Collective."""
        self.chunks = {engine: [reply.chunks for reply in ranks] for engine, ranks in replies.items()}
        mine = {
            (chunk.spans, _digest((number, len(ranks), chunk.place)), chunk.spans[0].memory in reply.on_gpu): None
            for ranks in replies.values()
            for number, reply in enumerate(ranks)
            for chunk in reply.chunks
        }
        reasons = [reply.through_host for ranks in replies.values() for reply in ranks]
        everyone = self._collective.gather(
            (tuple(mine), next(filter(None, reasons), "")), tuple[tuple[tuple[Spans, int, bool], ...], str]
        )
        told = [part for part, _ in everyone]
        self.through_host = next((reason for _, reason in everyone if reason), "")
        for spans in dict.fromkeys(spans for part in told for spans, _, _ in part):
            self._order[self._owner[spans[0].memory]].append(spans)
        numbers = {spans: number for number, spans in enumerate(chain(*self._order))}
        first: dict[int, int] = {}  # by place in an engine
        alike: dict[tuple[int, int], None] = {}
        for number, place in dict.fromkeys((numbers[spans], place) for part in told for spans, place, _ in part):
            if (other := first.setdefault(place, number)) != number:
                alike[number, other] = None
        self._alike = np.array([*alike], np.int64).reshape(-1, 2)
        self._numbers = {
            engine: [np.array([numbers[chunk.spans] for chunk in part], np.int64) for part in parts]
            for engine, parts in self.chunks.items()
        }
        problem, room = "", room_bytes(self._hosts.count(self._hosts[self._collective.rank]))
        if self._on_device is not None:
            read = [spans for part in told for spans, _, on_gpu in part if not on_gpu]
            self._on_device.read_by(s for spans in read for s in spans if s.memory in self._memories)
            copied = self._on_device.lacking_bytes()
            if copied > room:
                problem = (
                    f"no memory for copies of a GPU's tensors: {copied} bytes are needed, and a rank may take {room}"
                )
            room -= copied
            self.lacks_room = bool(problem)
        self._crossings = crossings([[spans for spans, _, _ in part] for part in told], self._owner, self._hosts)
        self.link_bytes = sum(crossing.end - crossing.start for crossing in self._crossings)
        if not self._crossings:
            return problem
        problems = self._mirrors.make(self._crossings, most_bytes=room)
        self.lacks_room |= bool(problems[self._collective.rank])
        far = tuple(self._mirrors.addresses.get(memory) for memory in range(len(self._owner)))
        self.holding = Holding(addresses=far, tensors=(), planned=self.key)
        self.key = _digest(self.holding)
        return problem or problems[self._collective.rank]

    def bring(self) -> None:
        """Bring to every host what its engines read of other hosts. Collective."""
        if self._crossings:
            self._mirrors.fill(self._crossings, self._memories.__getitem__)

    def digests(self) -> tuple[int, ...]:
        """Return those of all chunks that any engine takes from this rank."""
        own = self._order[self._collective.rank]
        if self._on_device is not None:
            return self._on_device.digests(own)
        memories = {number: memory.numpy() for number, memory in self._memories.items()}
        return tuple(digest_spans(memories, spans) for spans in own)

    def wanted(self, digests: Sequence[Sequence[int]]) -> Digests:
        """Return the digests that engines are to have, from every rank's `digests()`."""
        return np.array([*chain(*digests)], np.uint64)

    def apart(self, wanted: Digests) -> str:
        """Return which parameters this rank's engines take from copies that differ."""
        others = dict(self._alike[np.not_equal(*wanted[self._alike.T])].tolist())
        for engine, ranks in self.chunks.items() if others else ():
            for part, numbers in zip(ranks, self._numbers[engine], strict=True):
                for chunk, number in zip(part, numbers.tolist(), strict=True):
                    if number in others:
                        ends = np.cumsum([len(each) for each in self._order])
                        low, high = sorted(np.searchsorted(ends, [number, others[number]], "right"))
                        return (
                            f"{_names(chunk)} is not the same on trainer ranks {low} and {high}, which hold a copy "
                            "each; resume from a checkpoint of before this step"
                        )
        return ""

    def differences(self, replies: Mapping[int, Sequence[Answer]], wanted: Digests) -> dict[int, str]:
        """Return by engine of this rank which of its parameters are not the trainer's."""
        found: dict[int, str] = {}
        for engine, ranks in replies.items():
            for rank, (reply, numbers) in enumerate(zip(ranks, self._numbers[engine], strict=True)):
                came, due, what = np.array(reply.digests, np.uint64), wanted[numbers], ""
                if len(came) != len(due):
                    what = f"{len(came)} of {len(due)} digests came back"
                elif wrong := np.flatnonzero(came != due).tolist():
                    what = f"{_names(self.chunks[engine][rank][wrong[0]])} arrived with a wrong digest"
                if what:
                    found.setdefault(engine, f"engine {engine}, rank {rank}: {what}")
        return found

    def close(self) -> None:
        self._mirrors.close()
        if self._on_device is not None:
            self._on_device.read_by(())


def _names(chunk: Chunk) -> str:
    return ", ".join(dict.fromkeys(chunk.parameters))


def _digest(value: object) -> int:
    return digest_of(memoryview(msgspec.msgpack.encode(value)))
