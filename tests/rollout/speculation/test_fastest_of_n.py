"""Requests get further drafts where that pays: few requests, bad drafts, cheap rows; by the ladder; at most N."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.config import SpeculationConfig
from specactor.errors import ConfigError
from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.costs import CostTable, OnlineCosts
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.fastest_of_n import MARGIN, MOST_REQUESTS, Gains, combined, further
from specactor.rollout.speculation.planner import FASTEST, live_costs, reaching
from specactor.rollout.speculation.reconfiguration import LiveCosts
from specactor.rollout.speculation.verification import Drafts
from specactor.rollout.speculation.windows import OFF
from tests.rollout.speculation.world import World, auto, truth

W = 4
ROWS = (1, 2, 5)


def live(requests: int, *, row_s: float = 1e-5) -> LiveCosts:
    points = [(n, n * k, 1e-3 + row_s * n * k) for n in (1, 4, 64) for k in ROWS]
    return live_costs(OnlineCosts(CostTable.fit(points)), requests, draft_W=np.full(W, 1e-5))


def table(*rates: float) -> np.ndarray:
    return np.array([survival_of(p, W) for p in rates])


def apart(names: str, requests: int = 1) -> Drafts:
    """Drafts that have nothing in common."""
    return {name: [[10 * k + j for j in range(W)]] * requests for k, name in enumerate(names)}


def methods_of(
    *rates: float, requests: int = 0, row_s: float = 1e-5, most: int = 3, room: int = 100, others: float = 0.3
) -> list[list[str]]:
    """Requests whose own drafter is `a` with these rates; `b` and `c` are right as often where others err."""
    rates = rates * requests if requests else rates
    own = {name: table(*rates) for name in "abc"}
    after = {name: table(*[others] * len(rates)) for name in "abc"}
    return further(
        ["a"] * len(rates),
        apart("abc", len(rates)),
        own,
        after,
        ranked=["c", "a", "b"],
        costs=live(len(rates), row_s=row_s),
        most=most,
        room=room,
    )


def test_few_requests_get_several_methods_and_many_none() -> None:
    assert methods_of(0.3) == [["a", "c", "b"]], "the best of the ladder first"
    assert all(len(of) > 1 for of in methods_of(0.3, requests=4))
    assert methods_of(0.3, requests=64, row_s=1e-4) == [["a"]] * 64


def test_those_that_accept_least_have_several() -> None:
    found = methods_of(*[0.3 + 0.01 * i for i in range(40)], row_s=1e-7)
    assert [len(of) > 1 for of in found] == [True] * MOST_REQUESTS + [False] * (40 - MOST_REQUESTS)


def test_methods_are_added_while_they_pay() -> None:
    assert methods_of(0.99) == [["a"]], "there is nothing to gain"
    assert methods_of(0.3, others=0.01) == [["a"]]
    assert methods_of(0.3, row_s=1e-3) == [["a"]]


def test_no_more_than_n_and_no_more_than_there_is_room_for() -> None:
    assert methods_of(0.3, 0.2, most=2) == [["a", "c"], ["a", "c"]]
    assert methods_of(0.3, 0.2, most=1) == [["a"], ["a"]]
    assert methods_of(0.3, 0.2, room=1) == [["a"], ["a", "c", "b"]], "who accepts least comes first"
    assert methods_of(0.3, 0.2, room=0) == [["a"], ["a"]]


Further = Callable[..., list[list[str]]]
RIGHT = further


def turned(owners: Sequence[str], drafts: Drafts, own: dict[str, np.ndarray], *others: Any, **named: Any) -> Any:
    """Wrong: those that need it least come first."""
    return RIGHT(owners, drafts, {n: t[::-1] for n, t in own.items()}, *others, **named)


def over_the_bound(*arguments: Any, room: int, **named: Any) -> Any:
    """Wrong: there is not so much room."""
    return RIGHT(*arguments, room=room + 9, **named)


@pytest.mark.parametrize("wrong", [turned, over_the_bound])
def test_wrong_versions_are_caught(wrong: Further, monkeypatch: pytest.MonkeyPatch) -> None:
    test_no_more_than_n_and_no_more_than_there_is_room_for()
    monkeypatch.setitem(globals(), "further", wrong)
    with pytest.raises(AssertionError):
        test_no_more_than_n_and_no_more_than_there_is_room_for()


def test_only_drafts_that_are_there_count() -> None:
    own = {"a": table(0.3, 0.3), "b": reaching(table(0.3, 0.3), [0, 2])}
    drafts = {**apart("a", 2), "b": [[], [7, 8]]}
    found = further(["a", "a"], drafts, own, own, ranked=["b", "a"], costs=live(2), most=2, room=9)
    assert found == [["a"], ["a", "b"]]
    assert further([OFF], {"b": [[]]}, {"b": own["b"][:1]}, {}, ranked=["b"], costs=live(1), most=2, room=9) == [[]]


chances = st.floats(0.01, 0.99)


@given(chances, chances, chances, st.floats(1e-6, 1e-3), st.integers(1, 8))
def test_what_is_added_is_predicted_to_gain_and_a_better_drafter_gains_more(
    p: float, q: float, better: float, row_s: float, requests: int
) -> None:
    costs = live(requests, row_s=row_s)
    own = {name: table(p) for name in "ab"}
    low, high = sorted((q, better))
    gains = [
        Gains(["a"], apart("ab"), own, {name: table(rate) for name in "ab"}, costs).of(0, ["a"], "b")
        for rate in (low, high)
    ]
    assert gains[0] <= gains[1] * (1 + 1e-12)
    for rate, gain in zip((low, high), gains, strict=True):
        found = further(
            ["a"],
            apart("ab"),
            own,
            {"a": table(rate), "b": table(rate)},
            ranked=["b"],
            costs=costs,
            most=2,
            room=9,
        )
        assert (found == [["a", "b"]]) == (gain > 1 + MARGIN)


def test_every_further_method_gains_less() -> None:
    costs, own = live(1), {name: table(0.4) for name in "abcd"}
    gains = Gains(["a"], apart("abcd"), own, own, costs)
    has = ["a", "ab", "abc"]
    found = [gains.of(0, list(h), "d") for h in has]
    assert all(left > right for left, right in pairwise(found))


def test_a_draft_that_says_the_same_brings_nothing() -> None:
    same: Drafts = {"a": [[1, 2, 3]], "b": [[1, 2, 3]], "c": [[1, 2, 9]]}
    own = {name: table(0.5) for name in "abc"}
    found = further(["a"], same, own, own, ranked=["a", "b", "c"], costs=live(1), most=3, room=9)
    assert found == [["a", "c"]]


class Uneven(Drafter):
    """Right at places of its own: six of ten."""

    def __init__(self, name: str) -> None:
        self.name = name

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [
            [self._token(sequence, len(sequence.output_ids) + j) for j in range(window)]
            for sequence, window in zip(sequences, windows, strict=True)
        ]

    def _token(self, sequence: DraftSequence, position: int) -> int:
        coin = zlib.crc32(f"{self.name} {sequence.seed} {position}".encode()) / 2**32
        return truth(sequence, position) + (coin >= 0.6)


def world(most: int, requests: int, *, row_s: float) -> World:
    drafters = [Uneven(name) for name in ("one", "two", "three")]
    return World(auto(fastest_of=most), *drafters, requests=requests, row_s=row_s, max_branches=200)


@pytest.mark.parametrize("requests", [1, 2])
def test_several_methods_make_few_requests_faster(requests: int) -> None:
    speeds = []
    for most in (1, 2, 3):
        one = world(most, requests, row_s=1e-6)
        one.play(400)
        speeds.append(one.play(200))
    assert speeds[1] > 1.1 * speeds[0]
    assert speeds[2] > 1.1 * speeds[0]


def test_where_rows_are_dear_nothing_is_added() -> None:
    one = world(3, 16, row_s=3e-4)
    one.play(300)
    counts = one.speculator.report()
    assert sum(of.verifies for of in counts.values()) >= sum(of.emitted - of.accepted for of in counts.values())
    assert one.speculator.planner.current != FASTEST
    total = sum(counts.values(), Counts())
    assert total.emitted == total.accepted + total.verifies


def test_other_modes_are_refused() -> None:
    assert SpeculationConfig(mode="off", fastest_of=2).fastest_of == 2
    for fields in ({"mode": "coupled", "fastest_of": 2}, {"mode": "auto", "fastest_of": 0}):
        with pytest.raises(ConfigError, match=r"rollout.speculation.fastest_of: got"):
            SpeculationConfig(**fields)  # type: ignore[arg-type]


def test_combined_by_hand() -> None:
    survival_MW = np.array([[0.5, 0.25], [0.4, 0.4]])
    assert combined(survival_MW, alike=1.0) == pytest.approx([0.5, 0.4])
    assert combined(survival_MW, alike=0.0) == pytest.approx([0.7, 0.55])
    assert combined(survival_MW, alike=0.5) == pytest.approx([0.6, 0.475])
    with pytest.raises(AssertionError):
        combined(survival_MW, alike=2.0)


def test_time_of_a_decision() -> None:
    """Printed; a fraction of a millisecond for 256 requests and three methods where it was measured."""
    rates = np.random.default_rng(0).uniform(0.2, 0.9, 256)
    own = {name: table(*rates) for name in "abc"}
    after = {name: table(*rates * 0.5) for name in "abc"}
    costs = live(256)
    began = time.process_time()
    for _ in range(10):
        found = further(
            ["a"] * 256, apart("abc", 256), own, after, ranked=["a", "b", "c"], costs=costs, most=3, room=256
        )
    print(f"{(time.process_time() - began) / 10 * 1e3:.2f} ms for 256 requests and three methods")
    assert len(found) == 256
