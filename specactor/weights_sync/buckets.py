"""What goes where in a bucket. PURE: names, shapes and byte counts in, offsets out.

Invariants: slots keep the tensors' order, do not overlap, and start at multiples of `ALIGNMENT`.
"""

from __future__ import annotations

import math

import msgspec

ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every element size."""

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """First byte."""
    digest: int = 0
    """Of the tensor's bytes at their source."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
