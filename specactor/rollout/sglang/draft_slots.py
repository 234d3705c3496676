"""Slots of a KV pool and rows of a page table, by request. PURE.

Invariants: no row or block belongs to two requests, and none is lost; row 0 and slot 0 are never given (SGLang pads
with them).
"""

from __future__ import annotations

from collections.abc import Hashable

BLOCK_TOKENS = 32  # slots of a block


class Slots:
    """The slots and rows of one pool."""

    def __init__(self, *, num_slots: int, num_rows: int) -> None:
        """Slots 1..num_slots and rows 1..num_rows can be given."""
        self._free_blocks = list(range(num_slots // BLOCK_TOKENS))[::-1]
        self._free_rows = list(range(1, num_rows + 1))[::-1]
        self._places: dict[Hashable, tuple[int, list[int]]] = {}
        """By request its row, and its blocks: position p is in the p // BLOCK_TOKENS-th of these."""

    def row(self, key: Hashable) -> int | None:
        return self._places[key][0] if key in self._places else None

    def reserve(self, key: Hashable, tokens: int) -> tuple[int, list[tuple[int, int]]] | None:
        """Make room for `tokens` positions of a request; return its row, and its new blocks with their places among its
        blocks. None, and nothing changes, where there is none."""
        is_new = key not in self._places
        first = 0 if is_new else len(self._places[key][1])
        missing = max(0, -(-tokens // BLOCK_TOKENS) - first)
        if missing > len(self._free_blocks) or (is_new and not self._free_rows):
            return None
        if is_new:
            self._places[key] = self._free_rows.pop(), []
        row, blocks = self._places[key]
        blocks += [self._free_blocks.pop() for _ in range(missing)]
        return row, list(enumerate(blocks[first:], start=first))

    def free(self, key: Hashable) -> None:
        """Give a request's place back, if it has one."""
        if key in self._places:
            row, blocks = self._places.pop(key)
            self._free_rows.append(row)
            self._free_blocks += blocks


def slot_range(block: int) -> range:
    return range(1 + block * BLOCK_TOKENS, 1 + (block + 1) * BLOCK_TOKENS)
