"""Counts add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specactor.config import MAX_WINDOW
from specactor.rollout.speculation.counters import Counts, added

requests = st.lists(
    st.integers(0, MAX_WINDOW).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), min_size=1, max_size=6
)


def of(rounds: list[list[tuple[int, int]]]) -> Counts:
    counts = Counts()
    for one in rounds:
        counts.round([d for d, _ in one], [a for _, a in one], verify_s=1.0, draft_s=0.5, predicted_s=2.0)
    return counts


@given(st.lists(requests, max_size=5))
def test_counts_are_consistent(rounds: list[list[tuple[int, int]]]) -> None:
    counts = of(rounds)
    assert counts.drafted == sum(counts.drafted_at)
    assert counts.accepted == sum(counts.accepted_at)
    assert counts.emitted == counts.accepted + counts.verifies
    assert counts.wasted >= 0
    assert all(a <= d for a, d in zip(counts.accepted_at, counts.drafted_at, strict=True))
    assert counts.speculative_rounds <= counts.rounds == len(rounds)
    assert (counts.predicted_s, counts.measured_s) == (2.0 * len(rounds), 1.5 * len(rounds))


@given(st.lists(requests, max_size=4), st.lists(requests, max_size=4))
def test_sums_of_parts_are_the_whole(one: list[list[tuple[int, int]]], two: list[list[tuple[int, int]]]) -> None:
    assert of(one) + of(two) == of(one + two)
    assert added([{"a": of(one)}, {"a": of(two), "b": of(one)}]) == {"a": of(one + two), "b": of(one)}


@given(
    requests, st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8), st.booleans()), max_size=5)
)
def test_a_round_of_several_drafters_adds_up(
    lead: list[tuple[int, int]], beside: list[tuple[int, int, int, bool]]
) -> None:
    others = Counts()
    for first, drafted, accepted, is_first in beside:
        others.beside(first, drafted, min(drafted, accepted), is_first=is_first)
    assert others.verifies == sum(is_first for *_, is_first in beside)
    assert others.emitted == others.accepted + others.verifies
    assert (others.drafted, others.accepted) == (sum(others.drafted_at), sum(others.accepted_at))
    assert all(a <= d for a, d in zip(others.accepted_at, others.drafted_at, strict=True))
    both = of([lead]) + others
    assert both.emitted == both.accepted + both.verifies


def test_positions_of_draft_tokens_beside_others() -> None:
    counts = Counts()
    counts.beside(2, 3, 1)
    assert counts.drafted_at[:6] == [0, 0, 1, 1, 1, 0]
    assert counts.accepted_at[:6] == [0, 0, 1, 0, 0, 0]
