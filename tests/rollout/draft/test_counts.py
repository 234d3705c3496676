"""Counts add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specactor.config import MAX_WINDOW
from specactor.rollout.draft.counts import Counts, added

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
