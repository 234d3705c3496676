"""Which trainer rank hands over which parameter in which round, and where it lies in a bucket. PURE.

Invariants: every parameter has one round and one carrier; carriers take turns; ranks that gather together walk
parameters alike; a rank's part of a round fits its bucket, unless one parameter does not; slots do not overlap, keep
the order, and start at multiples of `ALIGNMENT`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


Carrier = tuple[bool, int, int]
"""Whether of experts, and the (copy, shard) that hands a parameter over."""


def carrier(index: int, *, expert: bool, copies: int, shards: int) -> Carrier:
    """Return who hands over the parameter at `index`, of which there are equal copies, each in shards."""
    return expert, index % copies, index // copies % shards


def rounds(parts: Sequence[tuple[int, Carrier]], capacity_bytes: int) -> list[list[int]]:
    """Return the parameters of each round, equal on all ranks of a pipeline stage; `parts` are bytes and carriers."""
    plan: list[list[int]] = []
    load: dict[Carrier, int] = {}
    for index, (num_bytes, carrier) in enumerate(parts):
        full = _heaviest({**load, carrier: load.get(carrier, 0) + num_bytes}) > capacity_bytes
        if not plan or full:
            plan.append([])
            load = {}
        plan[-1].append(index)
        load[carrier] = load.get(carrier, 0) + num_bytes
    return plan


def _heaviest(load: dict[Carrier, int]) -> int:
    """Return an upper bound of one rank's bytes."""
    kinds = (False, True)
    return sum(max((num_bytes for (of, *_), num_bytes in load.items() if of == kind), default=0) for kind in kinds)
