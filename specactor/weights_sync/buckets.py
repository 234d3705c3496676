"""Which trainer rank hands over which parameter in which round, and where it lies in a bucket. PURE: byte counts in.

The parameters of one pipeline stage are listed in the same order by all its ranks. A parameter is held in `copies` (by
ranks that differ in data or context coordinates), each copy cut into `shards` (by tensor parallelism). One rank per
parameter, its carrier, gathers the shards and hands it over; carriers take turns, so all carry about the same load.

Invariants: every parameter is in exactly one round and has exactly one carrier; ranks that gather together walk the
same parameters in the same order; what one rank carries in a round fits its bucket, unless one parameter does not.
Slots keep the tensors' order, do not overlap, and start at multiples of `ALIGNMENT`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

ALIGNMENT = 64  # bytes; a cache line, and a multiple of every element size

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # first byte
    digest: int = 0  # of the tensor's bytes at their source

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Part:
    """One parameter: its size when whole, and whether it belongs to an expert."""

    num_bytes: int
    expert: bool


@dataclass(frozen=True, kw_only=True)
class Spread:
    """It says how parameters of one kind are held: `copies` equal ones, each in `shards` pieces."""

    copies: int
    shards: int

    def carrier(self, index: int) -> tuple[int, int]:
        """(copy, shard) coordinates of the rank that hands over the parameter at `index`."""
        return index % self.copies, index // self.copies % self.shards


def rounds(parts: Sequence[Part], *, dense: Spread, expert: Spread, capacity_bytes: int) -> list[list[int]]:
    """Indices of the parameters of each round, in order. Equal on all ranks of a pipeline stage."""
    plan: list[list[int]] = []
    load: dict[tuple[bool, tuple[int, int]], int] = {}
    for index, part in enumerate(parts):
        carrier = (part.expert, (expert if part.expert else dense).carrier(index))
        full = _heaviest({**load, carrier: load.get(carrier, 0) + part.num_bytes}) > capacity_bytes
        if not plan or full:
            plan.append([])
            load = {}
        plan[-1].append(index)
        load[carrier] = load.get(carrier, 0) + part.num_bytes
    return plan


def _heaviest(load: dict[tuple[bool, tuple[int, int]], int]) -> int:
    """Upper bound of one rank's bytes: a rank carries dense parameters at one coordinate and experts' at another."""
    return sum(max((num_bytes for (kind, _), num_bytes in load.items() if kind == of), default=0) for of in (0, 1))
