"""Whether an engine can serve a request, and what it says of one as a trajectory."""

from __future__ import annotations

from collections.abc import Sequence

from specactor.errors import EngineError
from specactor.parallel.layout import ENGINE_RESERVED_OF_INPUT
from specactor.rollout import resume
from specactor.rollout.sglang.engine_protocol import EngineSpec, Finished, News, Ready
from specactor.types import RolloutRequest, Trajectory

Parts = dict[int, tuple[list[int], list[float]]]
"""Tokens and log-probabilities that were reported of the requests of a call."""


def check(requests: Sequence[RolloutRequest], spec: EngineSpec, ready: Ready) -> None:
    """Raises EngineError for a request that is too long, or that goes on from a beginning that cannot be."""
    limit = ready.max_sequence_tokens
    for request in requests:
        resume.check(request, with_experts=spec.config.routed_experts)
        prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens
        if not 1 <= prompt <= limit - new:
            raise EngineError(
                f"request {request.request_id}: prompt of {prompt} tokens and rollout.max_new_tokens = {new}, "
                f"expected 1 <= prompt <= {limit} - max_new_tokens: engine {spec.index} has a context of "
                f"{spec.context_length} and a KV pool of {ready.kv_tokens} tokens. Shorten one of them, "
                "or raise rollout.engine.max_total_tokens."
            )
        given = prompt + resume.num_begun(request)
        longest = limit + spec.reserved_tokens - ENGINE_RESERVED_OF_INPUT
        if given > longest:
            raise EngineError(
                f"request {request.request_id}: {given} tokens of prompt and beginning, expected <= {longest}: SGLang "
                f"takes no longer input on engine {spec.index}, however few tokens are to follow. Shorten prompts by "
                f"{given - longest}, or raise rollout.engine.max_total_tokens."
            )


def finished(request: RolloutRequest, message: Finished, spec: EngineSpec, version: int) -> Trajectory:
    """The whole response; `version` of the weights that the engine holds.

    One that was aborted while it waited is empty where experts are wanted: nobody can say by now which experts computed
    what it had emitted. Raises EngineError for any other response without them.
    """
    dropped = spec.config.routed_experts and bool(message.token_ids) and not message.routed_experts
    if dropped and message.finish_reason != "abort":
        raise EngineError(
            f"request {request.request_id}: a response of {len(message.token_ids)} tokens that ended with "
            f"{message.finish_reason!r} without routed experts, expected those of every token with "
            "enable_return_routed_experts. Engine and SGLang disagree: check its version with specactor doctor."
        )
    return resume.whole(
        request,
        token_ids=() if dropped else message.token_ids,
        logprobs=() if dropped else message.logprobs,
        finish_reason=message.finish_reason,
        version=version,
        routed_experts=message.routed_experts,
    )


def so_far(request: RolloutRequest, news: News, parts: Parts, version: int) -> Trajectory:
    """What a running request has, without its experts; adds the news to `parts`."""
    tokens, logprobs = parts.setdefault(news.request, ([], []))
    tokens += news.token_ids
    logprobs += news.logprobs
    return resume.whole(request, token_ids=tokens, logprobs=logprobs, finish_reason="abort", version=version)
