"""Plans of micro-batches: every invariant as a property, bounds against the optimum by brute force, purity."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import ConfigError
from specactor.trainer.packing import balance, padded_len

CAPACITY = 32
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=40)
Plan = list[list[list[int]]]


def tokens(members: list[int], lengths: list[int]) -> int:
    return sum(lengths[i] for i in members)


def check_plan(plan: Plan, lengths: list[int], ranks: int, multiple_of: int, capacity: int) -> None:
    everything = [members for rank in plan for members in rank]
    assert sorted(i for members in everything for i in members) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    per_rank = len(plan[0])
    assert per_rank >= 1
    assert per_rank % multiple_of == 0
    assert all(tokens(members, lengths) <= capacity for members in everything)
    assert sum(not members for members in everything) == max(0, ranks * per_rank - len(lengths))
    assert all(members == sorted(members) for members in everything)
    longest = max(lengths, default=0)
    of_rank = [sum(tokens(members, lengths) for members in rank) for rank in plan]
    of_bin = [tokens(members, lengths) for members in everything]
    assert max(of_rank) - min(of_rank) <= longest
    assert max(of_bin) - min(of_bin) <= longest


@given(lengths=LENGTHS, ranks=st.integers(1, 5), multiple_of=st.integers(1, 4))
def test_invariants(lengths: list[int], ranks: int, multiple_of: int) -> None:
    plan = balance(lengths, ranks, CAPACITY, multiple_of=multiple_of)
    check_plan(plan, lengths, ranks, multiple_of, CAPACITY)


@given(lengths=LENGTHS, ranks=st.integers(1, 5))
def test_simultaneous_microbatches_are_neighbours_in_size(lengths: list[int], ranks: int) -> None:
    plan = balance(lengths, ranks, CAPACITY)
    rounds = [[tokens(members, lengths) for members in same_time] for same_time in zip(*plan, strict=True)]
    for earlier, later in itertools.pairwise(rounds):
        assert min(earlier) >= max(later)


@given(lengths=LENGTHS, ranks=st.integers(1, 5))
def test_equal_arguments_give_equal_plans(lengths: list[int], ranks: int) -> None:
    assert balance(lengths, ranks, CAPACITY) == balance(tuple(lengths), ranks, CAPACITY)


@given(lengths=LENGTHS, ranks=st.integers(1, 4), data=st.data())
def test_the_work_does_not_depend_on_the_order_of_sequences(
    lengths: list[int], ranks: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(lengths))

    def shape(plan: Plan, lens: list[int]) -> list[list[int]]:
        return sorted(sorted(lens[i] for i in members) for rank in plan for members in rank)

    assert shape(balance(lengths, ranks, CAPACITY), lengths) == shape(balance(shuffled, ranks, CAPACITY), shuffled)


def smallest_makespan(lengths: list[int], bins: int) -> int:
    """By trying every assignment; those with the same loads, in any order, are one."""
    loads = {(0,) * bins}
    for length in lengths:
        loads = {tuple(sorted((*load[:b], load[b] + length, *load[b + 1 :]))) for load in loads for b in range(bins)}
    return min(max(load) for load in loads)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7), ranks=st.integers(1, 3))
def test_close_to_the_optimum(lengths: list[int], ranks: int) -> None:
    plan = balance(lengths, ranks, 24)
    bins = ranks * len(plan[0])
    largest = max(tokens(members, lengths) for rank in plan for members in rank)
    assert largest <= (4 / 3 - 1 / (3 * bins)) * smallest_makespan(lengths, min(bins, len(lengths)))
    busiest = max(sum(tokens(members, lengths) for members in rank) for rank in plan)
    assert busiest <= (2 - 1 / ranks) * smallest_makespan(lengths, ranks)
    fewer = ranks * (len(plan[0]) - 1)
    if fewer:  # one micro-batch per rank less: impossible, or so tight that LPT misses it
        assert smallest_makespan(lengths, fewer) > 0.75 * 24


def test_an_ordinary_step_is_even() -> None:
    """512 responses with a long tail over 8 ranks: every rank within 1 % of the mean, and few micro-batches."""
    rng = random.Random(0)
    lengths = [min(4096, 32 + int(rng.lognormvariate(6, 0.8))) for _ in range(512)]
    plan = balance(lengths, 8, 8192)
    load = [sum(tokens(members, lengths) for members in rank) for rank in plan]
    assert max(load) <= 1.01 * sum(lengths) / 8
    assert len(plan[0]) <= 1 + sum(lengths) / 8 / 8192 + 1


def test_by_hand() -> None:
    assert balance([7, 3, 5, 1], 2, 8) == [[[0, 3]], [[1, 2]]]
    assert balance([4, 4, 4], 2, 8) == [[[0, 2]], [[1]]]
    assert balance([8, 8, 8, 8], 1, 8, multiple_of=3) == [[[0], [1], [2], [3], [], []]]
    assert balance([8, 7, 6, 5], 2, 8) == [[[0], [3]], [[1], [2]]]
    assert balance([5], 2, 8) == [[[0]], [[]]]
    assert balance([], 2, 8) == [[[]], [[]]]


@pytest.mark.parametrize(
    "wrong",
    [
        [[[0, 1], [2]], [[3], []]],
        [[[0, 1], []], [[2, 3], []]],
        [[[0], [2]], [[1], [1]]],
        [[[0], [2]], [[1], []]],
        [[[0], [2]], [[1, 3]]],
        [[[0]], [[1, 2, 3]]],
        [[[0], [2], [3]], [[1], [], []]],
    ],
    ids=["unbalanced", "unbalanced and empty", "twice", "missing", "ragged", "too long", "not a multiple"],
)
def test_a_wrong_plan_is_caught(wrong: Plan) -> None:
    lengths = [8, 8, 2, 2]
    check_plan(balance(lengths, 2, 10, multiple_of=2), lengths, 2, 2, 10)
    with pytest.raises(AssertionError):
        check_plan(wrong, lengths, 2, 2, 10)


def test_refused_lengths_are_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"tokens_per_microbatch x parallel.context: got 8, expected >= 9, the packed length of seq.* 1",
    ):
        balance([8, 9], 1, 8)


def test_thousands_of_sequences_take_a_moment() -> None:
    lengths = [1000 + (i * 7919) % 3000 for i in range(8192)]
    start = time.process_time()
    plan = balance(lengths, 8, 8192)
    assert time.process_time() - start < 5.0
    minimum = sum(lengths) / 8 / 8192
    assert len(plan[0]) <= 1.25 * minimum


@given(length=st.integers(0, 1000), multiple=st.integers(1, 64))
def test_padded_len(length: int, multiple: int) -> None:
    padded = padded_len(length, multiple)
    assert padded % multiple == 0
    assert length <= padded < length + multiple


def test_decisions_import_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "import specactor.trainer.advantages, specactor.trainer.packing"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
