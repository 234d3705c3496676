"""Rounds launched before the one before is handed out: the same tokens, log-probabilities and rounds as without,
whatever comes in between; and wrong versions of it are caught."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
import pytest

from specactor.config import EngineConfig, SpeculationConfig
from specactor.rollout.child_process import ChildDied
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.sglang.speculation_calls import TRACE
from specactor.rollout.speculation.probing import SOON
from specactor.trace import Span
from specactor.types import RolloutRequest, Trajectory
from tests.rollout.conftest import request, two_ranks_are_deep
from tests.rollout.sglang.asking import assert_same, in_background, probe, wait_for_tokens
from tests.rollout.sglang.sampling_cases import EOS
from tests.rollout.sglang.test_interruptions import OFF, drafter
from tests.rollout.sglang.test_verify_worker import batch, configure, facts

HALF = drafter("Half")
AUTO = replace(drafter("Half"), mode="auto", window=None)
NOBODY = replace(OFF, mode="off")
Facts = list[tuple[object, ...]]
POOL = 2048
"""Slots. All requests of a test have room, but for those of the test of a full pool."""


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def started(request: pytest.FixtureRequest, make_spec: Callable[..., EngineSpec]) -> Iterator[Engine]:
    ranks: int = request.param
    spec = make_spec(
        60 + ranks,
        tensor_parallel=ranks,
        devices=tuple(range(ranks)),
        config=EngineConfig(
            max_running_requests=32,
            max_total_tokens=POOL,
            extra_args={"enable_return_routed_experts": True, "schedule_conservativeness": 0.2},
        ),
        speculation=OFF,
    )
    with running(spec) as engine:
        yield engine


def run(
    engine: Engine, config: SpeculationConfig, requests: Sequence[RolloutRequest], *, overlap: bool = True
) -> Facts:
    return facts(generated(engine, config, requests, overlap=overlap))


def generated(
    engine: Engine, config: SpeculationConfig, requests: Sequence[RolloutRequest], *, overlap: bool
) -> list[Trajectory]:
    """From empty caches; with overlap, rounds are launched ahead, and else none."""
    engine.flush()
    configure(engine, config)
    probe(engine, "overlap_rounds", overlap)
    found = engine.generate(requests)
    assert (probe(engine, "overlap_rounds", True) > 0) == overlap
    return found


@two_ranks_are_deep("started")
def test_overlap_changes_nothing(speculating: Engine) -> None:
    """Where nobody drafts, where drafting is tried now and then, and in turns."""
    expected = run(speculating, OFF, batch(), overlap=False)
    for config in (OFF, NOBODY, AUTO, HALF, OFF):
        assert run(speculating, config, batch()) == expected
    for config in (AUTO, HALF):
        assert run(speculating, config, batch(), overlap=False) == expected


@two_ranks_are_deep("started")
def test_switched_in_the_middle(speculating: Engine) -> None:
    """Drafting, plain and plain without overlap follow each other while requests run."""
    requests = [request(i, new=100, ignore_eos=i % 3 != 0) for i in range(12)]
    expected = run(speculating, OFF, requests, overlap=False)
    speculating.flush()
    thread, answers = in_background(speculating, requests)
    turns = 0
    while thread.is_alive():
        configure(speculating, (drafter("Half"), OFF, AUTO, OFF)[turns % 4])
        probe(speculating, "overlap_rounds", turns % 3 != 0)
        turns += 1
        thread.join(0.02)
    assert turns > 1
    assert facts(answers) == expected


@two_ranks_are_deep("started")
def test_half_as_many_requests_are_soon_decided_for(speculating: Engine) -> None:
    """However many plain rounds were promised to all of them, on all ranks in the same round; not before half of them
    have ended."""
    requests = [request(i, new=24 if i < 7 else 36 if i == 7 else 48) for i in range(16)]
    expected = run(speculating, NOBODY, requests, overlap=False)
    speculating.flush()
    configure(speculating, replace(drafter("Half"), mode="auto", window=None))
    probe(speculating, "promise_plain_rounds", 1000)
    assert facts(speculating.generate(requests)) == expected
    rounds, *others = map(json.loads, speculating.rank_call("probe.rounds_of_requests", b"", timeout_s=60))
    assert all(other == rounds for other in others)
    all_there = next(i for i, (_, count) in enumerate(rounds) if count == 16)
    half = next(i for i, (_, count) in enumerate(rounds) if i > all_there and count <= 8)
    decided = [i for i, (is_decided, _) in enumerate(rounds) if is_decided]
    assert [i for i in decided if all_there + SOON < i < half] == []
    assert rounds[half - 1] == [False, 9]
    assert [i for i in decided if half <= i <= half + SOON] != []


@two_ranks_are_deep("started")
def test_tokens_are_read_on_the_device(speculating: Engine) -> None:
    expected = run(speculating, OFF, batch(), overlap=False)
    probe(speculating, "break_with", "reads_tokens_of_the_host")
    speculating.flush()
    assert facts(speculating.generate(batch())) != expected


@two_ranks_are_deep("started")
def test_what_a_request_leaves_in_the_cache(speculating: Engine) -> None:
    """The next turn of a conversation computes the same part of it anew, so that its log-probabilities have the same
    bits."""
    first = [request(i, new=10 + i, ignore_eos=False) for i in range(24)]

    def second_turn(*, overlap: bool) -> tuple[Facts, int]:
        token_ids = [found[0] for found in run(speculating, OFF, first, overlap=overlap)]
        probe(speculating, "seen")
        more = [replace(r, prompt_ids=(*r.prompt_ids, *ids, 5, 7)) for r, ids in zip(first, token_ids, strict=True)]  # type: ignore[misc]
        return facts(speculating.generate(more)), probe(speculating, "seen")["cached"]

    expected = second_turn(overlap=False)
    assert second_turn(overlap=True) == expected
    probe(speculating, "break_with", "keeps_keys_under_way")
    found, cached = second_turn(overlap=True)
    assert cached > expected[1]
    assert found != expected[0]


@two_ranks_are_deep("started")
def test_a_round_with_drafts_waits(speculating: Engine) -> None:
    requests = [request(i, new=40) for i in range(12)]
    expected = run(speculating, OFF, requests, overlap=False)
    assert run(speculating, AUTO, requests) == expected
    probe(speculating, "break_with", "goes_on_before_drafts")
    assert run(speculating, AUTO, requests) != expected


@two_ranks_are_deep("started")
def test_a_full_pool(speculating: Engine) -> None:
    """Requests are thrown out when no round is under way, and come back: a prefill computes anew what they have, and
    rounds differently."""
    bias = ((EOS, -50.0),)  # room is kept for all of a request without an end
    requests = [request(i, new=140, ignore_eos=False, logit_bias=bias) for i in range(32)]

    def thrown_out(config: SpeculationConfig, *, overlap: bool) -> tuple[list[Trajectory], int]:
        """Responses, and how many requests were thrown out while a round was under way."""
        probe(speculating, "seen")
        found = generated(speculating, config, requests, overlap=overlap)
        counts = probe(speculating, "seen")
        assert counts["retracted"] > 0
        return found, counts["under_way"]

    expected, _ = thrown_out(OFF, overlap=False)
    for config in (HALF, OFF):
        found, under_way = thrown_out(config, overlap=True)
        assert under_way == 0
        assert_same(found, expected)
        assert [t.routed_experts for t in found] == [t.routed_experts for t in expected]
    probe(speculating, "break_with", "goes_on_in_a_full_pool")
    assert thrown_out(OFF, overlap=True)[1] > 0


@two_ranks_are_deep("started")
def test_weights_change_between_two_rounds(speculating: Engine) -> None:
    """What comes in finds no round under way: the next token is the new weights'."""
    wanted = [request(0, new=100)]

    def changed() -> tuple[int, list[Trajectory]]:
        speculating.flush()
        probe(speculating, "slow_rounds")
        thread, answers = in_background(speculating, wanted)
        wait_for_tokens(speculating, 20)
        [held] = probe(speculating, "change_weights")
        thread.join(60)
        probe(speculating, "change_weights")
        probe(speculating, "heal")
        return held, answers

    def expected(held: int) -> Facts:
        probe(speculating, "change_weights_at", held)
        found = run(speculating, OFF, wanted, overlap=False)
        probe(speculating, "change_weights")
        return found

    configure(speculating, OFF)
    held, answers = changed()
    assert 20 <= held < 100
    assert facts(answers) == expected(held)
    probe(speculating, "break_with", "messages_do_not_wait")
    held, answers = changed()
    assert facts(answers) != expected(held)


