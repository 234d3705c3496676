"""Responses generated in two parts, the second from where the first was cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from specactor.rollout.resume import going_on
from specactor.types import Begun, RolloutRequest, Trajectory, VersionSpan

T = TypeVar("T")
Generate = Callable[[Sequence[RolloutRequest]], list[Trajectory]]


def cut(requests: Sequence[RolloutRequest], lengths: Sequence[int]) -> list[RolloutRequest]:
    """They end after so many tokens."""
    return [
        replace(r, sampling=replace(r.sampling, max_new_tokens=length))
        for r, length in zip(requests, lengths, strict=True)
    ]


def in_two(
    generate: Generate, requests: Sequence[RolloutRequest], expected: Sequence[Trajectory], *, late: bool
) -> list[Trajectory]:
    """The seam is before the last token of each response, or at one place after the other. Leaves out those of one
    token, which have no seam: so does `with_seam`."""
    some = with_seam(requests, expected)
    lengths = [len(t.token_ids) for t in with_seam(expected, expected)]
    cuts = [n - 1 if late else 1 + 5 * i % (n - 1) for i, n in enumerate(lengths)]
    firsts = generate(cut(some, cuts))
    assert [len(t.token_ids) for t in firsts] == cuts
    return generate([going_on(request, first) for request, first in zip(some, firsts, strict=True)])


def with_seam(items: Sequence[T], expected: Sequence[Trajectory]) -> list[T]:
    return [item for item, t in zip(items, expected, strict=True) if len(t.token_ids) > 1]


def without_the_seam_token(request: RolloutRequest, first: Trajectory) -> RolloutRequest:
    """A wrong version: the engine never sees the last token of the first part."""
    tokens = first.token_ids[:-1]
    num_rows = len(request.prompt_ids) + len(tokens)
    return replace(
        request,
        begun=Begun(
            token_ids=tokens,
            logprobs=first.logprobs[:-1],
            spans=(VersionSpan(version=0, start=0, end=len(tokens)),),
            routed_experts=first.routed_experts[: len(first.routed_experts) * (num_rows - 1) // num_rows],
        ),
    )
