"""No request is lost, doubled or torn from its group, for any sizes and any deaths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import EngineError
from specactor.rollout.requests import assign, by_id, merge
from specactor.types import RolloutRequest, SamplingParams, Trajectory


def make_request(i: int, group: int, prompt: int = 3, new: int = 10) -> RolloutRequest:
    return RolloutRequest(
        request_id=f"r{i}",
        prompt_ids=(5,) * prompt,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=new),
        seed=i,
        group_id=group,
    )


def make_response(request: RolloutRequest) -> Trajectory:
    return Trajectory(
        request_id=request.request_id,
        group_id=request.group_id,
        prompt_ids=request.prompt_ids,
        token_ids=(1,),
        logprobs=(0.0,),
        finish_reason="stop",
        spans=(),
    )


batches = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 20), st.integers(1, 50)), max_size=40).map(
    lambda rows: [make_request(i, *row) for i, row in enumerate(rows)]
)


@given(batches, st.integers(1, 5))
def test_every_request_goes_to_one_engine_with_its_group(requests: list[RolloutRequest], num_engines: int) -> None:
    parts = assign(requests, num_engines)
    assert len(parts) == num_engines
    placed = [(r.request_id, engine) for engine, part in enumerate(parts) for r in part]
    assert sorted(name for name, _ in placed) == sorted(r.request_id for r in requests)
    engines_of_group: dict[int, set[int]] = {}
    for engine, part in enumerate(parts):
        for r in part:
            engines_of_group.setdefault(r.group_id, set()).add(engine)
        assert part == [r for r in requests if r in part], "order within an engine"
    assert all(len(engines) == 1 for engines in engines_of_group.values())
    assert parts == assign(requests, num_engines)


@given(batches, st.integers(1, 5))
def test_engines_differ_by_at_most_one_group(requests: list[RolloutRequest], num_engines: int) -> None:
    def weight(part: list[RolloutRequest]) -> int:
        return sum(len(r.prompt_ids) + r.sampling.max_new_tokens for r in part)

    groups: dict[int, list[RolloutRequest]] = {}
    for r in requests:
        groups.setdefault(r.group_id, []).append(r)
    loads = [weight(part) for part in assign(requests, num_engines)]
    assert max(loads) - min(loads) <= max(map(weight, groups.values()), default=0)


@given(batches, st.integers(1, 4), st.data())
def test_deaths_lose_and_double_nothing(requests: list[RolloutRequest], num_engines: int, data: st.DataObject) -> None:
    """Rounds of generation in which every engine delivers any part of its work, in any order, and dies or not."""
    pending, finished = requests, []
    for _ in range(4):
        delivered: list[Trajectory] = []
        for part in assign(pending, num_engines):
            kept = data.draw(st.permutations(part))
            delivered += map(make_response, kept[: data.draw(st.integers(0, len(part)))])
        done, unfinished = merge(pending, delivered)
        assert [*map(lambda r: r.request_id, unfinished)] == [
            r.request_id for r in pending if r.request_id not in {t.request_id for t in done}
        ]
        finished += done
        pending = unfinished
    done, unfinished = merge(pending, [make_response(r) for part in assign(pending, 1) for r in part])
    assert not unfinished
    assert sorted(t.request_id for t in finished + done) == sorted(r.request_id for r in requests)


def test_merge_refuses_what_cannot_be() -> None:
    one, two = make_request(1, 0), make_request(2, 0)
    with pytest.raises(EngineError, match="second response to request 'r1'"):
        merge([one, two], [make_response(one), make_response(one)])
    with pytest.raises(EngineError, match="second response to request 'r1'"):
        by_id([make_response(one), make_response(two), make_response(one)])
    with pytest.raises(EngineError, match="unknown request 'r2'"):
        merge([one], [make_response(two)])
    with pytest.raises(EngineError, match="used twice"):
        merge([one, one], [])


def test_assign_needs_an_engine() -> None:
    with pytest.raises(EngineError, match="got 0 engines"):
        assign([], 0)
