"""Responses generated in parts, and groups over several steps. PURE.

Invariants: a response has one log-probability per token, spans without gap or overlap, and experts of all tokens or
none; a resumed one keeps tokens, id and seed; a step learns from `want` whole groups, from each at most once, with
`partial` exactly once unless the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from specactor.errors import CheckpointError
from specactor.types import Begun, FinishReason, RolloutRequest, SamplingParams, Trajectory, VersionSpan


def num_begun(request: RolloutRequest) -> int:
    return len(request.begun.token_ids) if request.begun else 0


def bare(request: RolloutRequest) -> RolloutRequest:
    """Leave out what an engine does not need."""
    if request.begun is None:
        return request
    return replace(request, begun=Begun(token_ids=request.begun.token_ids, logprobs=(), spans=()))


def check(request: RolloutRequest, *, with_experts: bool = False) -> None:
    """Assert that a `begun` is undamaged, has experts where they are wanted, and is not the whole response."""
    if (begun := request.begun) is None:
        return
    name, count = request.request_id, len(begun.token_ids)
    ends, starts = [0, *(s.end for s in begun.spans)], [*(s.start for s in begun.spans), count]
    assert len(begun.logprobs) == count, f"{name}: {count} tokens with {len(begun.logprobs)} log-probabilities"
    assert starts == ends, f"{name}: spans {begun.spans} of {count} tokens"
    assert begun.routed_experts or not (with_experts and count), f"{name}: no experts"
    assert count < request.sampling.max_new_tokens, f"{name}: {count} tokens are the whole response"


def whole(
    request: RolloutRequest,
    *,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: FinishReason,
    version: int,
    routed_experts: bytes = b"",
) -> Trajectory:
    """Append what an engine generated to what had begun."""
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
    """Return the request for what follows `response`. Its tokens are those of an uninterrupted run, but for rounding:
    keys from a prefill move float32 log-probabilities by up to 1e-5."""
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


def nothing_of(request: RolloutRequest) -> Trajectory:
    return Trajectory(
        request_id=request.request_id,
        group_id=request.group_id,
        prompt_ids=request.prompt_ids,
        token_ids=(),
        logprobs=(),
        finish_reason="stop",
        spans=(),
        seed=request.seed,
    )


def heard(before: Trajectory, turn: Trajectory) -> Trajectory:
    """Return a conversation after what was sampled in a turn, with its experts."""
    start, experts = len(before.token_ids), cast("bytes", before.routed_experts)  # as engines give them
    spans = [replace(s, start=s.start + start, end=s.end + start) for s in turn.spans]
    return replace(
        before,
        token_ids=(*before.token_ids, *turn.token_ids),
        logprobs=(*before.logprobs, *turn.logprobs),
        finish_reason=turn.finish_reason,
        spans=joined((*before.spans, *spans)),
        loss_mask=(*before.loss_mask, *[True] * len(turn.token_ids)),
        routed_experts=experts + cast("bytes", turn.routed_experts)[len(experts) :],
    )


def said(before: Trajectory, ids: tuple[int, ...]) -> Trajectory:
    """Return a conversation after tokens of its environment, which are not learned from."""
    if not ids:
        return before
    start = len(before.token_ids)
    span = VersionSpan(version=before.spans[-1].version, start=start, end=start + len(ids))
    return replace(
        before,
        token_ids=(*before.token_ids, *ids),
        logprobs=(*before.logprobs, *(0.0 for _ in ids)),
        spans=joined((*before.spans, span)),
        loss_mask=(*before.loss_mask, *[False] * len(ids)),
    )


def stale_tokens(response: Trajectory, version: int) -> int:
    """Count the tokens that earlier policies sampled."""
    return sum(span.end - span.start for span in response.spans if span.version != version)


def joined(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Join neighbours of one version; an empty response keeps one span."""
    found: list[VersionSpan] = []
    for span in spans:
        if found and (found[-1].version == span.version or span.start == span.end):
            found[-1] = replace(found[-1], end=span.end)
        else:
            found.append(span)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class OpenGroup:
    problem: int
    requests: tuple[RolloutRequest, ...]
    finished: dict[str, Trajectory]  # by request id

    @property
    def complete(self) -> bool:
        return len(self.finished) == len(self.requests)

    @property
    def pending(self) -> list[RolloutRequest]:
        return [request for request in self.requests if request.request_id not in self.finished]

    @property
    def trajectories(self) -> list[Trajectory]:
        """Return a complete group's responses, in the order of its requests."""
        return [self.finished[request.request_id] for request in self.requests]

    def numbered(self, group_id: int) -> OpenGroup:
        return replace(self, requests=tuple(replace(request, group_id=group_id) for request in self.requests))

    def after(self, found: Mapping[str, Trajectory], stopped: Mapping[str, RolloutRequest]) -> OpenGroup:
        own = {r.request_id: found[r.request_id] for r in self.requests if r.request_id in found}
        requests = tuple(stopped.get(request.request_id, request) for request in self.requests)
        return replace(self, requests=requests, finished=self.finished | own)


