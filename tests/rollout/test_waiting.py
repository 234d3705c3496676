"""Groups that wait for room go to whichever rank has it: each once, with the same tokens, and earlier."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from specactor.data.tokenizer import make_char_tokenizer
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine_client import Engine
from specactor.rollout.waiting import Waiting, held_back
from specactor.types import RolloutRequest
from tests.lib.ranks import run_ranks
from tests.rollout.conftest import request
from tests.rollout.driver_cases import expected, make_requests, token
from tests.rollout.test_assignment import make_request
from tests.rollout.test_refill import Ready
from tests.rollout.waiting_script import PROMPTS, SIZE


def requests_of(groups: int, size: int) -> list[RolloutRequest]:
    return [make_request(i, i // size) for i in range(groups * size)]


def waiting_of(lists: dict[int, list[list[RolloutRequest]]], slots: int, engines: int, ranks: int) -> list[Waiting]:
    store = HashStore()
    return [
        Waiting(lists=lists, own=range(rank, engines, ranks), slots=slots, store=store, prefix="w")
        for rank in range(ranks)
    ]


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 8), st.integers(2, 5), st.randoms())
def test_every_group_is_given_once(groups: int, size: int, slots: int, engines: int, chance: random.Random) -> None:
    """To ranks that ask in any order and stop asking at any time, as they do whose engines died."""
    requests = requests_of(groups, size)
    lists = held_back(requests, engines=engines, slots=slots)
    ranks = waiting_of(lists, slots, engines, chance.randint(1, engines))
    given_out = ranks[0].without(requests)
    assert all(sum(r.group_id % engines == e for r in given_out) < slots + size for e in range(engines))
    asking = ranks[:]
    while asking and not all(rank.is_over for rank in asking):
        rank = chance.choice(asking)
        group = rank.take(chance.randrange(slots))
        assert len({r.group_id for r in group}) <= 1
        given_out += group
        if chance.random() < 0.1:
            asking.remove(rank)
    left = [r for rank in ranks for r in rank.left()]
    assert not any(rank.left() for rank in ranks), "nor is any left twice"
    assert asking == [] or not left
    assert sorted(r.seed for r in given_out + left) == list(range(groups * size))


def test_what_fits_is_begun_at_once_by_the_rank_that_it_is_meant_for() -> None:
    assert held_back(requests_of(6, 4), engines=2, slots=12) == {}
    assert held_back(requests_of(6, 4), engines=1, slots=1) == {}, "there is nobody else"
    waits = held_back(requests_of(6, 4), engines=2, slots=5)
    assert {e: [group[0].group_id for group in groups] for e, groups in waits.items()} == {0: [4], 1: [5]}


def test_a_rank_takes_its_own_first_and_then_of_those_behind_it() -> None:
    lists = held_back(requests_of(30, 2), engines=3, slots=2)
    first, second, third = waiting_of(lists, 2, 3, 3)
    for _ in range(5):
        second.take(0)
    assert [first.take(0)[0].group_id for _ in range(9)] == [3 * i for i in range(1, 10)]
    assert first.take(1) == [], "half a group would wait here"
    assert [first.take(0)[0].group_id for _ in range(5)] == [28, 25, 22, 19, 29], (
        "the end of the second's, then third's"
    )
    assert third.take(0)[0].group_id == 5
    assert (first.num_moved, third.num_moved) == (5, 0)


class Shared(Waiting):
    """Takes from the others' front without asking the store."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._alone = Counter[str]()

    def _is_granted(self, engine: int) -> bool:
        self._alone[str(engine)] += 1
        if self._alone[str(engine)] > len(self.lists.get(engine, ())):
            self._over |= {engine} & self.lists.keys()
            return False
        return True

    def _add(self, name: str, amount: int) -> int:
        engine, kind = name.split("/")
        self._alone[name] += amount
        return self._alone[engine if kind == "taken" else name]


@pytest.mark.parametrize("kind", [Waiting, Shared])
def test_ranks_that_count_apart_are_caught(kind: type[Waiting]) -> None:
    lists = held_back(requests_of(20, 2), engines=2, slots=2)
    store = HashStore()
    ranks = [kind(lists=lists, own=[i], slots=2, store=store, prefix="w") for i in range(2)]
    given_out = [r.seed for _ in range(20) for rank in ranks for r in rank.take(0)]
    assert (len(given_out) == len(set(given_out))) == (kind is Waiting)


class Subtracting(Waiting):
    """Takes what its own rank has begun off the end of the list as well."""

    def _add(self, name: str, amount: int) -> int:
        return super()._add(name if amount else name.replace("/end", "/taken"), amount)


@pytest.mark.parametrize("kind", [Waiting, Subtracting])
def test_groups_that_nobody_begins_are_caught(kind: type[Waiting]) -> None:
    """Both ranks begin some, and stop."""
    lists = held_back(requests_of(20, 2), engines=2, slots=2)
    store = HashStore()
    ranks = [kind(lists=lists, own=[i], slots=2, store=store, prefix="w") for i in range(2)]
    begun = [r.seed for rank in ranks for _ in range(3) for r in rank.take(0)]
    left = [r.seed for rank in ranks for r in rank.left()]
    waited = sorted(r.seed for groups in lists.values() for group in groups for r in group)
    assert (sorted(begun + left) == waited) == (kind is Waiting)


