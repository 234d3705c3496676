"""Memory of other hosts' ranks, at the same places here: plans and digests speak of the owner's alone.

Invariants: every rank derives the same crossings; between two ranks bytes go in order; a mirror ends with the last byte
that crosses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from specactor.errors import WeightSyncError
from specactor.parallel.collective import Collective
from specactor.weights_sync.memory import Address, SharedBuffer
from specactor.weights_sync.plan import Span, covered


class Crossing(NamedTuple):
    memory: int
    owner: int
    taker: int
    start: int
    end: int


def taker(hosts: Sequence[int], owner: int, host: int) -> int:
    """Return the rank of a host that takes what an owner gives; they take turns."""
    there, peers = (where(hosts, of) for of in (host, hosts[owner]))
    return there[peers.index(owner) % len(there)]


def where(hosts: Sequence[int], host: int) -> list[int]:
    return [rank for rank, of in enumerate(hosts) if of == host]


def crossings(reads: Sequence[Iterable[Sequence[Span]]], owners: Sequence[int], hosts: Sequence[int]) -> list[Crossing]:
    """Return what must cross, each byte once per host, for what engines read: `reads` are by rank, the spans of a
    sequence of one memory."""
    needs: dict[tuple[int, int], list[Span]] = defaultdict(list)  # by host and memory
    for host, of_rank in zip(hosts, reads, strict=True):
        for spans in of_rank:
            if hosts[owners[spans[0].memory]] != host:
                needs[host, spans[0].memory] += spans
    return [
        Crossing(memory, owners[memory], to, start, end)
        for (host, memory), spans in sorted(needs.items())
        for to in [taker(hosts, owners[memory], host)]
        for start, end in covered(spans)
    ]


class Mirrors:
    def __init__(self, collective: Collective, hosts: Sequence[int]) -> None:
        self._collective, self._hosts = collective, hosts
        self._buffers: dict[int, SharedBuffer] = {}
        self.addresses: dict[int, Address] = {}  # of all mirrors on this host

    def make(self, crossings: Sequence[Crossing], *, most_bytes: float = math.inf) -> list[str]:
        """Have room for all crossings, at most `most_bytes` on this rank; return why a rank has none, by rank.
        Collective."""
        self.addresses, problem, lacking = {}, "", self.lacking(crossings)
        taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for crossing in crossings:
            if crossing.taker == self._collective.rank:
                taken[crossing.memory].append((crossing.start, crossing.end))
        try:
            # only what crosses is written: pages between are never made
            needed = sum(end - start for memory in lacking for start, end in taken[memory])
            if needed > (room := max(0, most_bytes)):
                raise WeightSyncError(f"{needed} bytes are needed, and a rank may take {room}")
            for memory, end in lacking.items():
                if memory in self._buffers:
                    self._buffers.pop(memory).close()
                self._buffers[memory] = SharedBuffer(end, locked=False)
            for memory, parts in taken.items():  # what stays locked need not be locked again
                self._buffers[memory].lock([*self._buffers[memory].locked, *parts])
        except (OSError, WeightSyncError) as error:  # the other ranks wait for this one
            problem = f"no memory for what comes from other hosts: {error}"
        mine = {memory: buffer.address() for memory, buffer in self._buffers.items()}
        everyone = self._collective.gather((mine, problem), tuple[dict[int, Address], str])
        for rank in where(self._hosts, self._hosts[self._collective.rank]):
            self.addresses |= everyone[rank][0]
        return [problem for _, problem in everyone]

    def lacking(self, crossings: Sequence[Crossing]) -> dict[int, int]:
        """Return the bytes of each memory that this rank has no room for."""
        ends = {c.memory: c.end for c in sorted(crossings) if c.taker == self._collective.rank}  # the last of each
        return {
            memory: end
            for memory, end in ends.items()
            if memory not in self._buffers or self._buffers[memory].data.numel() < end
        }

    def data(self, memory: int) -> torch.Tensor:
        """Return this rank's mirror of a memory, [N] bytes."""
        return self._buffers[memory].data

    def fill(self, crossings: Sequence[Crossing], own: Callable[[int], torch.Tensor]) -> None:
        """Have all crossings happen, for engines to read. `own` returns the bytes of this rank's memory. Collective."""
        rank = self._collective.rank
        self._collective.pass_bytes(
            [(own(c.memory)[c.start : c.end], c.taker) for c in crossings if c.owner == rank],
            [(self.data(c.memory)[c.start : c.end], c.owner) for c in crossings if c.taker == rank],
        )
        self._collective.barrier()

    def close(self) -> None:
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()
