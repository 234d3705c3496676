"""A response in parts is the response: tokens, log-probabilities, spans, experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout import resume
from specactor.types import Begun, RolloutRequest, SamplingParams, Trajectory, VersionSpan

REQUEST = RolloutRequest(
    request_id="r",
    prompt_ids=(7, 8),
    sampling=SamplingParams(temperature=1.0, max_new_tokens=50),
    seed=1,
    group_id=0,
)


def in_parts(cuts: list[int], versions: list[int], *, with_experts: bool = True) -> Trajectory:
    """Tokens 0, 1, 2 .. with log-probabilities alike, cut after every count of `cuts`, each part at its version."""
    request, emitted = REQUEST, 0
    for i, (count, version) in enumerate(zip(cuts, versions, strict=True)):
        tokens = range(emitted, emitted + count)
        response = resume.whole(
            request,
            token_ids=list(tokens),
            logprobs=[-float(token) for token in tokens],
            finish_reason="stop" if i == len(cuts) - 1 else "abort",
            version=version,
            routed_experts=bytes(tokens) if with_experts else b"",
        )
        emitted += count
        request = resume.going_on(request, response)
        if emitted < 50:
            resume.check(request, with_experts=with_experts)
    return response


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=5), st.booleans())
def test_parts_make_the_whole(parts: list[tuple[int, int]], with_experts: bool) -> None:
    cuts, versions = [count for count, _ in parts], [version for _, version in parts]
    total = sum(cuts)
    response = in_parts(cuts, versions, with_experts=with_experts)
    assert response.token_ids == tuple(range(total))
    assert response.logprobs == tuple(-float(t) for t in range(total))
    assert response.routed_experts == (bytes(range(total)) if with_experts else b"")
    assert response.finish_reason == "stop"
    of_token = [version for count, version in parts for _ in range(count)]
    found = [span.version for span in response.spans for _ in range(span.start, span.end)]
    assert found == of_token
    ends = [0, *(span.end for span in response.spans)]
    assert [span.start for span in response.spans] == ends[:-1]
    neighbours = list(zip(response.spans, response.spans[1:], strict=False))
    assert all(one.version != other.version for one, other in neighbours)


def test_a_response_without_tokens_leaves_the_request_as_it_was() -> None:
    assert resume.going_on(REQUEST, in_parts([0], [3])) == REQUEST
    assert in_parts([0], [3]).spans == (VersionSpan(version=3, start=0, end=0),)


BEGUN = Begun(token_ids=(1, 2), logprobs=(-1.0, -2.0), spans=(VersionSpan(version=1, start=0, end=2),))


@pytest.mark.parametrize(
    ("begun", "message"),
    [
        (replace(BEGUN, logprobs=(-1.0,)), "2 tokens with 1 log-prob"),
        (replace(BEGUN, spans=()), "spans .* of 2 tokens"),
        (replace(BEGUN, spans=(VersionSpan(version=1, start=0, end=1),)), "spans .* of 2 tokens"),
        (
            Begun(token_ids=(1,) * 50, logprobs=(0.0,) * 50, spans=(VersionSpan(version=1, start=0, end=50),)),
            "50 tokens are the whole response",
        ),
    ],
)
def test_damaged_beginnings_are_refused(begun: Begun, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        resume.check(replace(REQUEST, begun=begun))


def test_experts_are_of_all_tokens_or_of_none() -> None:
    request = replace(REQUEST, begun=BEGUN)
    resume.check(request)
    with pytest.raises(AssertionError, match="no experts"):
        resume.check(request, with_experts=True)
    late = resume.whole(request, token_ids=[3], logprobs=[-3.0], finish_reason="stop", version=1, routed_experts=b"x")
    assert late.routed_experts == b""


def test_an_engine_is_told_the_tokens_alone() -> None:
    bare = resume.bare(replace(REQUEST, begun=BEGUN)).begun
    assert bare is not None
    assert (bare.token_ids, bare.logprobs, bare.spans) == ((1, 2), (), ())
    assert resume.bare(REQUEST) is REQUEST


def test_tokens_of_a_conversation_have_the_experts_that_they_were_sampled_from() -> None:
    """Of a later turn, which passes over all that came before, only what is new: also of the last token before it."""
    turns = [replace(REQUEST, prompt_ids=(7, 8)), replace(REQUEST, prompt_ids=(7, 8, 1, 2, 3, 9))]
    parts = [
        resume.whole(turn, token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", version=0, routed_experts=e)
        for turn, ids, e in zip(turns, ([1, 2, 3], [4, 5]), (b"abcd", b"ABCDefg"), strict=True)
    ]
    first = resume.heard(resume.nothing_of(turns[0]), parts[0])
    found = resume.heard(resume.said(first, (9,)), parts[1])
    assert found.routed_experts == b"abcdefg"
    assert len(found.routed_experts) == len(found.prompt_ids + found.token_ids) - 1
    assert found.loss_mask == (True, True, True, False, True, True)