@two_ranks_are_deep("started")
def test_an_abort_ends_with_the_tokens_that_there_are(speculating: Engine) -> None:
    requests = [request(i, new=100) for i in range(6)]
    expected = run(speculating, OFF, requests, overlap=False)
    speculating.flush()
    before = probe(speculating, "free")
    probe(speculating, "slow_rounds")
    thread, answers = in_background(speculating, requests)
    wait_for_tokens(speculating, 10)
    speculating.abort()
    thread.join(60)
    assert {t.finish_reason for t in answers} == {"abort"}
    for ours, (token_ids, _, logprobs) in zip(answers, expected, strict=True):
        count = len(ours.token_ids)
        assert 10 <= count < 100
        assert (ours.token_ids, ours.logprobs) == (token_ids[:count], logprobs[:count])  # type: ignore[index]
    speculating.flush()
    assert probe(speculating, "free") == before


@two_ranks_are_deep("started")
def test_requests_come_and_are_aborted_among_rounds_with_drafts(speculating: Engine) -> None:
    chance = random.Random(0)
    waves = [
        [replace(request(i, new=chance.randrange(1, 120), ignore_eos=i % 2 == 0), request_id=f"{w}-{i}") for i in some]
        for w, some in enumerate([range(40 * w, 40 * w + 14) for w in range(4)])
    ]
    expected = {t.request_id: t for wave in waves for t in generated(speculating, OFF, wave, overlap=False)}
    speculating.flush()
    before = probe(speculating, "free")
    configure(speculating, HALF)
    running_waves = []
    for wave in waves:
        running_waves.append(in_background(speculating, wave))
        time.sleep(chance.random() * 0.3)
        speculating.abort_requests([r.request_id for r in wave if chance.random() < 0.2])
    for thread, _ in running_waves:
        thread.join(120)
    assert probe(speculating, "overlap_rounds", True) > 0
    found = [ours for _, answers in running_waves for ours in answers]
    assert len(found) == len(expected)
    for ours in found:
        whole = expected[ours.request_id]
        if ours.finish_reason != "abort":
            assert_same([ours], [whole])
            assert ours.routed_experts == whole.routed_experts
        assert ours.token_ids == whole.token_ids[: len(ours.token_ids)]
    speculating.flush()
    assert probe(speculating, "free") == before