@pytest.mark.parametrize("seed", range(10))
def test_engines_of_one_rank_that_die_lose_only_what_ran_there(seed: int) -> None:
    requests = make_requests(seed)
    waiting = waiting_of(held_back(requests, engines=2, slots=3), 3, 2, 1)[0]
    assert len(waiting.without(requests)) == 6
    pool = EnginePool([])
    pool.engines = cast("list[Engine]", [Ready(dies_after=3 + 4 * seed), Ready(index=1)])
    outcome = pool.generate(waiting.without(requests), waiting=waiting)
    left = waiting.left()
    assert left == [], "the other engine has begun it"
    ids = [t.request_id for t in outcome.finished] + [r.request_id for r in outcome.unfinished]
    assert sorted(ids) == sorted(r.request_id for r in requests)
    wanted = {r.request_id: expected(r) for r in requests}
    assert all(t.token_ids == wanted[t.request_id] for t in outcome.finished)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Rollouts of two gloo ranks, one of which is four times as slow."""
    settings: dict[str, dict[str, Any]] = {
        "stays": {"move": False, "dies_after": [0, 0]},
        "moves": {"move": True, "dies_after": [0, 0], "after": 28},  # its own 16, and the 6 groups that wait
        "the slow one dies": {"move": True, "dies_after": [3, 0]},
        "the quick one dies": {"move": True, "dies_after": [0, 20]},
        "both die": {"move": True, "dies_after": [2, 9]},
    }
    folder = tmp_path_factory.mktemp("waiting")
    make_char_tokenizer(folder / "tokenizer")
    arguments = (folder, json.dumps({name: options | {"token_ms": [16, 4]} for name, options in settings.items()}))
    run_ranks(2, "tests.rollout.waiting_script", *arguments, folder=folder)
    results: dict[str, dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return results


def test_nothing_is_lost_or_doubled_and_samples_are_where_they_were_generated(found: dict[str, dict[str, Any]]) -> None:
    names = [f"0.{group}.{sample}" for group in range(PROMPTS) for sample in range(SIZE)]
    for result in found.values():
        assert [name for name, _, _ in result["responses"]] == names
        assert sorted(name for own in result["owned"] for name in own) == sorted(names)
        for _, seed, tokens in result["responses"]:
            assert tokens == [token(seed, position) for position in range(len(tokens))]
        assert result["responses"] == found["stays"]["responses"]
        assert result["keys"] == 0, "the store is left as it was"


def test_the_slow_ranks_groups_move_and_the_rollout_ends_earlier(found: dict[str, dict[str, Any]]) -> None:
    """Times are of the engines' own pace, which a busy machine does not change; a group moves whole."""
    stays, moves = found["stays"], found["moves"]
    assert stays["moved"] == 0
    assert moves["moved"] == 6
    assert max(moves["busy_s"]) < 0.7 * max(stays["busy_s"])
    for own in moves["owned"]:
        counts = [sum(name.startswith(f"0.{group}.") for name in own) for group in range(PROMPTS)]
        assert set(counts) <= {0, SIZE}
    assert len(moves["owned"][1]) - len(stays["owned"][1]) == SIZE * moves["moved"]


BATCH = [request(i, new=30 + 13 * i % 60, ignore_eos=i % 3 > 0) for i in range(24)]


def test_tokens_of_real_engines_are_those_without_moving(engines: tuple[Engine, Engine]) -> None:
    """Two ranks, of which one is meant to do all of the work and has room for one group."""
    engines[0].flush()
    whole = engines[0].generate(BATCH)
    lists: dict[int, list[list[RolloutRequest]]] = {}
    for r in BATCH:
        groups = lists.setdefault(0, [[]])
        if groups[-1] and groups[-1][0].group_id != r.group_id:
            groups.append([])
        groups[-1].append(r)
    store, pools = HashStore(), [EnginePool([]), EnginePool([])]
    ranks = [Waiting(lists=lists, own=[i], slots=4, store=store, prefix="w") for i in range(2)]
    outcomes: list[Any] = [None, None]

    def generate(rank: int) -> None:
        pools[rank].engines = [engines[rank]]
        pools[rank].flush()
        outcomes[rank] = pools[rank].generate([], waiting=ranks[rank])

    threads = [threading.Thread(target=generate, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [rank.left() for rank in ranks] == [[], []]
    assert ranks[1].num_moved > 0
    there = {t.request_id: t for outcome in outcomes for t in outcome.finished}
    assert sum(len(outcome.finished) for outcome in outcomes) == len(BATCH)
    for r, response in zip(BATCH, whole, strict=True):
        assert there[r.request_id].token_ids == response.token_ids
        np.testing.assert_allclose(there[r.request_id].logprobs, response.logprobs, atol=1e-5, rtol=0)
