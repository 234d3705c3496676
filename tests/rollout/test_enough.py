"""With `rollout.oversample` all ranks stop once they have completed enough groups together, whoever completes them."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import PreTrainedTokenizerBase

from specactor import samples
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.rollout import resume
from specactor.rollout.child_process import ChildDied
from specactor.rollout.collector import RolloutCollector
from specactor.rollout.grading import Grading
from specactor.rollout.resume import OpenGroup
from specactor.types import Problem, RolloutRequest, ScoredGroup, Trajectory
from tests.rollout.test_refill import Ready, collector

WORLD, WANT = 2, 6
STUCK = "0.3.1"  # the response that no engine ends by itself
LIMIT_S = 60.0


class Ungraded(Grading):
    """Nothing is scored: which groups are kept does not depend on it."""

    def __init__(self) -> None:
        super().__init__(timeout_s=60)

    def add(self, response: Trajectory, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> None: ...


class Meeting:
    """Where ranks that are threads exchange values."""

    def __init__(self) -> None:
        self.barrier, self.store = threading.Barrier(WORLD, timeout=60), HashStore()
        self.values: list[Any] = [None] * WORLD
        self.told: list[Any] = []


@dataclass
class Member:
    """A `Collective` of such a rank."""

    meeting: Meeting
    rank: int
    world: int = WORLD

    @property
    def store(self) -> Any:
        return self.meeting.store

    def gather(self, value: Any, _: object, *, only_first: bool = False) -> list[Any]:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait()
        found = list(self.meeting.values)
        self.meeting.told.append(value)
        self.meeting.barrier.wait()
        return found

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag, bool))

    def together(self, _: str, work: Callable[[], Any]) -> Any:
        found = work()
        self.any(False)
        return found


@dataclass
class Uneven(Ready):
    """It never ends one response, unless it is asked to."""

    dies_in: set[int] = field(default_factory=set)
    """Groups."""

    def generate(self, requests: Sequence[RolloutRequest], **options: Any) -> None:
        deadline = time.monotonic() + LIMIT_S
        for request in sorted(requests, key=lambda r: r.request_id == STUCK):
            if request.group_id in self.dies_in:
                self.alive = False
                raise ChildDied("died")
            while request.request_id == STUCK and request.request_id not in self.aborted:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            is_cut = request.request_id in self.aborted
            count = 2 if is_cut else request.sampling.max_new_tokens
            options["on_finished"](
                resume.whole(
                    request,
                    token_ids=[7] * count,
                    logprobs=[-1.0] * count,
                    finish_reason="abort" if is_cut else "length",
                    version=1,
                )
            )


def ranks(
    engines: Sequence[Uneven], folder: Path, *, partial: bool = False
) -> tuple[list[RolloutCollector], list[list[ScoredGroup]], Meeting]:
    """What each rank has after a step."""
    make_char_tokenizer(folder)
    meeting, tokenizer = Meeting(), load_tokenizer(folder)
    settings = {
        "algorithm__dynamic_sampling": "off",
        "algorithm__correction__level": "token",
        "rollout__oversample": "1.1",
        "rollout__partial": str(partial),
        "parallel__engines": str(WORLD),
    }
    found = [collector([engine], tokenizer, Ungraded(), **settings) for engine in engines]
    for rank, own in enumerate(found):
        own.collective = Member(meeting, rank)  # type: ignore[assignment]
    with ThreadPoolExecutor(WORLD) as threads:
        steps = [threads.submit(own.collect, 0) for own in found]
        return found, [step.result() for step in steps], meeting


def test_a_rank_without_slack_stops_when_others_have_completed_enough(tmp_path: Path) -> None:
    """Of seven groups the second rank has three, of which one takes for ever; the six others are enough."""
    own, found, meeting = ranks([Uneven(index=0), Uneven(index=1)], tmp_path)
    for groups in found:
        assert [g.trajectories[0].group_id for g in groups] == [0, 1, 2, 4, 5, 6]
        assert all(t.finish_reason == "length" for g in groups for t in g.trajectories)
    assert [len(rank.left) for rank in own] == [1, 1]
    assert meeting.store.num_keys() == 0


def test_what_was_complete_before_an_engine_died_counts(tmp_path: Path) -> None:
    """Of its three groups two are wanted, when it is back."""
    own, found, meeting = ranks([Uneven(index=0), Uneven(index=1, dies_in={1})], tmp_path)
    kept = [[t.request_id for g in groups for t in g.trajectories] for groups in found]
    assert kept[0] == kept[1]
    assert len(set(kept[0])) == 2 * WANT
    assert [len(rank.left) for rank in own] == [1, 1]
    assert meeting.store.num_keys() == 0


def open_requests(value: Any) -> list[RolloutRequest]:
    return [one for one in value if isinstance(one, RolloutRequest)] if isinstance(value, list) else []


@pytest.mark.parametrize("partial", [False, True])
def test_requests_that_were_stopped_travel_where_they_go_on(partial: bool, tmp_path: Path) -> None:
    """Else all know their length alone."""
    own, _, meeting = ranks([Uneven(index=0), Uneven(index=1)], tmp_path, partial=partial)
    assert [r.request_id for value in meeting.told for r in open_requests(value)] == [STUCK] * partial
    assert [rank.open_tokens for rank in own] == [2, 2]
    assert [len(rank.open_groups) for rank in own] == [partial] * WORLD


def test_a_digest_tells_open_groups_apart_without_lists_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same whichever rank has the responses, as after a resume."""

    def never(groups: object) -> object:
        raise AssertionError

    monkeypatch.setattr(resume, "state", never)
    own, _, _ = ranks([Uneven(index=0), Uneven(index=1)], tmp_path, partial=True)
    [theirs], [group] = own[0].open_groups, own[1].open_groups
    assert [samples.is_here(t) for g in (theirs, group) for t in g.finished.values()] == [False, True]
    with ThreadPoolExecutor(WORLD) as threads:
        together = list(threads.map(RolloutCollector.digest, own))
    assert together[1] == 0
    alone = collector([Ready()], own[0].tokenizer, Ungraded(), algorithm__dynamic_sampling="off")
    alone.prompts.restore(own[0].prompts.state())

    def digest_of(open_groups: list[OpenGroup]) -> int:
        alone.open_groups = open_groups
        return alone.digest()

    assert digest_of([group]) == together[0]
    [(name, finished)], [request] = group.finished.items(), group.pending
    assert request.begun is not None
    others = [
        [],
        [replace(group, problem=99)],
        [replace(group, finished={})],
        [replace(group, finished={name: replace(finished, logprobs=array("f", [-2.0] * len(finished.logprobs)))})],
        [replace(group, finished={name: replace(finished, token_ids=array("H", [8] * len(finished.token_ids)))})],
        [replace(group, finished={name: replace(finished, routed_experts=array("B", [1]))})],
        [group.after({}, {STUCK: replace(request, begun=replace(request.begun, token_ids=(7, 8)))})],
        [group.after({}, {STUCK: replace(request, begun=None)})],
    ]
    found = [digest_of(groups) for groups in ([group], *others)]
    assert len(set(found)) == len(found)


def test_rank_0_alone_makes_the_lists_of_a_checkpoint(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path)
    alone = collector(
        [Uneven()],
        load_tokenizer(tmp_path),
        Ungraded(),
        algorithm__dynamic_sampling="off",
        algorithm__correction__level="token",
        rollout__oversample="1.1",
        rollout__partial="True",
    )
    alone.collect(0)
    kept = cast("list[Any]", alone.state()["open_groups"])
    assert [list(group["finished"]) for group in kept] == [["0.3.0"]]
    alone.collective.rank = 1
    assert alone.state()["open_groups"] == []
