"""Over steps that stop at any time: every group is learned from once, whole, and with the seeds that it began with."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.config import RolloutConfig
from specactor.errors import CheckpointError
from specactor.rollout import resume
from specactor.rollout.collector import RolloutCollector
from specactor.rollout.requests import sampling_of
from specactor.rollout.resume import OpenGroup, going_on, whole
from specactor.samples import packed
from specactor.types import RolloutRequest, SamplingParams, Trajectory

SIZE = 2


def make_requests(step: int, groups: int) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            request_id=f"{step}.{group}.{sample}",
            prompt_ids=(1, 2),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=10),
            seed=100 * step + 10 * group + sample,
            group_id=group,
        )
        for group in range(groups)
        for sample in range(SIZE)
    ]


def respond(request: RolloutRequest, tokens: int, version: int, *, ends: bool) -> Trajectory:
    return whole(
        request,
        token_ids=[5] * tokens,
        logprobs=[-0.5] * tokens,
        finish_reason="stop" if ends else "abort",
        version=version,
        routed_experts=bytes(tokens),
    )


def roll_out(
    groups: list[OpenGroup], want: int, version: int, chance: random.Random
) -> tuple[dict[str, Trajectory], dict[str, RolloutRequest]]:
    """Any `want` groups or more become complete, and any requests of the others."""
    complete = [i for i, group in enumerate(groups) if group.complete]
    others = [i for i in range(len(groups)) if i not in complete]
    ending = set(complete) | set(chance.sample(others, max(0, want - len(complete))))
    found, stopped = {}, {}
    for i, group in enumerate(groups):
        for request in group.pending:
            if i in ending or chance.random() < 0.3:
                found[request.request_id] = respond(request, 2, version, ends=True)
            else:
                stopped[request.request_id] = going_on(request, respond(request, 1, version, ends=False))
    return found, stopped


@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(1.0, 3.0))
def test_steps(seed: int, want: int, oversample: float) -> None:
    chance = random.Random(seed)
    in_flight = resume.num_in_flight(want, oversample)
    assert want <= in_flight <= want * oversample + 1
    carried: list[OpenGroup] = []
    asked = learned = 0
    seen: set[str] = set()
    for step in range(4):
        fresh = in_flight - len(carried)
        problems = list(range(asked, asked + fresh))
        asked += fresh
        groups = resume.opened(carried, problems, make_requests(step, fresh))
        assert [r.group_id for group in groups for r in group.requests] == [
            i for i in range(in_flight) for _ in range(SIZE)
        ]
        found, stopped = roll_out(groups, want, step, chance)
        kept, carried = resume.settled([group.after(found, stopped) for group in groups], want)
        carried = resume.restored(json.loads(json.dumps(resume.state(carried))), group_size=SIZE)
        assert len(kept) == want
        for group in kept:
            for request, response in zip(group.requests, group.trajectories, strict=True):
                assert response.request_id == request.request_id
                assert request.request_id not in seen
                seen.add(request.request_id)
                begun_in, of_group, sample = map(int, request.request_id.split("."))
                assert request.seed == 100 * begun_in + 10 * of_group + sample
                assert response.spans[-1].version <= step
                assert len(response.logprobs) == len(response.token_ids) == len(response.routed_experts)
        learned += want
    assert asked == learned + len(carried), "no group is lost"


def test_a_wrong_version_forgets_what_was_begun() -> None:
    """Then the tokens of a step would be sampled again: the state of a checkpoint would not tell."""
    [request] = make_requests(0, 1)[:1]
    begun = going_on(request, respond(request, 3, 0, ends=False))
    [group] = resume.opened([], [7], [begun])
    [back] = resume.restored(json.loads(json.dumps(resume.state([group]))), group_size=1)
    assert back == group
    assert back != replace(group, requests=(request,))


def resumed(
    rollout: RolloutConfig, groups: list[OpenGroup], *, replay: str = "off"
) -> tuple[list[OpenGroup], list[str]]:
    """Return what a run goes on with, and what it tells."""
    run, notes = object.__new__(RolloutCollector), list[str]()
    run.config = cast("Any", SimpleNamespace(rollout=rollout, train=SimpleNamespace(routing_replay=replay)))
    run.progress = cast("Any", SimpleNamespace(note=notes.append))
    run.prompts = cast("Any", SimpleNamespace(restore=lambda state: None))
    run.train_data = cast("Any", SimpleNamespace(content="the same"))
    run.restore({"prompts": None, "open_groups": json.loads(json.dumps(resume.state(groups)))})
    return run.open_groups, notes


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, None),
        ({"temperature": 0.5}, "rollout.temperature 1.0"),
        ({"stop": ("x",)}, "rollout.stop ()"),
        ({"max_new_tokens": 6, "top_p": 0.9}, "rollout.max_new_tokens 10, rollout.top_p 1.0"),
    ],
)
def test_groups_of_other_settings_are_begun_again(settings: dict[str, Any], told: str | None) -> None:
    """With the run's settings, and their own seeds; they would be longer than the run allows, or sampled otherwise."""
    requests = make_requests(0, 2)
    finished, begun = (
        respond(requests[0], 8, 0, ends=True),
        going_on(requests[1], respond(requests[1], 7, 0, ends=False)),
    )
    groups = resume.opened([], [7, 8], [requests[0], begun, *requests[2:]])
    groups = [group.after({finished.request_id: replace(finished, reward=1.0)}, {}) for group in groups]
    rollout = RolloutConfig(group_size=SIZE, oversample=2, partial=True, **{"max_new_tokens": 10} | settings)
    back, notes = resumed(rollout, groups)
    if told is None:
        assert (back[0].requests, len(back[0].finished), notes) == (groups[0].requests, 1, [])
        return
    fresh = [replace(request, sampling=sampling_of(rollout)) for request in requests]
    assert back == resume.opened([], [7, 8], fresh)
    assert notes == [f"open groups of other settings are begun again: {told}"]


