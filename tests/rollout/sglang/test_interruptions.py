"""Every sampling option and every interruption: with speculation as without.

One engine that speculates, with a KV pool too small for what is asked of it and prefills in small parts, beside the
plain engine of all tests. Prefills in parts round differently, so log-probabilities are equal to 1e-5 and not bitwise.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from specactor.config import EngineConfig, SpeculationConfig
from specactor.rollout.resume import going_on
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.types import RolloutRequest, Trajectory
from tests.rollout.conftest import VOCAB, request
from tests.rollout.sglang.asking import assert_same, differs, in_background, probe, wait_for_tokens
from tests.rollout.sglang.parts import cut as cut_at
from tests.rollout.sglang.parts import in_two, with_seam, without_the_seam_token
from tests.rollout.sglang.sampling_cases import BOS, EOS, STOPS, cut, make_tokenizer, with_options
from tests.rollout.sglang.test_verify_worker import configure, report

PROBES = "tests.rollout.sglang.probes"
WINDOW = 6
CHUNK = 48
POOL = 900
LAYERS, EXPERTS_PER_TOKEN = 2, 2


def drafter(name: str, *, window: int = WINDOW) -> SpeculationConfig:
    return SpeculationConfig(mode="coupled", drafters=(f"{PROBES}:{name}",), window=window, max_window=WINDOW)


OFF = drafter("Learning", window=0)
"""Plain decoding; the drafters remember what it gave, and nothing else."""


@pytest.fixture(scope="module")
def folder(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a tokenizer."""
    copy = tmp_path_factory.mktemp("text") / "model"
    shutil.copytree(model_dir, copy)
    make_tokenizer(copy)
    return copy


@pytest.fixture(scope="module")
def started(make_spec: Callable[..., EngineSpec], folder: Path) -> Iterator[Engine]:
    spec = make_spec(
        20,
        model_dir=str(folder),
        config=EngineConfig(
            max_running_requests=16,
            max_total_tokens=POOL,
            extra_args={
                "enable_return_routed_experts": True,
                "chunked_prefill_size": CHUNK,
                "schedule_conservativeness": 0.2,  # takes too many requests in
            },
        ),
        speculation=OFF,
    )
    with running(spec) as engine:
        yield engine


