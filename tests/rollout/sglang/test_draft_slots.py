"""Slots of a draft model's pool: none is given twice, and none is lost."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specactor.rollout.sglang.draft_slots import BLOCK_TOKENS, Slots, slot_range

BLOCKS, ROWS = 7, 4
KEYS = "abcdef"
Operations = list[tuple[str, int]]


class KeepsBlocksOfTheFreed(Slots):
    """Wrong: what a freed request held is lost."""

    def free(self, key: Hashable) -> None:
        if key in self._places:
            self._free_rows.append(self._places.pop(key)[0])


class GivesRowsTwice(Slots):
    def free(self, key: Hashable) -> None:
        super().free(key)
        self._free_rows.append(self._free_rows[-1] if self._free_rows else 1)


class TakesHalf(Slots):
    """Wrong: what there is of too little room is taken, and nobody is told of it."""

    def reserve(self, key: Hashable, tokens: int) -> tuple[int, list[tuple[int, int]]] | None:
        reserved = super().reserve(key, tokens)
        if reserved is None and self._free_blocks and key in self._places:
            self._places[key][1].append(self._free_blocks.pop())
        return reserved


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(0, (BLOCKS + 1) * BLOCK_TOKENS)),  # 0: freed
    max_size=40,
)


def check(kind: type[Slots], operations: Operations) -> None:
    slots = kind(num_slots=BLOCKS * BLOCK_TOKENS + 5, num_rows=ROWS)
    rows: dict[Hashable, int] = {}
    blocks: dict[Hashable, list[int]] = {}
    for key, tokens in operations:
        if not tokens:
            slots.free(key)
            rows.pop(key, None), blocks.pop(key, None)
            continue
        held = blocks.get(key, [])
        needed = -(-tokens // BLOCK_TOKENS)
        reserved = slots.reserve(key, tokens)
        if reserved is None:
            room = BLOCKS - sum(map(len, blocks.values())) + len(held)
            assert needed > room or (key not in rows and len(rows) == ROWS)
        else:
            row, new_blocks = reserved
            assert rows.setdefault(key, row) == row
            assert [index for index, _ in new_blocks] == list(range(len(held), max(needed, len(held))))
            blocks[key] = held + [block for _, block in new_blocks]
        given_blocks = [block for each in blocks.values() for block in each]
        assert len(set(given_blocks)) == len(given_blocks)
        assert len(set(rows.values())) == len(rows)
        free = len(slots._free_blocks), len(slots._free_rows)
        assert free == (BLOCKS - len(given_blocks), ROWS - len(rows))
        assert all(1 <= row <= ROWS for row in rows.values())
        assert all(slots.row(each) == rows.get(each) for each in KEYS)


@given(OPERATIONS)
def test_every_slot_has_one_owner(operations: Operations) -> None:
    check(Slots, operations)


@pytest.mark.parametrize("kind", [KeepsBlocksOfTheFreed, GivesRowsTwice, TakesHalf])
def test_mistakes_are_noticed(kind: type[Slots]) -> None:
    @given(OPERATIONS)
    @settings(max_examples=300, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    def look(operations: Operations) -> None:
        check(kind, operations)

    with pytest.raises((AssertionError, IndexError, ExceptionGroup)):
        look()


def test_blocks_cover_the_pool_but_for_slot_0() -> None:
    slots = [slot for block in range(BLOCKS) for slot in slot_range(block)]
    assert slots == list(range(1, 1 + BLOCKS * BLOCK_TOKENS))
