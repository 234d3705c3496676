"""A response that is generated in parts: on several engines, or in several steps. PURE.

Invariants: a response has one log-probability per token, spans that cover it without gap or overlap, and the experts
of all its tokens or of none; what goes on from a beginning has that beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specactor.errors import EngineError
from specactor.types import Begun, FinishReason, RolloutRequest, Trajectory, VersionSpan


def num_begun(request: RolloutRequest) -> int:
    return len(request.begun.token_ids) if request.begun else 0


def bare(request: RolloutRequest) -> RolloutRequest:
    """Return what an engine needs of the request: of the beginning, the tokens."""
    if request.begun is None:
        return request
    return replace(request, begun=Begun(token_ids=request.begun.token_ids, logprobs=(), spans=()))


def check(request: RolloutRequest, *, with_experts: bool = False) -> None:
    """Raise EngineError for a beginning that is damaged, or a whole response, or lacks the experts of its tokens."""
    begun = request.begun
    if begun is None:
        return
    count = len(begun.token_ids)
    ends = [0, *(span.end for span in begun.spans)]
    starts = [*(span.start for span in begun.spans), count]
    if len(begun.logprobs) != count or starts != ends:
        raise EngineError(
            f"request {request.request_id}: a beginning of {count} tokens with {len(begun.logprobs)} log-probabilities "
            f"and spans {[(span.start, span.end) for span in begun.spans]}, expected one log-probability per token and "
            f"spans that cover 0..{count}. Leave out RolloutRequest.begun to generate the response anew."
        )
    if with_experts and count and not begun.routed_experts:
        raise EngineError(
            f"request {request.request_id}: a beginning without routed experts, expected them with "
            "enable_return_routed_experts. Leave out RolloutRequest.begun to generate the response anew."
        )
    if count >= request.sampling.max_new_tokens:
        raise EngineError(
            f"request {request.request_id}: a beginning of {count} tokens, expected fewer than max_new_tokens = "
            f"{request.sampling.max_new_tokens}. The response is finished."
        )


def whole(
    request: RolloutRequest,
    *,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: FinishReason,
    version: int,
    routed_experts: bytes = b"",
) -> Trajectory:
    """Return the response with its beginning, if any, and what an engine emitted now, at this version."""
    begun = request.begun or Begun(token_ids=(), logprobs=(), spans=())
    start, end = len(begun.token_ids), len(begun.token_ids) + len(token_ids)
    has_all = bool(begun.routed_experts) or not begun.token_ids
    return Trajectory(
        request_id=request.request_id,
        group_id=request.group_id,
        prompt_ids=request.prompt_ids,
        token_ids=begun.token_ids + tuple(token_ids),
        logprobs=begun.logprobs + tuple(logprobs),
        finish_reason=finish_reason,
        spans=joined((*begun.spans, VersionSpan(version=version, start=start, end=end))),
        seed=request.seed,
        routed_experts=begun.routed_experts + routed_experts if has_all else b"",
    )


def going_on(request: RolloutRequest, response: Trajectory) -> RolloutRequest:
    """Return `request`, to be gone on with from what there is of its response.

    Noise is keyed by seed and position, so the tokens are those of one engine, up to rounding: the beginning's keys
    come from a prefill now, so log-probabilities may differ by 1e-5 in float32, and nearly tied tokens.
    """
    if not response.token_ids:
        return request
    spans = tuple(span for span in response.spans if span.end > span.start)
    return replace(
        request,
        begun=Begun(
            token_ids=tuple(response.token_ids),
            logprobs=tuple(response.logprobs),
            spans=spans,
            routed_experts=bytes(response.routed_experts),
        ),
    )


def stale_tokens(response: Trajectory, version: int) -> int:
    """Count the tokens, the first ones, that policies before `version` sampled."""
    return sum(span.end - span.start for span in response.spans if span.version != version)


def joined(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Join neighbours of one version; of a response without tokens one empty span is left."""
    found: list[VersionSpan] = []
    for span in spans:
        if found and (found[-1].version == span.version or span.start == span.end):
            found[-1] = replace(found[-1], end=span.end)
        else:
            found.append(span)
    return tuple(found)
