"""With `rollout.oversample` all ranks stop once they have completed enough groups together, whoever completes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.rollout import resume
from specactor.rollout.child_process import ChildDied
from specactor.rollout.collector import RolloutCollector
from specactor.rollout.grading import Grading
from specactor.types import RolloutRequest, ScoredGroup
from tests.rollout.test_refill import Ready, collector

WORLD, WANT = 2, 4
STUCK = "0.3.1"  # the response that no engine ends by itself
LIMIT_S = 5.0


@pytest.fixture(scope="module")
def grading() -> Iterator[Grading]:
    with Grading(timeout_s=60) as found:
        yield found


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
            count = 2 if request.request_id in self.aborted else request.sampling.max_new_tokens
            options["on_finished"](
                resume.whole(
                    request,
                    token_ids=[7] * count,
                    logprobs=[-1.0] * count,
                    finish_reason="abort" if request.request_id in self.aborted else "length",
                    version=1,
                )
            )


def ranks(
    engines: Sequence[Uneven], folder: Path, grading: Grading, *, partial: bool = False
) -> tuple[list[RolloutCollector], list[list[ScoredGroup]], Meeting]:
    """What each rank has after a step."""
    make_char_tokenizer(folder)
    meeting, tokenizer = Meeting(), load_tokenizer(folder)
    settings = {
        "algorithm__dynamic_sampling": "off",
        "algorithm__correction__level": "token",
        "rollout__prompts_per_step": str(WANT),
        "rollout__oversample": "1.25",
        "rollout__partial": str(partial),
        "parallel__engines": str(WORLD),
    }
    found = [collector([engine], tokenizer, grading, **settings) for engine in engines]
    for rank, own in enumerate(found):
        own.collective = Member(meeting, rank)  # type: ignore[assignment]
    with ThreadPoolExecutor(WORLD) as threads:
        steps = [threads.submit(own.collect, 0) for own in found]
        return found, [step.result() for step in steps], meeting


def test_a_rank_without_slack_stops_when_others_have_completed_enough(tmp_path: Path, grading: Grading) -> None:
    """Of five groups the second rank has two, of which one takes for ever; the four others are enough."""
    own, found, meeting = ranks([Uneven(index=0), Uneven(index=1)], tmp_path, grading)
    for groups in found:
        assert [g.trajectories[0].group_id for g in groups] == [0, 1, 2, 4]
        assert all(t.finish_reason == "length" for g in groups for t in g.trajectories)
    assert [len(rank.left) for rank in own] == [1, 1]
    assert meeting.store.num_keys() == 0


def test_what_was_complete_before_an_engine_died_counts(tmp_path: Path, grading: Grading) -> None:
    """Of its groups one is wanted, when it is back."""
    own, found, meeting = ranks([Uneven(index=0), Uneven(index=1, dies_in={1})], tmp_path, grading)
    kept = [[t.request_id for g in groups for t in g.trajectories] for groups in found]
    assert kept[0] == kept[1]
    assert len(set(kept[0])) == 2 * WANT
    assert [len(rank.left) for rank in own] == [1, 1]
    assert meeting.store.num_keys() == 0