def run(engine: Engine, config: SpeculationConfig, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
    """From empty caches."""
    engine.flush()
    configure(engine, config)
    return engine.generate(requests)


def rehearsed(engine: Engine, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
    """With half of the drafts wrong, after they were learned from plain decoding of the same engine."""
    run(engine, OFF, requests)
    trajectories = run(engine, drafter("Half"), requests)
    counts = report(engine)
    assert 0 < counts.accepted < counts.drafted
    return trajectories


def test_all_options_side_by_side(speculating: Engine, engine: Engine) -> None:
    requests = with_options()
    expected = engine.generate(requests)
    assert_same(rehearsed(speculating, requests), expected)
    assert {t.finish_reason for t in expected} == {"stop", "length"}


def test_attention_on_gpus_has_room_for_all_rows_of_a_round(speculating: Engine) -> None:
    """Of Triton's attention, which is made here as for a GPU: no kernel of it runs. It has no mask of all keys beside
    them, which rows do not read."""
    rows, requests, masks = probe(speculating, "triton_rows")
    assert rows == requests * (speculating.spec.speculation.max_window + 1)
    assert not masks


# Ends inside a chain


@pytest.mark.parametrize("ends", [{}, {"stop_token_ids": tuple(range(4, VOCAB, 11))}], ids=["eos", "stop-ids"])
def test_ends_inside_an_accepted_chain(speculating: Engine, engine: Engine, ends: dict[str, object]) -> None:
    bias: dict[str, object] = {"logit_bias": ((EOS, 2.0),), **ends}
    requests = [request(i, new=40, ignore_eos=False, **bias) for i in range(16)]  # type: ignore[arg-type]
    expected = engine.generate(requests)
    run(speculating, OFF, [replace(r, sampling=replace(r.sampling, ignore_eos=True)) for r in requests])
    ours = run(speculating, drafter("Right"), requests)
    assert_same(ours, expected)
    assert sum(t.finish_reason == "stop" for t in ours) > 8
    counts = report(speculating)
    after_prefill = sum(len(t.token_ids) - 1 for t in ours)
    assert counts.emitted > after_prefill + 8  # the chains went past the ends


def test_longest_response_is_reached_inside_a_chain(speculating: Engine, engine: Engine) -> None:
    requests = [request(i, new=1 + i) for i in range(16)]
    run(speculating, OFF, [request(i, new=40) for i in range(16)])
    ours = run(speculating, drafter("Right"), requests)
    assert_same(ours, engine.generate(requests))
    assert [len(t.token_ids) for t in ours] == list(range(1, 17))
    counts = report(speculating)
    assert counts.accepted == counts.drafted > 0


# Stop strings


def test_stop_strings(speculating: Engine, engine: Engine, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    endless = [request(i, new=50, ignore_eos=i % 2 == 0) for i in range(30)]
    requests = [replace(r, sampling=replace(r.sampling, stop=STOPS[i % len(STOPS)])) for i, r in enumerate(endless)]
    plain = engine.generate(endless)
    lengths = [cut(t.token_ids, r.sampling.stop, tokenizer) for t, r in zip(plain, requests, strict=True)]
    expected = [t.token_ids[:n] for t, n in zip(plain, lengths, strict=True)]
    assert 10 < sum(n < 50 for n in lengths) < 30
    assert [t.token_ids for t in run(speculating, OFF, endless)] == [t.token_ids for t in plain]
    ended = run(speculating, OFF, requests)
    assert [t.token_ids for t in ended] == expected
    for own, t in zip(ended, plain, strict=True):  # the last token, too, can end a stop string
        is_shorter = len(own.token_ids) < len(t.token_ids)
        assert own.finish_reason == "stop" if is_shorter else own.finish_reason in ("stop", t.finish_reason)
    for name in ("Right", "Half"):
        ours = run(speculating, drafter(name), requests)
        assert [t.token_ids for t in ours] == expected
        assert [len(t.logprobs) for t in ours] == lengths
        assert [t.finish_reason for t in ours] == [t.finish_reason for t in ended]
    run(speculating, OFF, endless)  # the drafters know again what would come after the ends
    probe(speculating, "break_with", "stops_by_the_round")
    # It overlooks spellings in more tokens than usual, but not where it looks at a round's tokens together.
    assert [t.token_ids for t in run(speculating, OFF, requests)] != expected


def test_the_text_of_a_special_token_ends_a_response_like_its_id(speculating: Engine, engine: Engine) -> None:
    wanted: dict[str, Any] = {"new": 50, "logit_bias": ((BOS, 2.5),), "ignore_eos": False}
    expected = engine.generate([request(i, stop_token_ids=(BOS,), **wanted) for i in range(12)])
    assert sum(t.token_ids[-1] == BOS for t in expected) > 4
    requests = [request(i, stop=("<bos>",), **wanted) for i in range(12)]
    for config in (OFF, drafter("Right")):
        assert_same(run(speculating, config, requests), expected)


# Interruptions


ENDLESS = {"ignore_eos": False, "logit_bias": ((EOS, -50.0),)}  # room is kept for all of a request without an end


def test_retracted_requests(speculating: Engine, engine: Engine) -> None:
    """More than the pool holds: requests are thrown out, and come back."""
    options: list[dict[str, object]] = [{}, {"top_k": 9}, {"top_p": 0.8}, {"logit_bias": ((EOS, -50.0), (9, 2.0))}]
    requests = [request(i, new=100, **(ENDLESS | options[i % 4])) for i in range(16)]  # type: ignore[arg-type]
    expected = engine.generate(requests)
    for config in (OFF, drafter("Half"), drafter("Right")):
        probe(speculating, "seen")
        assert_same(run(speculating, config, requests), expected)
        assert probe(speculating, "seen")["retracted"] > 0
    assert report(speculating).accepted > 0


def test_reports_make_the_response_of_requests_that_come_back(speculating: Engine) -> None:
    """Each brings what is new since the last."""
    requests = [request(i, new=100, **ENDLESS) for i in range(16)]  # type: ignore[arg-type]
    heard: dict[str, Trajectory] = {}

    def hear(request: RolloutRequest, so_far: Trajectory) -> None:
        if (before := heard.get(request.request_id)) is not None:
            assert before.token_ids == so_far.token_ids[: len(before.token_ids)]
        heard[request.request_id] = so_far

    speculating.flush()
    probe(speculating, "seen")
    for whole in speculating.generate(requests, on_progress=hear, report_tokens=3):
        so_far = heard[whole.request_id]
        length = len(so_far.token_ids)
        assert length > 80
        assert (so_far.token_ids, so_far.logprobs) == (whole.token_ids[:length], whole.logprobs[:length])
    assert probe(speculating, "seen")["retracted"] > 0


def test_prefill_in_parts_and_cached_prefixes(speculating: Engine, engine: Engine) -> None:
    stem = tuple(3 + (11 * j * j + 5 * j) % (VOCAB - 3) for j in range(CHUNK + 52))
    requests = [
        replace(r, prompt_ids=stem[: 100 - 7 * (i % 4)] + r.prompt_ids, sampling=replace(r.sampling, max_new_tokens=20))
        for i, r in enumerate(with_options(8))
    ]
    expected = engine.generate(requests)
    rehearsed(speculating, requests[:4])
    probe(speculating, "seen")
    assert_same(run(speculating, drafter("Half"), requests), expected)
    counts = probe(speculating, "seen")
    assert counts["chunked"] > 0
    assert counts["longest_prefill"] <= CHUNK
    again = speculating.generate(requests)  # without a flush
    assert_same(again, expected)
    assert probe(speculating, "seen")["cached"] >= sum(len(r.prompt_ids) - 1 for r in requests)
    longer = [replace(r, prompt_ids=r.prompt_ids + t.token_ids[:12]) for r, t in zip(requests, expected, strict=True)]
    assert_same(speculating.generate(longer), engine.generate(longer))
    assert probe(speculating, "seen")["cached"] >= sum(len(r.prompt_ids) - 2 for r in longer)


def test_abort_in_the_middle(speculating: Engine, engine: Engine) -> None:
    requests = [request(i, new=100) for i in range(6)]
    expected = engine.generate(requests)
    run(speculating, OFF, requests)
    speculating.flush()
    configure(speculating, drafter("Slow"))
    before = probe(speculating, "free")
    thread, answers = in_background(speculating, requests)
    wait_for_tokens(speculating, 10)
    speculating.abort()
    thread.join(60)
    assert [t.finish_reason for t in answers] == ["abort"] * 6
    for ours, whole in zip(answers, expected, strict=True):
        count = len(ours.token_ids)
        assert 10 <= count < 100
        assert ours.token_ids == whole.token_ids[:count]
        assert len(experts(ours)) == len(ours.prompt_ids) + count - 1
        np.testing.assert_allclose(ours.logprobs, whole.logprobs[:count], atol=1e-5, rtol=0)
    speculating.flush()
    assert probe(speculating, "free") == before
    assert_same(run(speculating, drafter("Half"), requests), expected)


def test_drafters_hear_of_each_policy_once(speculating: Engine) -> None:
    """A step empties the cache up to three times, and evidence of drafts was halved each time."""
    configure(speculating, drafter("Half"))
    assert probe(speculating, "changes_told") == [0, 1]


def test_change_the_weights_and_go_on(speculating: Engine) -> None:
    """The response goes on with the new weights and the keys that it has, as if plain decoding had changed there."""
    wanted = [request(0, new=100)]
    [old] = run(speculating, OFF, wanted)
    speculating.flush()
    before = probe(speculating, "free")
    configure(speculating, drafter("Slow"))
    thread, answers = in_background(speculating, wanted)
    wait_for_tokens(speculating, 20)
    [held] = probe(speculating, "change_weights")
    assert 20 <= held < 100
    thread.join(60)
    probe(speculating, "change_weights")
    speculating.flush()
    assert probe(speculating, "free") == before
    probe(speculating, "change_weights_at", held)
    [expected] = run(speculating, OFF, wanted)
    probe(speculating, "change_weights")
    assert_same(answers, [expected])
    assert expected.token_ids[:held] == old.token_ids[:held]
    assert expected.token_ids[held:] != old.token_ids[held:]
    assert_same(run(speculating, drafter("Half"), wanted), [old])


# Responses in parts


@pytest.mark.parametrize(
    ("config", "late"), [(OFF, True), (drafter("Half"), False)], ids=["plain, before the last", "drafted, anywhere"]
)
def test_parts_make_the_response(speculating: Engine, config: SpeculationConfig, late: bool) -> None:
    """With every option, with stop strings across the seam, with the experts of all tokens."""
    requests = with_options(36)
    requests += [
        replace(r, sampling=replace(r.sampling, stop=STOPS[i % len(STOPS)]))
        for i, r in enumerate(request(i, new=40, ignore_eos=i % 2 == 0) for i in range(36, 66))
    ]
    plain = run(speculating, OFF, requests)
    expected = with_seam(plain, plain)
    ours = in_two(lambda some: run(speculating, config, some), requests, plain, late=late)
    assert (report(speculating).accepted > 0) == (config is not OFF), "drafters know how the response began"
    assert_same(ours, expected)
    for mine, other in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(experts(mine), experts(other))
        assert mine.spans == other.spans
    assert sum(bool(r.sampling.stop) and t.finish_reason == "stop" for r, t in zip(requests, plain, strict=True)) > 10
    probe(speculating, "break_with", "forgets_beginnings")
    wrong = in_two(lambda some: run(speculating, config, some), requests, plain, late=late)
    stops = [bool(r.sampling.stop) for r in with_seam(requests, plain)]
    changed = [t.token_ids != e.token_ids for t, e in zip(wrong, expected, strict=True)]
    assert any(c for c, s in zip(changed, stops, strict=True) if s) or not late
    assert not any(c for c, s in zip(changed, stops, strict=True) if not s)


@pytest.mark.parametrize("config", [OFF, drafter("Half")], ids=["plain", "drafted"])
def test_an_abort_in_the_last_round_goes_past_no_end(speculating: Engine, config: SpeculationConfig) -> None:
    """Ends of all kinds in the very round that is the last anyway; what has not ended goes on to the same response."""
    bias = {"logit_bias": ((EOS, 2.0),), "stop_token_ids": tuple(range(4, VOCAB, 11)), "ignore_eos": False}
    requests = [request(i, new=4 + i % 24, **bias) for i in range(24)]  # type: ignore[arg-type]
    expected = run(speculating, OFF, requests)
    run(speculating, OFF, [replace(r, sampling=replace(r.sampling, ignore_eos=True)) for r in requests])

    def aborted() -> list[Trajectory]:
        speculating.flush()
        configure(speculating, config)
        probe(speculating, "abort_at", 3)
        responses = speculating.generate(requests)
        probe(speculating, "heal")
        return responses

    ours = aborted()
    assert {t.finish_reason for t in ours} == {"abort", "stop", "length"}
    left = [t.finish_reason == "abort" for t in ours]
    more = [going_on(r, t) for r, t, is_left in zip(requests, ours, left, strict=True) if is_left]
    rest = iter(run(speculating, config, more))
    assert_same([next(rest) if is_left else t for t, is_left in zip(ours, left, strict=True)], expected)
    probe(speculating, "break_with", "aborts_without_a_look")
    wrong = aborted()
    past = [t.token_ids != e.token_ids[: len(t.token_ids)] for t, e in zip(wrong, expected, strict=True)]
    whole = [t.finish_reason == "abort" and t.token_ids == e.token_ids for t, e in zip(wrong, expected, strict=True)]
    assert any(past) or any(whole)


def test_wrong_versions_of_the_seam(speculating: Engine) -> None:
    requests = [request(i, new=20) for i in range(8)]
    expected = run(speculating, OFF, requests)
    firsts = run(speculating, OFF, cut_at(requests, [10] * 8))
    dropped = [without_the_seam_token(r, first) for r, first in zip(requests, firsts, strict=True)]
    seconds = run(speculating, OFF, [replace(r, sampling=replace(r.sampling, max_new_tokens=19)) for r in dropped])
    assert differs(
        [replace(t, token_ids=f.token_ids + t.token_ids[9:]) for t, f in zip(seconds, firsts, strict=True)], expected
    )
    probe(speculating, "break_with", "noise_begins_anew")
    assert differs(in_two(lambda some: run(speculating, OFF, some), requests, expected, late=False), expected)


# Routing replay


def experts(trajectory: Trajectory) -> np.ndarray[Any, np.dtype[np.int16]]:
    found = np.frombuffer(trajectory.routed_experts, dtype="<i2")
    num_rows = len(trajectory.prompt_ids) + len(trajectory.token_ids) - 1
    return found.reshape(num_rows, LAYERS, EXPERTS_PER_TOKEN)


def test_experts_of_every_emitted_token(speculating: Engine, engine: Engine) -> None:
    requests = with_options(24)
    plain = run(speculating, OFF, requests)
    assert len({tuple(row.ravel()) for t in plain for row in experts(t)}) > 4
    for ours, expected in zip(rehearsed(speculating, requests), plain, strict=True):
        np.testing.assert_array_equal(experts(ours), experts(expected))
    probe(speculating, "break_with", "experts_of_the_row_after")
    wrong = run(speculating, drafter("Half"), requests)
    assert [t.token_ids for t in wrong] == [t.token_ids for t in plain]
    assert any(t.routed_experts != p.routed_experts for t, p in zip(wrong, plain, strict=True))
    assert {t.routed_experts for t in engine.generate(requests)} == {b""}
