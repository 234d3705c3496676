"""Slots of a draft model's pool: none is given twice, none is lost, and who is in use keeps its own."""

from __future__ import annotations

from collections.abc import Collection, Hashable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specactor.rollout.sglang.draft_slots import BLOCK_TOKENS, Reservation, Slots, slot_range

BLOCKS, ROWS = 7, 4
KEYS = "abcdef"
Operations = list[tuple[str, int, frozenset[str]]]


class KeepsBlocksOfTheEvicted(Slots):
    """Wrong: what an evicted request held stays its own in the caller's eyes, and is lost here."""

    def free(self, key: Hashable) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            self._free_rows.append(place.row)


class EvictsWhoIsInUse(Slots):
    def reserve(self, key: Hashable, tokens: int, *, in_use: Collection[Hashable] = ()) -> Reservation | None:
        return super().reserve(key, tokens)


class GivesRowsTwice(Slots):
    def free(self, key: Hashable) -> None:
        super().free(key)
        self._free_rows.append(self._free_rows[-1] if self._free_rows else 1)


class ForgetsWhoWasUsed(Slots):
    def reserve(self, key: Hashable, tokens: int, *, in_use: Collection[Hashable] = ()) -> Reservation | None:
        reserved = super().reserve(key, tokens, in_use=in_use)
        if reserved is not None:
            self._places.move_to_end(key, last=False)
        return reserved


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(KEYS),
        st.integers(0, (BLOCKS + 1) * BLOCK_TOKENS),  # 0: freed
        st.frozensets(st.sampled_from(KEYS), max_size=3),
    ),
    max_size=40,
)


def check(kind: type[Slots], operations: Operations) -> None:
    slots = kind(num_slots=BLOCKS * BLOCK_TOKENS + 5, num_rows=ROWS)
    rows: dict[Hashable, int] = {}
    blocks: dict[Hashable, list[int]] = {}
    used: list[Hashable] = []
    for key, tokens, in_use in operations:
        if not tokens:
            slots.free(key)
            rows.pop(key, None), blocks.pop(key, None)
            continue
        before = dict(rows), {k: b[:] for k, b in blocks.items()}
        reserved = slots.reserve(key, tokens, in_use=in_use)
        needed = -(-tokens // BLOCK_TOKENS)
        if reserved is None:
            kept = {k for k in rows if k in in_use} - {key}
            room = BLOCKS - sum(len(blocks[k]) for k in kept)
            assert needed > room or (key not in rows and len(kept) == ROWS)
            assert (rows, blocks) == before
            continue
        assert not set(reserved.evicted) & ({key} | in_use)
        others = {k for k in used if k in rows and k not in in_use and k != key}
        oldest = sorted(others, key=lambda k: len(used) - 1 - used[::-1].index(k))
        assert list(reserved.evicted) == oldest[: len(reserved.evicted)]
        for evicted in reserved.evicted:
            del rows[evicted], blocks[evicted]
        assert rows.setdefault(key, reserved.row) == reserved.row
        held = blocks.setdefault(key, [])
        assert [index for index, _ in reserved.new_blocks] == list(range(len(held), max(needed, len(held))))
        held += [block for _, block in reserved.new_blocks]
        used.append(key)
        given_blocks = [block for each in blocks.values() for block in each]
        assert len(set(given_blocks)) == len(given_blocks) == BLOCKS - slots.free_blocks
        assert len(set(rows.values())) == len(rows) == ROWS - slots.free_rows
        assert all(1 <= row <= ROWS for row in rows.values())
        assert all(slots.row(each) == rows.get(each) for each in KEYS)


@given(OPERATIONS)
def test_every_slot_has_one_owner(operations: Operations) -> None:
    check(Slots, operations)


@pytest.mark.parametrize("kind", [KeepsBlocksOfTheEvicted, EvictsWhoIsInUse, GivesRowsTwice, ForgetsWhoWasUsed])
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
