"""What drafter processes of tests draft with; they load it by import path."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specactor.rollout.decoupled.drafter_side import Lane
from specactor.rollout.decoupled.spec import DrafterSpec
from tests.rollout.decoupled.scripted import Scripted

if TYPE_CHECKING:
    from specactor.weights_sync.messages import DraftWeights


WAKE_S = 1.5


def scripted(spec: DrafterSpec) -> Scripted:
    return Scripted()


def broken(spec: DrafterSpec) -> Scripted:
    raise ValueError("no such weights")


def num_starts(spec: DrafterSpec) -> int:
    """Of a drafter with this log, which calls it in each."""
    with open(spec.log_file + ".starts", "a") as starts:
        starts.write("x")
        return starts.tell()


def full_twice(spec: DrafterSpec) -> Scripted:
    """Another process holds the device for its first two starts."""
    if num_starts(spec) < 3:
        raise RuntimeError("out of memory")
    return Scripted()


def refuses(spec: DrafterSpec) -> Scripted:
    num_starts(spec)
    raise ValueError("no such weights")


def deadly(spec: DrafterSpec) -> Scripted:
    os._exit(3)


def endless(spec: DrafterSpec) -> Scripted:
    time.sleep(300)
    return Scripted()


class Crashing(Scripted):
    """Starts well, and raises when it is asked."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        raise RuntimeError("a bug of the model")


class Sleeping(Scripted):
    """Takes `WAKE_S` to wake, and is asked for nothing while it sleeps."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.asleep = False

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        assert not self.asleep
        return super().extend(lanes)

    def sleep(self) -> None:
        assert not self.asleep
        assert not self.seen, "it was not told to forget"
        self.asleep = True

    def wake(self) -> None:
        assert self.asleep
        self.asleep = False
        time.sleep(WAKE_S)


class Unwakeable(Sleeping):
    """Its device has no room when it is woken."""

    def wake(self) -> None:
        raise MemoryError("no room")


class Slow(Sleeping):
    """Takes a while to start."""

    def __init__(self, spec: DrafterSpec) -> None:
        time.sleep(1.5)
        super().__init__(spec)


class Renewing(Scripted):
    """Has weights, of which it looks at the digests."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.version = 0

    def renew(self, weights: DraftWeights) -> str:
        from specactor.weights_sync import draft_push

        problem = draft_push.check(weights)
        self.version = self.version if problem else weights.draft_version
        return problem
