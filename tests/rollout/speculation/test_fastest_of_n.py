"""Requests get further drafts where that pays: few requests, bad drafts, cheap rows; by the ladder; at most N."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from specactor.config import SpeculationConfig
from specactor.errors import ConfigError
from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.fastest_of_n import further
from specactor.rollout.speculation.planner import FASTEST, reaching
from specactor.rollout.speculation.verification import Drafts
from specactor.rollout.speculation.windows import OFF
from tests.rollout.speculation.world import World, auto, truth

W = 4


def table(*rates: float) -> np.ndarray:
    return np.array([survival_of(p, W) for p in rates])


def apart(names: str, requests: int = 1) -> Drafts:
    """Drafts that have nothing in common."""
    return {name: [[10 * k + j for j in range(W)]] * requests for k, name in enumerate(names)}


def methods_of(*rates: float, most: int = 3) -> list[list[str]]:
    """Requests whose own drafter is `a` with these rates."""
    own = {name: table(*rates) for name in "abc"}
    return further(["a"] * len(rates), apart("abc", len(rates)), own, ranked=["c", "a", "b"], most=most)


def test_those_that_accept_least_have_several() -> None:
    assert methods_of(0.3) == [["a", "c", "b"]]
    found = methods_of(*[0.3 + 0.01 * i for i in range(40)])
    assert [len(of) > 1 for of in found] == [True] * 16 + [False] * 24


def test_no_more_than_n() -> None:
    assert methods_of(0.3, 0.2, most=2) == [["a", "c"], ["a", "c"]]
    assert methods_of(0.3, 0.2, most=1) == [["a"], ["a"]]


Further = Callable[..., list[list[str]]]
RIGHT = further


def turned(owners: Sequence[str], drafts: Drafts, own: dict[str, np.ndarray], **named: Any) -> Any:
    """Wrong: those that need it least come first."""
    return RIGHT(owners, drafts, {n: t[::-1] for n, t in own.items()}, **named)


def one_more(*arguments: Any, most: int, **named: Any) -> Any:
    """Wrong: a method more than there may be."""
    return RIGHT(*arguments, most=most + 1, **named)


@pytest.mark.parametrize("wrong", [turned, one_more])
def test_wrong_versions_are_caught(wrong: Further, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "further", wrong)
    claim = test_no_more_than_n if wrong is one_more else test_those_that_accept_least_have_several
    with pytest.raises(AssertionError):
        claim()


def test_only_drafts_that_are_there_count() -> None:
    own = {"a": table(0.3, 0.3), "b": reaching(table(0.3, 0.3), [0, 2])}
    drafts = {**apart("a", 2), "b": [[], [7, 8]]}
    assert further(["a", "a"], drafts, own, ranked=["b", "a"], most=2) == [["a"], ["a", "b"]]
    assert further([OFF], {"b": [[]]}, {"b": own["b"][:1]}, ranked=["b"], most=2) == [[]]


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
