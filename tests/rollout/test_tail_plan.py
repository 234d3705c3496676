"""Moves, replicas and drafters: no request lost or twice, dry engines only, and only what is predicted to pay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.config import TailConfig
from specactor.errors import PlanError
from specactor.rollout.draft.counts import Counts
from specactor.rollout.tail_plan import (
    METHOD,
    NEWS_SHARE,
    EngineLoad,
    Lend,
    Lengths,
    Move,
    Planned,
    Replica,
    Running,
    Standing,
    TailCosts,
    is_news,
    plan_drafters,
    plan_moves,
    plan_replicas,
    tail_policy,
)

NONE = Lengths()


def running(name: str, *, emitted: int = 10, prompt: int = 5, limit: int = 100, on_its_way: bool = False) -> Running:
    return Running(
        request_id=name, length=prompt + emitted, emitted=emitted, max_new_tokens=limit, on_its_way=on_its_way
    )


def load(engine: int, *requests: Running, slots: int = 8, wake_rounds: float | None = None) -> EngineLoad:
    return EngineLoad(engine=engine, slots=slots, running=requests, wake_rounds=wake_rounds)


SLEEPS = st.none() | st.floats(0, 200)


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
    return [
        load(i, *some, slots=draw(st.integers(1, 4)), wake_rounds=draw(SLEEPS) if not some else None)
        for i, some in enumerate(requests)
    ]


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
def test_the_policy_does_one_of_them(loads: list[EngineLoad], finished: list[int], allowed: int) -> None:
    plan = Planned(migrate=True, replicas=allowed, drafters=True).decide(loads, finished)
    assert len({type(action) for action in plan}) <= 1
    if allowed == 1:
        assert not any(isinstance(action, Replica) for action in plan)
    if all(of.running for of in loads):
        assert not plan
    assert plan == Planned(migrate=True, replicas=allowed, drafters=True).decide(loads, finished)
    without = Planned(migrate=True, replicas=allowed).decide(loads, finished)
    assert without == [action for action in plan if not isinstance(action, Lend)]


@given(fleets(), lengths, st.floats(0, 1), st.floats(0, 2))
def test_drafters(loads: list[EngineLoad], lengths: Lengths, acceptance: float, draft_step: float) -> None:
    costs = TailCosts(acceptance=acceptance, draft_step=draft_step)
    lent = [lend.engine for lend in plan_drafters(loads, lengths, costs)]
    wakes = {of.engine: of.wake_rounds for of in loads if not of.running and of.wake_rounds is not None}
    assert len(lent) <= 1
    assert all(wakes[engine] == min(wakes.values()) for engine in lent)


def test_a_drafter_is_woken_where_it_pays() -> None:
    costs = TailCosts(acceptance=0.8, draft_step=0.1, notice_rounds=10.0)
    busy = load(0, running("r0", emitted=20, limit=200))
    dry = load(1, wake_rounds=30.0)
    assert plan_drafters([busy, dry], NONE, costs) == [Lend(engine=1)]
    assert plan_drafters([busy, load(1)], NONE, costs) == [], "nobody sleeps there"
    assert plan_drafters([busy, load(1, wake_rounds=300.0)], NONE, costs) == [], "it would wake too late"
    assert plan_drafters([load(0, running("r0", emitted=160, limit=200)), dry], NONE, costs) == []
    assert plan_drafters([busy, dry], Lengths([30] * 9), costs) == [], "responses have not been that long"
    for worse in (replace(costs, acceptance=0.0), replace(costs, draft_step=2.0), replace(costs, per_request=9.0)):
        assert plan_drafters([busy, dry], NONE, worse) == []
    two = [load(0, running("a", limit=200), running("b", limit=200)), dry, load(2, wake_rounds=5.0)]
    assert plan_drafters(two, NONE, costs) == [Lend(engine=2)], "one drafts for both, and the one that is there first"
    late, early = load(1, wake_rounds=150.0), load(2, wake_rounds=5.0)
    assert plan_drafters([busy, late, early], NONE, costs) == [Lend(engine=2)], "the late one does not count"


def test_the_time_of_a_drafter_that_serves_all_is_charged() -> None:
    costs = TailCosts(acceptance=0.8, draft_step=0.3, per_request=0.3, notice_rounds=0.0)
    one = load(0, running("r0", limit=400))
    others = load(1, *(running(f"a{i}", limit=400) for i in range(20)), slots=20)
    assert plan_drafters([one, load(2, wake_rounds=5.0)], NONE, costs) == [Lend(engine=2)]
    assert plan_drafters([one, others, load(2, wake_rounds=5.0)], NONE, costs) == []


@given(st.dictionaries(st.integers(0, 5), st.integers(0, 300), min_size=2), st.integers(0, 5000), st.data())
def test_a_plan_is_made_again_when_something_that_matters_has_changed(
    requests: dict[int, int], longest: int, data: st.DataObject
) -> None:
    before = Standing(requests=requests, longest=longest)
    engine = data.draw(st.sampled_from(sorted(requests)))
    count = data.draw(st.integers(0, 300))
    now = Standing(requests=requests | {engine: count}, longest=longest)
    change = abs(count - requests[engine])
    assert is_news(None, before)
    assert not is_news(before, before)
    assert is_news(before, now) == (change > 0 and change >= NEWS_SHARE * requests[engine])
    if (count == 0) != (requests[engine] == 0) or (change and requests[engine] <= 8):
        assert is_news(before, now)
    dead = Standing(requests={e: n for e, n in requests.items() if e != engine}, longest=longest)
    assert is_news(before, dead)
    assert is_news(before, replace(before, longest=2 * longest + 1))


def test_with_many_requests_rows_are_dear_and_nobody_is_woken() -> None:
    def crowd(count: int) -> list[EngineLoad]:
        return [load(0, *(running(f"r{i}", limit=400) for i in range(count)), slots=64), load(1, wake_rounds=10.0)]

    assert plan_drafters(crowd(2), NONE, TailCosts()) == [Lend(engine=1)]
    assert plan_drafters(crowd(64), NONE, TailCosts()) == []


def test_moves_and_replicas_come_first() -> None:
    several = [load(0, *(running(f"r{i}", emitted=0, limit=200) for i in range(4)), slots=1), load(1, wake_rounds=0.0)]
    assert {type(a) for a in Planned(migrate=True, drafters=True).decide(several, ())} == {Move}
    alone = [load(0, running("r0", limit=200)), load(1, wake_rounds=0.0)]
    assert {type(a) for a in Planned(migrate=True, replicas=2, drafters=True).decide(alone, ())} == {Replica}
    assert Planned(migrate=True, drafters=True).decide(alone, ()) == [Lend(engine=1)]
    assert Planned(migrate=True).decide(alone, ()) == []


def test_the_next_step_is_planned_with_the_acceptance_of_this_one() -> None:
    policy = Planned(migrate=False, drafters=True)
    seen = Counts()
    seen.round([3] * 1000, [3] * 900 + [0] * 100, verify_s=1.0, draft_s=0.0)
    assert policy.after({}) == policy
    assert policy.after({"suffix": seen}) == policy
    assert policy.after({METHOD: seen}).costs.acceptance == pytest.approx(0.9, abs=0.03)
    few = Counts()
    few.round([3], [0], verify_s=1.0, draft_s=0.0)
    assert policy.after({METHOD: few}).costs.acceptance == pytest.approx(policy.costs.acceptance, abs=0.02)


def test_a_drafter_that_was_bad_once_is_tried_again() -> None:
    """It is seen only while it is awake, and is not woken while it is believed to be bad; and it learns meanwhile."""
    loads = [load(0, running("a", limit=110), running("b", limit=110)), load(1, wake_rounds=20.0)]
    bad = Counts()
    bad.round([3] * 1000, [1] * 150 + [0] * 850, verify_s=1.0, draft_s=0.0)
    policy = Planned(migrate=False, drafters=True)
    assert policy.decide(loads, ()) == [Lend(engine=1)]
    policy = policy.after({METHOD: bad})
    steps = 0
    while not policy.decide(loads, ()):
        policy = policy.after({"suffix": bad})
        steps += 1
        assert steps < 20
    assert steps > 3, "not at once, or it would be woken for nothing in most steps"
    assert policy.costs.acceptance < policy.costs.first_acceptance


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
    drafting = Planned(migrate=False, drafters=True, costs=TailCosts(max_window=3))
    assert tail_policy(TailConfig(drafters=True), max_window=3) == drafting
    assert not isinstance(Planned(migrate=False).decide([load(0, running("a"), running("b")), load(1)], ()), Move)