def num_in_flight(want: int, oversample: float) -> int:
    """Return how many groups a step works at, to learn from `want`."""
    return math.ceil(want * oversample - 1e-9)


def opened(
    carried: Sequence[OpenGroup], problems: Sequence[int], requests: Sequence[RolloutRequest]
) -> list[OpenGroup]:
    """Return a step's groups, numbered anew, carried ones first; `requests` are the new ones, by group."""
    size = len(requests) // len(problems) if problems else 0
    fresh = [
        OpenGroup(problem=problem, requests=tuple(requests[i * size : (i + 1) * size]), finished={})
        for i, problem in enumerate(problems)
    ]
    return [group.numbered(i) for i, group in enumerate([*carried, *fresh])]


def settled(groups: Sequence[OpenGroup], want: int) -> tuple[list[OpenGroup], list[OpenGroup]]:
    """Return (the first `want` complete groups, the others)."""
    kept = [i for i, group in enumerate(groups) if group.complete][:want]
    return [groups[i] for i in kept], [group for i, group in enumerate(groups) if i not in set(kept)]


def encoded(part: object) -> bytes:
    """Return bytes for a digest of a group's part, without making lists of arrays."""
    return msgspec.msgpack.encode(part, enc_hook=memoryview, order="deterministic")


def state(groups: Sequence[OpenGroup]) -> object:
    return msgspec.to_builtins(list(groups), enc_hook=list)  # arrays


def restored(state: object, *, group_size: int) -> list[OpenGroup]:
    """Restore a `state`. Raises CheckpointError for none, or another group size."""
    try:
        groups = msgspec.convert(state, list[OpenGroup])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"open groups: {error}. Resume from another checkpoint.") from error
    sizes = {len(group.requests) for group in groups} - {group_size}
    if sizes:
        raise CheckpointError(
            f"open groups: rollout.group_size: got {group_size}, expected {sizes.pop()}, as when they were begun. "
            "Resume with the size that the run started with."
        )
    return groups


def begun_again(
    groups: Sequence[OpenGroup], sampling: SamplingParams, *, with_experts: bool
) -> tuple[list[OpenGroup], list[str]]:
    """Return the groups, without what was sampled of those that were begun with other settings, or lack experts that
    are wanted, and these settings."""
    found, others = list[OpenGroup](), set[str]()
    for group in groups:
        began = {request.sampling for request in group.requests} - {sampling}
        others |= {f"rollout.{k} {v!r}" for of in began for k, v in vars(of).items() if v != getattr(sampling, k)}
        parts = [*(request.begun for request in group.requests), *group.finished.values()]
        if lacks := with_experts and any(p and len(p.token_ids) and not len(p.routed_experts) for p in parts):
            others.add("train.routing_replay other than r3")
        requests = tuple(replace(request, sampling=sampling, begun=None) for request in group.requests)
        found.append(replace(group, requests=requests, finished={}) if began or lacks else group)
    return found, sorted(others)
