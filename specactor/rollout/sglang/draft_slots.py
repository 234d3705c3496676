"""Slots of a KV pool and rows of a page table, by request. PURE.

Invariants: no row or block belongs to two requests, and none is lost; row 0 and slot 0 are never given (SGLang pads
with them).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK_TOKENS = 32  # slots of a block


@dataclass(slots=True)
class Place:
    row: int
    blocks: list[int] = field(default_factory=list)  # position p is in block p // BLOCK_TOKENS of these


class Reservation(NamedTuple):
    row: int
    new_blocks: list[tuple[int, int]]  # (index among the request's blocks, block)


class Slots:
    """The slots and rows of one pool."""

    def __init__(self, *, num_slots: int, num_rows: int) -> None:
        """Slots 1..num_slots and rows 1..num_rows can be given."""
        self._free_blocks = list(range(num_slots // BLOCK_TOKENS))[::-1]
        self._free_rows = list(range(1, num_rows + 1))[::-1]
        self._places: dict[Hashable, Place] = {}

    @property
    def num_free(self) -> tuple[int, int]:
        """Return how many blocks and rows are free."""
        return len(self._free_blocks), len(self._free_rows)

    def row(self, key: Hashable) -> int | None:
        place = self._places.get(key)
        return place.row if place else None

    def reserve(self, key: Hashable, tokens: int) -> Reservation | None:
        """Make room for `tokens` positions of a request. None, and nothing changes, where there is none."""
        place = self._places.get(key)
        first = len(place.blocks) if place else 0
        missing = max(0, -(-tokens // BLOCK_TOKENS) - first)
        if missing > len(self._free_blocks) or not (place or self._free_rows):
            return None
        if place is None:
            place = self._places[key] = Place(self._free_rows.pop())
        place.blocks += [self._free_blocks.pop() for _ in range(missing)]
        return Reservation(place.row, list(enumerate(place.blocks[first:], start=first)))

    def free(self, key: Hashable) -> None:
        """Give a request's place back, if it has one."""
        place = self._places.pop(key, None)
        if place is not None:
            self._free_rows.append(place.row)
            self._free_blocks += place.blocks


def slot_range(block: int) -> range:
    return range(1 + block * BLOCK_TOKENS, 1 + (block + 1) * BLOCK_TOKENS)
