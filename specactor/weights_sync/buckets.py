"""Which trainer rank hands over which parameter in which round, and where it lies in a bucket. PURE.

Invariants: every parameter has one round and one carrier; carriers take turns; ranks that gather together walk
parameters alike; a rank's part of a round fits its bucket, unless one parameter does not; slots do not overlap, keep
the order, and start at multiples of `ALIGNMENT`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

ALIGNMENT = 64  # bytes; a cache line, and a multiple of every element size

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # first byte
    digest: int = 0  # of the tensor's bytes at their source

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Part:
    num_bytes: int
    expert: bool


@dataclass(frozen=True, kw_only=True)
class Spread:
    """`copies` equal ones of a parameter, each in `shards` pieces."""

    copies: int
    shards: int

    def carrier(self, index: int) -> tuple[int, int]:
        """Return the (copy, shard) that hands over the parameter at `index`."""
        return index % self.copies, index // self.copies % self.shards


def rounds(parts: Sequence[Part], *, dense: Spread, expert: Spread, capacity_bytes: int) -> list[list[int]]:
    """Return the parameters of each round, equal on all ranks of a pipeline stage."""
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
    """Return an upper bound of one rank's bytes."""
    return sum(max((num_bytes for (kind, _), num_bytes in load.items() if kind == of), default=0) for of in (0, 1))