@two_ranks_are_deep("started")
def test_a_round_with_drafts_begins_where_the_last_ended(speculating: Engine) -> None:
    requests = [request(i, new=40) for i in range(12)]
    expected = run(speculating, OFF, requests, overlap=False)
    probe(speculating, "seen")
    assert run(speculating, HALF, requests) == expected
    assert probe(speculating, "seen")["running"] == len(requests), "SGLang counts rows as requests"
    probe(speculating, "break_with", "drafts_from_what_was_handed_out")
    assert run(speculating, HALF, requests) != expected


@two_ranks_are_deep("started")
def test_nothing_is_verified_for_the_ended(speculating: Engine) -> None:
    """As often as without overlap, whether requests end by their lengths or by themselves."""

    def verified(*, overlap: bool) -> int:
        speculating.rank_call(TRACE, b"on", timeout_s=60)
        found.append(run(speculating, HALF, batch(), overlap=overlap))
        spans = msgspec.msgpack.decode(speculating.rank_call(TRACE, b"off", timeout_s=60)[0], type=list[Span])
        return sum(int(s.details["requests"]) for s in spans if s.name == "verify")

    found = [run(speculating, OFF, batch(), overlap=False)]
    expected = verified(overlap=False)
    assert verified(overlap=True) == expected
    probe(speculating, "break_with", "verifies_for_the_ended")
    assert verified(overlap=True) > expected
    assert all(facts == found[0] for facts in found)


def traced(engine: Engine, requests: Sequence[RolloutRequest], *, overlap: bool) -> int:
    """Plain rounds of the trace."""
    engine.rank_call(TRACE, b"on", timeout_s=60)
    run(engine, OFF, requests, overlap=overlap)
    spans = msgspec.msgpack.decode(engine.rank_call(TRACE, b"off", timeout_s=60)[0], type=list[Span])
    return sum(int(s.details["rounds"]) for s in spans if s.name == "plain")


@two_ranks_are_deep("started")
def test_rounds_are_traced_once(speculating: Engine) -> None:
    """Where requests end by their lengths there are as many as without overlap: none is launched for nobody."""
    requests = [request(i, new=20 + 5 * i) for i in range(4)]
    assert traced(speculating, requests, overlap=False) == traced(speculating, requests, overlap=True) == 33


def test_an_engine_that_looks_at_the_ended_dies(make_spec: Callable[..., EngineSpec]) -> None:
    with running(make_spec(63, speculation=OFF)) as engine:
        probe(engine, "overlap_rounds", True)
        probe(engine, "break_with", "looks_at_the_ended")
        with pytest.raises(ChildDied, match="allows freeing before alloc"):
            engine.generate(batch())
