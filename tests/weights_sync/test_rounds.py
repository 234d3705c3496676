"""The plan: every parameter once, the same on all ranks that gather together, bounded, balanced."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from specactor.weights_sync.buckets import Part, Spread, rounds

SPREADS = st.builds(Spread, copies=st.integers(1, 4), shards=st.integers(1, 4))
PARTS = st.lists(st.builds(Part, num_bytes=st.integers(1, 1000), expert=st.booleans()), max_size=60)


def carried(plan: list[list[int]], parts: list[Part], spread: Spread, expert: bool) -> dict[tuple[int, int], list[int]]:
    """Bytes per round of each place, for one kind of parameter."""
    places = list(product(range(spread.copies), range(spread.shards)))
    of_kind = [[i for i in indices if parts[i].expert == expert] for indices in plan]
    return {
        place: [sum(parts[i].num_bytes for i in ids if spread.carrier(i) == place) for ids in of_kind]
        for place in places
    }


@given(PARTS, SPREADS, SPREADS, st.integers(1, 3000))
def test_every_parameter_is_in_one_round_in_order(parts: list[Part], d: Spread, e: Spread, capacity: int) -> None:
    plan = rounds(parts, dense=d, expert=e, capacity_bytes=capacity)
    assert [i for indices in plan for i in indices] == list(range(len(parts)))
    assert all(plan)


@given(PARTS, SPREADS, SPREADS)
def test_every_parameter_has_one_carrier_which_exists(parts: list[Part], d: Spread, e: Spread) -> None:
    for spread, expert in ((d, False), (e, True)):
        plan = rounds(parts, dense=d, expert=e, capacity_bytes=500)
        total = sum(sum(sizes) for sizes in carried(plan, parts, spread, expert).values())
        assert total == sum(part.num_bytes for part in parts if part.expert == expert)


@given(PARTS, SPREADS, SPREADS, st.integers(1, 3000))
def test_what_a_rank_carries_in_a_round_fits(parts: list[Part], d: Spread, e: Spread, capacity: int) -> None:
    plan = rounds(parts, dense=d, expert=e, capacity_bytes=capacity)
    dense, expert = carried(plan, parts, d, False), carried(plan, parts, e, True)
    for number, indices in enumerate(plan):
        worst = max(x[number] for x in dense.values()) + max(x[number] for x in expert.values())
        assert worst <= capacity or len(indices) == 1


@given(st.integers(1, 200), SPREADS)
def test_carriers_take_turns(count: int, spread: Spread) -> None:
    parts = [Part(num_bytes=8, expert=False)] * count
    plan = rounds(parts, dense=spread, expert=spread, capacity_bytes=10**9)
    loads = [sum(sizes) for sizes in carried(plan, parts, spread, False).values()]
    assert max(loads) - min(loads) <= 8


@given(PARTS, SPREADS, SPREADS, st.integers(1, 3000), st.integers(1, 200))
def test_a_larger_bucket_never_needs_more_rounds(
    parts: list[Part], d: Spread, e: Spread, capacity: int, more: int
) -> None:
    small = rounds(parts, dense=d, expert=e, capacity_bytes=capacity)
    assert len(rounds(parts, dense=d, expert=e, capacity_bytes=capacity + more)) <= len(small)
