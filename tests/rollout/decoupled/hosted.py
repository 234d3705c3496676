"""What drafter processes of tests draft with; they load it by import path."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from specactor.rollout.decoupled.continuer import Lane
from specactor.rollout.decoupled.spec import DrafterSpec
from tests.rollout.decoupled.scripted import Scripted


def scripted(spec: DrafterSpec) -> Scripted:
    return Scripted()


def broken(spec: DrafterSpec) -> Scripted:
    raise RuntimeError("no such weights")


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
