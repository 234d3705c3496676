"""A real engine: the same tokens whatever runs beside a request, transformers' log-probabilities, clear refusals."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from specactor.config import EngineConfig, RolloutConfig
from specactor.errors import EngineError
from specactor.parallel.layout import ENGINE_RESERVED_TOKENS, reserved_tokens
from specactor.rollout import resume
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.types import RolloutRequest, Trajectory, VersionSpan
from tests.rollout.conftest import CONTEXT, VOCAB, request


def tokens(trajectories: list[Trajectory]) -> list[tuple[int, ...]]:
    return [t.token_ids for t in trajectories]


def test_same_batch_twice_gives_the_same_bits(engine: Engine) -> None:
    batch = [request(i) for i in range(32)]
    first = engine.generate(batch)
    engine.flush()
    second = engine.generate(batch)
    assert [t.request_id for t in first] == [r.request_id for r in batch]
    assert tokens(first) == tokens(second)
    assert [t.logprobs for t in first] == [t.logprobs for t in second]


def test_a_request_does_not_feel_its_batch_mates(engine: Engine) -> None:
    together = engine.generate([request(i) for i in range(32)])
    for i in (0, 5, 31):
        engine.flush()
        (alone,) = engine.generate([request(i)])
        assert alone.token_ids == together[i].token_ids
        assert alone.logprobs == together[i].logprobs  # `sglang_ops` promises bits, not only tokens


def test_a_request_does_not_feel_how_its_batch_mates_are_sampled(engine: Engine) -> None:
    """Also greedy, top-p and top-k requests side by side are what each is among its like."""
    kinds: list[dict[str, object]] = [{}, {"top_p": 0.8}, {"top_k": 7}, {"top_p": 0.9, "top_k": 12}, {"top_k": 1}]
    batch = [request(i, **kinds[i % 5]) for i in range(30)]
    together = engine.generate(batch)
    for kind in range(5):
        engine.flush()
        alike = engine.generate(batch[kind::5])
        assert [(t.token_ids, t.logprobs) for t in alike] == [(t.token_ids, t.logprobs) for t in together[kind::5]]


def test_the_order_of_a_batch_does_not_matter(engine: Engine) -> None:
    batch = [request(i) for i in range(40)]  # more than run at once
    forward = {t.request_id: t.token_ids for t in engine.generate(batch)}
    engine.flush()
    backward = {t.request_id: t.token_ids for t in engine.generate(batch[::-1])}
    assert forward == backward


def test_the_seed_decides(engine: Engine) -> None:
    one, two = engine.generate([request(0), request(1)])  # the same prompt
    assert one.prompt_ids == two.prompt_ids
    assert one.token_ids != two.token_ids


def test_samples_follow_the_distribution(engine: Engine) -> None:
    """Neither argmax, nor flat: the first tokens of many seeds have about the frequencies that their logprobs say."""
    draws = [t for n in range(16) for t in engine.generate([request(i, new=1, group_size=10_000) for i in _block(n)])]
    counts = Counter(t.token_ids[0] for t in draws)
    probability = {t.token_ids[0]: math.exp(t.logprobs[0]) for t in draws}
    top, p = max(probability.items(), key=lambda item: item[1])
    assert 0.05 < p < 0.95, "the model is too sure, or knows nothing: the test would prove nothing"
    assert len(counts) > 5
    n = len(draws)
    for token, p in probability.items():
        assert abs(counts[token] - n * p) < 5 * math.sqrt(n * p * (1 - p)) + 1, token
    assert counts[top] < n


def _block(n: int) -> range:
    return range(32 * n, 32 * n + 32)


def test_logprobs_equal_transformers_at_the_sampling_temperature(
    engine: Engine, reference: Callable[..., list[list[float]]]
) -> None:
    batch = [request(i, temperature=t) for i, t in enumerate((1.0, 0.6, 1.3, 1.0, 0.6, 1.3))]
    batch += [request(8, top_p=0.7), request(9, top_k=5), request(10, temperature=0.7, top_p=0.8, top_k=9)]
    got = engine.generate(batch)
    want = reference([(t.prompt_ids, t.token_ids, r.sampling.temperature) for t, r in zip(got, batch, strict=True)])
    for trajectory, logprobs in zip(got, want, strict=True):
        assert trajectory.logprobs == pytest.approx(logprobs, abs=1e-4), trajectory.request_id
    wrong = reference([(got[1].prompt_ids, got[1].token_ids, 1.0)])[0]
    assert got[1].logprobs != pytest.approx(wrong, abs=1e-2), "temperature must matter here"


def test_temperature_zero_is_argmax(engine: Engine, reference: Callable[..., list[list[float]]]) -> None:
    (got,) = engine.generate([request(3, temperature=0.0, new=4)])
    for k, token in enumerate(got.token_ids):
        scores = reference([(got.prompt_ids + got.token_ids[:k], (v,), 1.0) for v in range(VOCAB)])
        assert token == max(range(VOCAB), key=lambda v: scores[v][0])


def test_top_k_one_is_argmax(engine: Engine) -> None:
    greedy = engine.generate([request(i, temperature=0.0) for i in range(4)])
    engine.flush()
    top = engine.generate([request(i, top_k=1) for i in range(4)])
    assert tokens(greedy) == tokens(top)


def test_finish_reasons(engine: Engine) -> None:
    length, *free = engine.generate([request(0, new=5), *(request(i, ignore_eos=False, new=100) for i in range(1, 25))])
    assert (length.finish_reason, len(length.token_ids)) == ("length", 5)
    stopped = [t for t in free if t.finish_reason == "stop"]
    assert stopped, "no response ended by itself"
    for t in stopped:
        assert t.token_ids[-1] == 1
        assert 1 not in t.token_ids[:-1]
        assert len(t.logprobs) == len(t.token_ids)
    stop_at = length.token_ids[2]
    (early,) = engine.generate([request(0, new=5, ignore_eos=False, stop_token_ids=(stop_at,))])
    assert early.finish_reason == "stop"
    assert early.token_ids == length.token_ids[: length.token_ids.index(stop_at) + 1]


def test_tensor_parallel_ranks_emit_the_same_tokens(engine: Engine, engine_tp2: Engine) -> None:
    batch = [request(i) for i in range(32)]
    one, two = engine.generate(batch), engine_tp2.generate(batch)
    assert tokens(one) == tokens(two)
    for a, b in zip(one, two, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_spans_and_callback(engine: Engine) -> None:
    engine.version = 7
    seen: list[str] = []
    got = engine.generate([request(i) for i in range(4)], on_finished=lambda t: seen.append(t.request_id))
    assert sorted(seen) == ["r0", "r1", "r2", "r3"]
    assert all([(s.version, s.start, s.end) for s in t.spans] == [(7, 0, len(t.token_ids))] for t in got)
    assert [len(t.token_ids) for t in got] == [24] * 4
    assert engine.generate([]) == []


def aborted(engine: Engine, after_s: float) -> list[Trajectory]:
    """What is cut so many seconds after the beginning."""
    box: list[Trajectory] = []
    batch = [request(i, new=140) for i in range(24)]
    thread = threading.Thread(target=lambda: box.extend(engine.generate(batch)))
    thread.start()
    time.sleep(after_s)
    engine.abort()
    thread.join(120)
    assert len(box) == 24
    return [t for t in box if t.finish_reason == "abort"]


def test_abort(engine: Engine) -> None:
    cut = next(filter(None, (aborted(engine, after_s) for after_s in (0.4, 0.2, 0.1, 0.05))), None)
    assert cut, "everything was over before the abort"
    assert all(len(t.token_ids) == len(t.logprobs) < 140 for t in cut)
    engine.flush()
    assert len(engine.generate([request(0)])) == 1


def test_the_longest_request_is_served_whole(engine: Engine) -> None:
    prompt = len(request(0).prompt_ids)
    assert engine.ready is not None
    new = engine.ready.max_sequence_tokens - prompt
    assert new >= CONTEXT - prompt - 2
    (got,) = engine.generate([request(0, new=new)])
    assert len(got.token_ids) == new
    with pytest.raises(EngineError, match=f"expected 1 <= prompt <= {engine.ready.max_sequence_tokens} - max_new"):
        engine.generate([request(0, new=new + 1)])


def test_with_pages_no_response_is_cut_in_silence(make_spec: Callable[..., EngineSpec]) -> None:
    """SGLang takes whole pages for a prompt, and one more, and would end a response before its length."""
    config = EngineConfig(max_running_requests=1, max_total_tokens=160, extra_args={"page_size": 16})
    with running(make_spec(9, config=config)) as engine:
        assert engine.ready is not None
        longest = engine.ready.max_sequence_tokens
        assert longest == 160 - 2 * 16
        prompt_ids = request(0).prompt_ids
        for length in (1, 16, 17):  # the last is where SGLang would have cut first
            one = replace(request(0), prompt_ids=(prompt_ids * length)[:length])
            whole = replace(one, sampling=replace(one.sampling, max_new_tokens=longest - length, ignore_eos=True))
            (got,) = engine.generate([whole])
            assert len(got.token_ids) == longest - length


def test_a_response_with_few_tokens_left_goes_on(engine: Engine) -> None:
    """At the limit of what may go on (`layout.reserved_tokens`); beyond it the engine says so, and not SGLang."""
    assert engine.ready is not None
    most = engine.ready.max_sequence_tokens
    reserved = reserved_tokens(RolloutConfig(oversample=1.5, partial=True)) - ENGINE_RESERVED_TOKENS
    whole = request(0, new=most - reserved - len(request(0).prompt_ids))
    (expected,) = engine.generate([whole])
    for left in range(1, 6):
        engine.flush()
        (got,) = engine.generate([without_last(whole, expected, left)])
        assert got.token_ids == expected.token_ids
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    longer = request(0, new=most - len(request(0).prompt_ids))
    (expected,) = engine.generate([longer])
    for left in range(1, 5):
        with pytest.raises(EngineError, match="tokens of prompt and beginning, expected <="):
            engine.generate([without_last(longer, expected, left)])
    (got,) = engine.generate([without_last(longer, expected, 5)])
    assert got.token_ids == expected.token_ids


def without_last(whole: RolloutRequest, response: Trajectory, count: int) -> RolloutRequest:
    """`whole`, to go on with from all but the last tokens of its response."""
    tokens, logprobs = response.token_ids[:-count], response.logprobs[:-count]
    spans = (VersionSpan(version=response.spans[0].version, start=0, end=len(tokens)),)
    return resume.going_on(whole, replace(response, token_ids=tokens, logprobs=logprobs, spans=spans))


def test_too_long_a_request_names_the_limit(engine: Engine) -> None:
    with pytest.raises(EngineError, match=rf"request r0.*expected.*context of {CONTEXT}"):
        engine.generate([request(0, new=CONTEXT)])
    assert len(engine.generate([request(0)])) == 1


def test_refusals_of_sglang_reach_the_caller(engine: Engine) -> None:
    with pytest.raises(EngineError, match="top_p"):
        engine.generate([request(0, top_p=1.5)])
    assert len(engine.generate([request(0)])) == 1


@pytest.mark.parametrize("which", ["engine", "engine_tp2"])
def test_rank_calls_reach_every_rank(which: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(which)
    replies = [json.loads(reply) for reply in engine.rank_call("identify", b"hello", timeout_s=60)]
    size = engine.spec.tensor_parallel
    assert replies == [{"tp_rank": rank, "tp_size": size, "echo": "hello"} for rank in range(size)]


def test_rank_call_errors_name_rank_and_cause(engine_tp2: Engine) -> None:
    with pytest.raises(EngineError, match=r"rank 0: EngineError: rank call 'nope'.*rank 1: .*nope"):
        engine_tp2.rank_call("nope", b"", timeout_s=60)
    with pytest.raises(EngineError, match="rank 1: UnicodeDecodeError"):
        engine_tp2.rank_call("identify", b"\xff", timeout_s=60)
    assert len(engine_tp2.rank_call("identify", b"", timeout_s=60)) == 2


def test_rank_call_while_generating(engine: Engine) -> None:
    want = tokens(engine.generate([request(i, new=100) for i in range(4)]))
    engine.flush()
    box: list[Trajectory] = []
    thread = threading.Thread(target=lambda: box.extend(engine.generate([request(i, new=100) for i in range(4)])))
    thread.start()
    while thread.is_alive():
        engine.rank_call("identify", b"", timeout_s=60)
    assert tokens(box) == want


def test_memory_comes_and_goes(engine: Engine) -> None:
    engine.release_memory()
    engine.resume_memory()


def test_memory_is_released_when_requests_have_ended_and_not_before(engine: Engine) -> None:
    """SGLang's scheduler asserts that it is idle, and dies of a release that comes too early."""
    batch, got = [request(i, new=CONTEXT - 20) for i in range(24)], list[Trajectory]()
    thread = threading.Thread(target=lambda: got.extend(engine.generate(batch)))
    thread.start()
    while engine.rank_call("flush", b"", timeout_s=60) == [b"flushed"] and thread.is_alive():
        pass  # not admitted yet
    if thread.is_alive():
        engine.abort()
        engine.release_memory()  # waits for the last moment of what was ended
    thread.join()
    engine.resume_memory()
    assert len(got) == len(batch)
    assert len(engine.generate([request(0)])) == 1


def test_memory_is_not_released_under_running_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(engine, "rank_call", lambda name, payload, timeout_s: [b""])  # never idle
    monkeypatch.setattr(engine, "_do", asked.append)
    with pytest.raises(EngineError, match="requests are still running"):
        engine.release_memory()
    assert asked == []


def test_bad_model_folder_is_an_error_at_once(make_spec: Callable[..., EngineSpec], tmp_path) -> None:  # type: ignore[no-untyped-def]
    started = time.monotonic()
    engine = Engine(make_spec(8, model_dir=str(tmp_path)))
    with pytest.raises(EngineError, match=r"(?s)did not start.*no config.json.*engine-8.log.*Traceback"):
        engine.wait_ready(300)
    assert time.monotonic() - started < 150
    assert not engine.alive
    engine.stop()
