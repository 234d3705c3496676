"""Moves and replicas: no request lost or twice, dry engines only, and only what is predicted to pay."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.config import TailConfig
from specactor.errors import PlanError
from specactor.rollout.tail_plan import (
    EngineLoad,
    Lengths,
    Move,
    Planned,
    Replica,
    Running,
    TailCosts,
    plan_moves,
    plan_replicas,
    tail_policy,
)

NONE = Lengths()


def running(name: str, *, emitted: int = 10, prompt: int = 5, limit: int = 100, on_its_way: bool = False) -> Running:
    return Running(
        request_id=name, length=prompt + emitted, emitted=emitted, max_new_tokens=limit, on_its_way=on_its_way
    )


def load(engine: int, *requests: Running, slots: int = 8) -> EngineLoad:
    return EngineLoad(engine=engine, slots=slots, running=requests)


@st.composite
def fleets(draw: st.DrawFn) -> list[EngineLoad]:
    """Engines with any requests; some of them are on their way, or have a replica."""
    engines = draw(st.integers(1, 5))
    requests: list[list[Running]] = [[] for _ in range(engines)]
    for i in range(draw(st.integers(0, 12))):
        limit = draw(st.integers(1, 400))
        emitted = draw(st.integers(0, limit - 1))
        places = draw(st.lists(st.integers(0, engines - 1), min_size=1, max_size=2, unique=True))
        way = len(places) == 1 and draw(st.booleans())
        prompt = draw(st.integers(1, 50))
        for place in places:
            requests[place].append(running(f"r{i}", emitted=emitted, prompt=prompt, limit=limit, on_its_way=way))
    return [load(i, *some, slots=draw(st.integers(1, 4))) for i, some in enumerate(requests)]


lengths = st.lists(st.integers(1, 400), max_size=20).map(Lengths)


@given(fleets(), lengths, st.floats(0, 1), st.floats(0, 0.5))
def test_moves(loads: list[EngineLoad], lengths: Lengths, per_request: float, per_token: float) -> None:
    moves = plan_moves(loads, lengths, TailCosts(per_request=per_request, per_prefill_token=per_token))
    at = {(r.request_id, of.engine): r for of in loads for r in of.running}
    places = Counter(name for name, _ in at)
    dry = {of.engine for of in loads if not of.running}
    assert len({move.request_id for move in moves}) == len(moves)
    assert all(move.target in dry and move.source not in dry for move in moves)
    for move in moves:
        assert not at[move.request_id, move.source].on_its_way
        assert places[move.request_id] == 1
    for of in loads:
        left = {r.request_id for r in of.running} - {m.request_id for m in moves if m.source == of.engine}
        assert left or not of.running, "nobody is emptied for another"


@given(fleets(), lengths, st.integers(1, 4))
def test_replicas(loads: list[EngineLoad], lengths: Lengths, allowed: int) -> None:
    replicas = plan_replicas(loads, lengths, allowed)
    places = Counter(r.request_id for of in loads for r in of.running)
    pairs = [(r.request_id, of.engine) for of in loads for r in of.running]
    pairs += [(replica.request_id, replica.target) for replica in replicas]
    assert len(set(pairs)) == len(pairs), "twice on one engine"
    more = Counter(replica.request_id for replica in replicas)
    assert all(places[name] + count <= allowed for name, count in more.items())
    slots = {of.engine: of.slots for of in loads if not of.running}
    given_to = Counter(replica.target for replica in replicas)
    assert all(count <= slots[engine] for engine, count in given_to.items())
    ways = {r.request_id for of in loads for r in of.running if r.on_its_way}
    assert not ways & set(more)


@given(fleets(), st.lists(st.integers(1, 400), max_size=5), st.integers(1, 3))
def test_the_policy_does_one_of_both(loads: list[EngineLoad], finished: list[int], allowed: int) -> None:
    plan = Planned(migrate=True, replicas=allowed).decide(loads, finished)
    assert len({type(action) for action in plan}) <= 1
    if allowed == 1:
        assert not any(isinstance(action, Replica) for action in plan)
    if all(of.running for of in loads):
        assert not plan
    assert plan == Planned(migrate=True, replicas=allowed).decide(loads, finished)


def test_half_of_the_queue_goes_to_a_dry_engine() -> None:
    """Two engines of one slot and four requests alike: two each is best."""
    requests = [running(f"r{i}", emitted=0) for i in range(4)]
    moves = plan_moves([load(0, *requests, slots=1), load(1, slots=1)], NONE, TailCosts())
    assert [(m.request_id, m.source, m.target) for m in moves] == [("r0", 0, 1), ("r1", 0, 1)]


def test_a_prefix_that_costs_more_than_is_left_stays() -> None:
    long = [running(f"r{i}", emitted=90, prompt=2000) for i in range(2)]
    loads = [load(0, *long), load(1)]
    assert plan_moves(loads, NONE, TailCosts(per_request=0.5)) == []
    assert len(plan_moves(loads, NONE, TailCosts(per_request=0.5, per_prefill_token=0.0))) == 1


def test_the_last_request_of_an_engine_stays_and_is_replicated() -> None:
    loads = [load(0, running("r0")), load(1), load(2)]
    assert plan_moves(loads, NONE, TailCosts()) == []
    assert plan_replicas(loads, NONE, 1) == []
    assert plan_replicas(loads, NONE, 2) == [Replica(request_id="r0", target=1)]
    assert {r.target for r in plan_replicas(loads, NONE, 5)} == {1, 2}
    assert Planned(migrate=True, replicas=2).decide(loads, ()) == plan_replicas(loads, NONE, 2)


def test_the_longest_are_replicated_first() -> None:
    loads = [load(0, running("short", emitted=90), running("long", emitted=5)), load(1, slots=1)]
    assert plan_replicas(loads, NONE, 2) == [Replica(request_id="long", target=1)]


def test_what_is_left_follows_from_longer_responses() -> None:
    finished = Lengths([10, 20, 60, 100])
    assert finished.left(0, 200) == 47.5
    assert finished.left(20, 200) == 60
    assert finished.left(100, 200) == 100, "nothing was longer: the limit is all that is known"
    assert finished.left(20, 50) == 30
    assert finished.left(199, 200) == 1


def test_a_plan_names_each_engine_once() -> None:
    with pytest.raises(PlanError, match="expected each once"):
        plan_moves([load(0), load(0)], NONE, TailCosts())


def test_the_policy_of_a_configuration() -> None:
    assert tail_policy(TailConfig()) is None
    assert tail_policy(TailConfig(migrate=True)) == Planned(migrate=True)
    assert tail_policy(TailConfig(replicas=3)) == Planned(migrate=False, replicas=3)
    assert not isinstance(Planned(migrate=False).decide([load(0, running("a"), running("b")), load(1)], ()), Move)
