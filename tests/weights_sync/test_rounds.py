"""The plan: every parameter once, the same on all ranks that gather together, bounded, balanced."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from specactor.weights_sync.buckets import Carrier, carrier, rounds


class Spread(NamedTuple):
    copies: int
    shards: int


SPREADS = st.builds(Spread, copies=st.integers(1, 4), shards=st.integers(1, 4))
PARTS = st.lists(st.tuples(st.integers(1, 1000), st.booleans()), max_size=60)
Parts = list[tuple[int, bool]]


def carriers(parts: Parts, d: Spread, e: Spread) -> list[tuple[int, Carrier]]:
    """Bytes, and who hands them over; of dense parameters and of experts."""
    found = []
    for index, (num_bytes, expert) in enumerate(parts):
        copies, shards = e if expert else d
        found.append((num_bytes, carrier(index, expert=expert, copies=copies, shards=shards)))
    return found


def carried(plan: list[list[int]], whole: list[tuple[int, Carrier]], spread: Spread, expert: bool) -> list[list[int]]:
    """Bytes per round, of each place for one kind of parameter."""
    places = product((expert,), range(spread.copies), range(spread.shards))
    return [[sum(whole[i][0] for i in ids if whole[i][1] == place) for ids in plan] for place in places]


@given(PARTS, SPREADS, SPREADS, st.integers(1, 3000))
def test_every_parameter_is_in_one_round_in_order(parts: Parts, d: Spread, e: Spread, capacity: int) -> None:
    plan = rounds(carriers(parts, d, e), capacity)
    assert [i for indices in plan for i in indices] == list(range(len(parts)))
    assert all(plan)


@given(PARTS, SPREADS, SPREADS)
def test_every_parameter_has_one_carrier_which_exists(parts: Parts, d: Spread, e: Spread) -> None:
    whole = carriers(parts, d, e)
    for spread, kind in ((d, False), (e, True)):
        total = sum(map(sum, carried(rounds(whole, 500), whole, spread, kind)))
        assert total == sum(num_bytes for num_bytes, expert in parts if expert == kind)


@given(PARTS, SPREADS, SPREADS, st.integers(1, 3000))
def test_what_a_rank_carries_in_a_round_fits(parts: Parts, d: Spread, e: Spread, capacity: int) -> None:
    whole = carriers(parts, d, e)
    plan = rounds(whole, capacity)
    dense, expert = carried(plan, whole, d, False), carried(plan, whole, e, True)
    for number, indices in enumerate(plan):
        worst = max(x[number] for x in dense) + max(x[number] for x in expert)
        assert worst <= capacity or len(indices) == 1


@given(st.integers(1, 200), SPREADS)
def test_carriers_take_turns(count: int, spread: Spread) -> None:
    whole = carriers([(8, False)] * count, spread, spread)
    loads = list(map(sum, carried(rounds(whole, 10**9), whole, spread, False)))
    assert max(loads) - min(loads) <= 8


@given(PARTS, SPREADS, SPREADS, st.integers(1, 3000), st.integers(1, 200))
def test_a_larger_bucket_never_needs_more_rounds(parts: Parts, d: Spread, e: Spread, capacity: int, more: int) -> None:
    whole = carriers(parts, d, e)
    assert len(rounds(whole, capacity + more)) <= len(rounds(whole, capacity))
