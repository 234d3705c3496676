"""Which requests an engine takes, and what it makes of its answers. No engine is started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specactor.config import EngineConfig, RolloutConfig
from specactor.errors import EngineError
from specactor.parallel.layout import ENGINE_RESERVED_TOKENS, reserved_tokens
from specactor.rollout.sglang import engine_client
from specactor.rollout.sglang.engine_protocol import EngineSpec, Finished, Ready
from specactor.types import Begun, RolloutRequest, SamplingParams, VersionSpan
from tests.lib.scripts import found_by

CONTEXT = 64
SPEC = EngineSpec(index=0, model_dir="m", dtype="float32", devices=(0,), context_length=CONTEXT, log_file="l")
REQUEST = RolloutRequest(
    request_id="r",
    prompt_ids=(1,) * 20,
    sampling=SamplingParams(temperature=1.0, max_new_tokens=8),
    seed=1,
    group_id=0,
)


def sglang_takes(given: int, new: int) -> bool:
    """The rule of SGLang 0.5.23: `max_req_input_len` in tp_worker.py with `validate_input_length` in utils.py; and all
    tokens are emitted, which `init_req_max_new_tokens` in scheduler.py cuts off silently."""
    max_req_len = CONTEXT - 1
    return given < max_req_len - 5 and new <= max_req_len - given - 1


def ready(spec: EngineSpec) -> Ready:
    return Ready(
        scheduler_pids=[],
        max_sequence_tokens=CONTEXT - spec.reserved_tokens,
        kv_tokens=10 * CONTEXT,
    )


def sequence(total: int, *, left: int, begun: bool) -> RolloutRequest:
    """Of `total` tokens when it ends, with `left` to be emitted: the others as a beginning, or as the prompt."""
    if not begun:
        sampling = replace(REQUEST.sampling, max_new_tokens=left)
        return replace(REQUEST, prompt_ids=(1,) * (total - left), sampling=sampling)
    new = total - len(REQUEST.prompt_ids)
    beginning = Begun(
        token_ids=(5,) * (new - left),
        logprobs=(-1.0,) * (new - left),
        spans=(VersionSpan(version=0, start=0, end=new - left),),
    )
    return replace(REQUEST, sampling=replace(REQUEST.sampling, max_new_tokens=new), begun=beginning)


def takes(request: RolloutRequest, spec: EngineSpec) -> bool:
    try:
        engine_client.check_servable([request], spec, ready(spec))
    except EngineError:
        return False
    return True


SEAM = RolloutConfig(oversample=1.5, partial=True)


def spec_of(rollout: RolloutConfig) -> EngineSpec:
    return replace(SPEC, reserved_tokens=reserved_tokens(rollout))


def test_what_may_begin_may_go_on_from_anywhere() -> None:
    """The longest sequence, ended after any of its tokens: an engine takes it again, and so does SGLang."""
    spec = spec_of(SEAM)
    longest = ready(spec).max_sequence_tokens
    whole = replace(REQUEST, sampling=replace(REQUEST.sampling, max_new_tokens=longest - len(REQUEST.prompt_ids)))
    assert takes(whole, spec)
    for left in range(1, whole.sampling.max_new_tokens):
        request = sequence(longest, left=left, begun=True)
        assert takes(request, spec), left
        assert sglang_takes(longest - left, left), left


def test_less_room_is_kept_where_nothing_goes_on() -> None:
    assert spec_of(RolloutConfig()).reserved_tokens == ENGINE_RESERVED_TOKENS
    assert spec_of(SEAM).reserved_tokens == 6


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("left", range(1, 8))
@pytest.mark.parametrize("total", range(CONTEXT - 8, CONTEXT + 1))
def test_an_engine_takes_what_sglang_takes(total: int, left: int, begun: bool) -> None:
    assert takes(sequence(total, left=left, begun=begun), SPEC) == sglang_takes(total - left, left)


def test_too_long_an_input_names_the_way_out() -> None:
    request = sequence(CONTEXT - 2, left=2, begun=True)
    with pytest.raises(
        EngineError, match=r"r: 60 tokens of prompt and beginning, expected <= 57: .*Shorten prompts by 3"
    ):
        engine_client.check_servable([request], SPEC, ready(SPEC))


def finished(reason: str, experts: bytes) -> Finished:
    return Finished(
        request=0,
        token_ids=[7, 8],
        logprobs=[-1.0, -2.0],
        finish_reason=reason,  # type: ignore[arg-type]
        routed_experts=experts,
    )


WITH_EXPERTS = replace(SPEC, config=EngineConfig(extra_args={"enable_return_routed_experts": True}))


def test_what_was_aborted_while_it_waited_has_nothing() -> None:
    response = engine_client.whole_response(REQUEST, finished("abort", b""), WITH_EXPERTS, 3)
    assert (response.token_ids, response.logprobs, response.finish_reason) == ((), (), "abort")
    assert engine_client.whole_response(REQUEST, finished("abort", b"e"), WITH_EXPERTS, 3).token_ids == (7, 8)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_finished_response_without_experts_is_an_error(reason: str) -> None:
    with pytest.raises(EngineError, match=f"ended with '{reason}' without routed experts"):
        engine_client.whole_response(REQUEST, finished(reason, b""), WITH_EXPERTS, 3)
    assert engine_client.whole_response(REQUEST, finished(reason, b""), SPEC, 3).token_ids == (7, 8)
    assert engine_client.whole_response(REQUEST, finished(reason, b"e"), WITH_EXPERTS, 3).token_ids == (7, 8)


def test_one_look_at_a_round_ends_a_response_where_looks_at_every_token_do() -> None:
    """Requests of SGLang with stop strings of whole and half characters, stop tokens, lengths and beginnings. One look
    serves tokenizers whose texts are joined of their tokens' ones; half a character may be another's half later."""
    found = found_by("tests.rollout.sglang.stop_cases")
    differ = found["differ"]
    assert [differ.pop(f"{kind}, ours") for kind in ("bytes", "joined", "other")] == [0, 0, 0]
    assert differ.pop("joined, one look") == 0
    assert min(differ.values()) > 0, "every wrong version is noticed"
    assert found["decoded"] == {"bytes": 1, "joined": 1, "other": 8}
    # A stop string in other tokens than its usual ones ends plain and longer rounds alike.
    assert found["spelled"].pop("ours") == [5, 5, 5, 5, 3, 3]
    assert None in found["spelled"]["usual length"]
