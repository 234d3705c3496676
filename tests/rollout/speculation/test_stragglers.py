"""Algorithm 3 by hand, and that the extension stops where nothing is gained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import PlanError
from specactor.rollout.speculation.fastest_of_n import (
    Assignment,
    DryWorker,
    Straggler,
    assign,
    combined,
)


def as_published(
    stragglers: Iterable[Straggler], ranked: Sequence[str], workers: Iterable[DryWorker]
) -> list[Assignment]:
    return assign(stragglers, ranked, workers, pays=None)


Assign = Callable[[Iterable[Straggler], Sequence[str], Iterable[DryWorker]], list[Assignment]]


def pairs(found: list[Assignment]) -> list[tuple[str, str, str]]:
    return [(a.request_id, a.method, a.worker) for a in found]


STRAGGLERS = [
    Straggler(request_id="a", acceptance=0.9),
    Straggler(request_id="b", acceptance=0.3, methods=frozenset({"small"})),
    Straggler(request_id="c", acceptance=0.5),
]
WORKERS = [
    DryWorker(name="w0", method="small", load=1, max_load=2),
    DryWorker(name="w1", method="small", max_load=1),
    DryWorker(name="w2", method="ngram", max_load=2),
]


def test_algorithm_3_by_hand() -> None:
    """b first: it has small, so ngram (w2). c: small on w1 (load 0), ngram on w2. a: small on w0; w2 is full."""
    assert pairs(as_published(STRAGGLERS, ["small", "ngram"], WORKERS)) == [
        ("b", "ngram", "w2"),
        ("c", "small", "w1"),
        ("c", "ngram", "w2"),
        ("a", "small", "w0"),
    ]
    assert pairs(as_published(STRAGGLERS, ["ngram", "small"], WORKERS))[1] == ("c", "ngram", "w2"), "rank decides"
    assert as_published(STRAGGLERS, [], WORKERS) == []


def test_methods_are_added_only_while_they_pay() -> None:
    def pays(request: Straggler, has: frozenset[str], method: str, load: int) -> float:
        return 1.5 if not has else 1.01

    found = pairs(assign(STRAGGLERS, ["small", "ngram"], WORKERS, pays=pays))
    assert found == [("c", "small", "w1"), ("a", "small", "w0")], "one each; b has one"
    assert assign(STRAGGLERS, ["small"], WORKERS, pays=lambda *_: 1.0) == []


def by_descending_acceptance(
    stragglers: Iterable[Straggler], ranked: Sequence[str], workers: Iterable[DryWorker]
) -> list[Assignment]:
    """Wrong: those that need it least come first."""
    turned = [Straggler(request_id=r.request_id, acceptance=-r.acceptance, methods=r.methods) for r in stragglers]
    return as_published(turned, ranked, workers)


def over_the_bound(
    stragglers: Iterable[Straggler], ranked: Sequence[str], workers: Iterable[DryWorker]
) -> list[Assignment]:
    """Wrong: b_max is not looked at."""
    more = [DryWorker(name=w.name, method=w.method, load=w.load, max_load=w.max_load + 9) for w in workers]
    return as_published(stragglers, ranked, more)


def check(assign: Assign, stragglers: list[Straggler], workers: list[DryWorker]) -> None:
    found = assign(stragglers, ["small", "ngram"], workers)
    assert len({(a.request_id, a.method) for a in found}) == len(found)
    has = {r.request_id: r.methods for r in stragglers}
    assert all(a.method not in has[a.request_id] for a in found)
    for worker in workers:
        assert worker.load + sum(a.worker == worker.name for a in found) <= max(worker.max_load, worker.load)
        assert all(a.method == worker.method for a in found if a.worker == worker.name)
    order = [next(r.acceptance for r in stragglers if r.request_id == a.request_id) for a in found]
    assert order == sorted(order)


@given(
    st.lists(st.floats(0, 1), max_size=6),
    st.lists(st.tuples(st.sampled_from(["small", "ngram"]), st.integers(0, 2), st.integers(1, 3)), max_size=4),
)
def test_no_pair_twice_and_no_worker_over_its_bound(rates: list[float], some: list[tuple[str, int, int]]) -> None:
    stragglers = [Straggler(request_id=f"r{i}", acceptance=p) for i, p in enumerate(rates)]
    workers = [DryWorker(name=f"w{i}", method=m, load=n, max_load=b) for i, (m, n, b) in enumerate(some)]
    check(as_published, stragglers, workers)
    published = set(pairs(as_published(stragglers, ["small", "ngram"], workers)))
    assert set(pairs(assign(stragglers, ["small", "ngram"], workers, pays=lambda *_: 2.0))) == published


@pytest.mark.parametrize("wrong", [by_descending_acceptance, over_the_bound])
def test_wrong_versions_are_caught(wrong: Assign) -> None:
    check(as_published, STRAGGLERS, WORKERS)
    with pytest.raises(AssertionError):
        check(wrong, STRAGGLERS, WORKERS)


def test_combined_by_hand() -> None:
    survival_MW = np.array([[0.5, 0.25], [0.4, 0.4]])
    assert combined(survival_MW, alike=1.0) == pytest.approx([0.5, 0.4])
    assert combined(survival_MW, alike=0.0) == pytest.approx([0.7, 0.55])
    assert combined(survival_MW, alike=0.5) == pytest.approx([0.6, 0.475])
    with pytest.raises(PlanError, match="alike"):
        combined(survival_MW, alike=2.0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="expected >= 0, >= 1"):
        DryWorker(name="w", method="m", max_load=0)
    with pytest.raises(PlanError, match="margin"):
        assign([], [], [], pays=lambda *_: 1.0, margin=-1.0)