@pytest.mark.parametrize("replay", ["r3", "off"])
@pytest.mark.parametrize("are_packed", [True, False])
@pytest.mark.parametrize("lacking", [None, "begun", "finished"])
def test_groups_without_the_experts_that_a_resume_replays_are_begun_again(
    lacking: str | None, are_packed: bool, replay: str
) -> None:
    """Their steps would fail, hours later; the other group goes on."""
    requests = make_requests(0, 2)
    begun = going_on(requests[0], respond(requests[0], 7, 0, ends=False))
    finished = respond(requests[1], 8, 0, ends=True)
    other = going_on(requests[2], respond(requests[2], 3, 0, ends=False))
    if lacking == "begun":
        assert begun.begun is not None
        begun = replace(begun, begun=replace(begun.begun, routed_experts=b""))
    if lacking == "finished":
        finished = replace(finished, routed_experts=b"")
    groups = resume.opened([], [7, 8], [begun, requests[1], other, requests[3]])
    groups = [g.after({finished.request_id: packed(finished) if are_packed else finished}, {}) for g in groups]
    rollout = RolloutConfig(group_size=SIZE, oversample=2, partial=True, max_new_tokens=10)
    groups = [replace(g, requests=tuple(replace(r, sampling=sampling_of(rollout)) for r in g.requests)) for g in groups]
    back, notes = resumed(rollout, groups, replay=replay)
    begins_again = replay == "r3" and lacking is not None
    kept = [sum(r.begun is not None for r in group.requests) + len(group.finished) for group in back]
    assert kept == ([0, 1] if begins_again else [2, 1])
    told = ["open groups of other settings are begun again: train.routing_replay other than r3"]
    assert notes == (told if begins_again else [])


def test_a_damaged_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="open groups"):
        resume.restored([{"problem": "x"}], group_size=SIZE)
    groups = resume.opened([], [7], make_requests(0, 1))
    with pytest.raises(CheckpointError, match=r"rollout\.group_size: got 5, expected 2"):
        resume.restored(resume.state(groups), group_size=5)


def test_responses_in_arrays_come_back_from_a_checkpoint() -> None:
    [request, _] = make_requests(0, 1)
    kept = packed(respond(request, 2, 0, ends=True))
    group = OpenGroup(problem=0, requests=(request,), finished={request.request_id: kept})
    [back] = resume.restored(json.loads(json.dumps(resume.state([group]))), group_size=1)
    assert packed(back.finished[request.request_id]) == kept
