"""Slots of a KV pool and rows of a page table, by request. PURE.

Invariants: no row or block belongs to two requests, and none is lost; row 0 and slot 0 are never given (SGLang pads
with them); a request in use is never evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

BLOCK_TOKENS = 32  # slots of a block


@dataclass(slots=True)
class Place:
    row: int
    blocks: list[int] = field(default_factory=list)  # position p is in block p // BLOCK_TOKENS of these


@dataclass(frozen=True, slots=True)
class Reservation:
    """What changed so that a request has room."""

    row: int
    new_blocks: tuple[tuple[int, int], ...]  # (index among the request's blocks, block)
    evicted: tuple[Hashable, ...]  # requests that lost their place, the least recently used first


class Slots:
    """The slots and rows of one pool."""

    def __init__(self, *, num_slots: int, num_rows: int) -> None:
        """Slots 1..num_slots and rows 1..num_rows can be given."""
        self._free_blocks = list(range(num_slots // BLOCK_TOKENS))[::-1]
        self._free_rows = list(range(1, num_rows + 1))[::-1]
        self._places: OrderedDict[Hashable, Place] = OrderedDict()  # the least recently used first

    @property
    def free_blocks(self) -> int:
        return len(self._free_blocks)

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def row(self, key: Hashable) -> int | None:
        place = self._places.get(key)
        return place.row if place else None

    def reserve(self, key: Hashable, tokens: int, *, in_use: Collection[Hashable] = ()) -> Reservation | None:
        """Make room for `tokens` positions of a request. None, and nothing changes, where only `in_use` could make
        room."""
        place = self._places.get(key)
        missing = max(0, -(-tokens // BLOCK_TOKENS) - (len(place.blocks) if place else 0))
        if place is not None and not missing:
            self._places.move_to_end(key)
            return Reservation(place.row, (), ())
        evicted = self._evictable(key, missing, needs_row=place is None, in_use=in_use)
        if evicted is None:
            return None
        for victim in evicted:
            self.free(victim)
        if place is None:
            place = self._places[key] = Place(self._free_rows.pop())
        first = len(place.blocks)
        place.blocks += [self._free_blocks.pop() for _ in range(missing)]
        self._places.move_to_end(key)
        return Reservation(place.row, tuple(enumerate(place.blocks[first:], start=first)), tuple(evicted))

    def _evictable(
        self, key: Hashable, blocks: int, *, needs_row: bool, in_use: Collection[Hashable]
    ) -> list[Hashable] | None:
        """Return who must go for `blocks` more, or None."""
        free, rows = len(self._free_blocks), len(self._free_rows)
        victims: list[Hashable] = []
        for other, place in self._places.items():
            if free >= blocks and (rows or not needs_row):
                break
            if other != key and other not in in_use:
                victims.append(other)
                free += len(place.blocks)
                rows += 1
        return victims if free >= blocks and (rows or not needs_row) else None

    def free(self, key: Hashable) -> None:
        """Give a request's place back, if it has one."""
        place = self._places.pop(key, None)
        if place is not None:
            self._free_rows.append(place.row)
            self._free_blocks += place.blocks


def slot_range(block: int) -> range:
    return range(1 + block * BLOCK_TOKENS, 1 + (block + 1) * BLOCK_TOKENS)
