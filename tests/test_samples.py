"""Samples in the smallest arrays; what is elsewhere has a length, and cannot be read by mistake."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor import samples
from specactor.errors import SpecActorError
from specactor.samples import Elsewhere, experts_of, joined, packed
from specactor.types import Trajectory
from tests import samples_script
from tests.lib.ranks import run_ranks


def response(prompt: list[int], tokens: list[int], experts: list[int]) -> Trajectory:
    return Trajectory(
        request_id="0.0.0",
        group_id=0,
        prompt_ids=tuple(prompt),
        token_ids=tuple(tokens),
        logprobs=tuple(float(np.float32(-t / 7)) for t in tokens),
        finish_reason="stop",
        spans=(),
        routed_experts=np.array(experts, np.int16).tobytes(),
    )


@given(st.data())
def test_arrays_hold_what_tuples_did(data: st.DataObject) -> None:
    vocabulary, experts = data.draw(st.sampled_from([(32_000, 128), (151_936, 512)]))
    tokens = st.lists(st.integers(0, vocabulary - 1), max_size=20)
    one = response(data.draw(tokens), data.draw(tokens), data.draw(st.lists(st.integers(0, experts - 1), max_size=20)))
    kept = packed(one)
    assert (tuple(kept.prompt_ids), tuple(kept.token_ids)) == (one.prompt_ids, one.token_ids)
    assert tuple(kept.logprobs) == one.logprobs
    assert experts_of(kept.routed_experts).tolist() == experts_of(one.routed_experts).tolist()
    assert joined(kept.prompt_ids, kept.token_ids).tolist() == [*one.prompt_ids, *one.token_ids]  # type: ignore[attr-defined]
    assert packed(kept) == kept


def test_types_are_the_smallest_that_hold_the_values() -> None:
    small, large = packed(response([1], [65_535], [255])), packed(response([1], [65_536], [256]))
    assert [(a.itemsize, b.itemsize) for a, b in ((small.token_ids, small.routed_experts),)] == [(2, 1)]  # type: ignore[attr-defined]
    assert [(a.itemsize, b.itemsize) for a, b in ((large.prompt_ids, large.routed_experts),)] == [(4, 2)]  # type: ignore[attr-defined]


class Gathered:
    """Rank 0 of two; the other one gathers `other`."""

    rank = 0

    def __init__(self, other: Any = ()) -> None:
        self.other, self.own = other, None

    def gather(self, value: Any, kind: Any) -> list[Any]:
        self.own = value
        return [value, msgspec.msgpack.decode(msgspec.msgpack.encode(self.other), type=kind)]


def test_branches_are_packed_and_told_as_responses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    one = packed(
        replace(response([1], [2, 3], [4]), branches=(response([5], [6], [7]), response([8, 9], [1 << 16], [])))
    )
    assert one.branches[1].token_ids == array("i", [1 << 16])
    there = Gathered()
    samples.told([one], there)  # type: ignore[arg-type]
    [plain, seen] = samples.told([packed(response([1], [1], []))], Gathered(there.own))  # type: ignore[arg-type]
    for known, held in zip((seen, *seen.branches), (one, *one.branches), strict=True):
        for name in samples.OF_RESPONSE:
            values = getattr(held, name)
            assert getattr(known, name) == Elsewhere(values.typecode, len(values), rank=1)
    held_of = [plain, one, *one.branches]

    def all_that_is_wanted(flat: list[Trajectory], wanted: Iterable[int], _: object) -> list[Trajectory]:
        asked = {*wanted}
        return [held_of[n] if n in asked else t for n, t in enumerate(flat)]

    monkeypatch.setattr(samples, "_fetch", all_that_is_wanted)
    assert samples.fetch([plain, seen], [1], samples.OF_RESPONSE) == [plain, one]
    assert samples.fetch([plain, seen], [0], samples.OF_RESPONSE) == [plain, seen]


def test_what_is_elsewhere_is_not_read() -> None:
    there = Elsewhere("H", 3, rank=5)
    assert (len(there), there.itemsize, len(joined(there, Elsewhere("H", 4, rank=5)))) == (3, 2, 7)
    for read in (list, tuple, np.array, lambda x: array("H", x), lambda x: x[:2], lambda x: 1 in x):
        with pytest.raises(SpecActorError, match="rank 5 holds"):
            read(there)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_hold_what_they_made_and_what_they_fetched(world: int, tmp_path: Path) -> None:
    run_ranks(world, "tests.samples_script", tmp_path, folder=tmp_path)
    numbers = range(samples_script.RESPONSES)
    made = [samples_script.response(i) for i in numbers]
    lengths = [[2, i, i, len(t.routed_experts) // 2, t.num_sampled] for i, t in enumerate(made)]
    for rank in range(world):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        own = {i for i in numbers if i % world == rank}
        wanted = {i for i in numbers if (i // 2) % world == rank}
        assert found["told"] == lengths, "every rank knows all lengths"
        assert set(found["here"]) == own
        assert set(found["tokens"]) == own | wanted, "and nothing else"
        assert set(found["experts of tokens"]) == own & wanted, "of what scores responses, tokens alone travel"
        assert set(found["right"]) == own | wanted
        assert set(found["written"]) == (set(numbers) if rank == 0 else own)
        assert found["again"]
