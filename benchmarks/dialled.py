"""Drafters of known acceptance and cost: they know what the target will emit, and are wrong as often as they are told.

One serves in the engine (`InEngine`), one in a drafter process (`Elsewhere`); both read the `Script` that the
environment variable SCRIPT, or the drafter's `model_dir`, names. A step computes nothing and takes its time on the
processor, as a model would.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Sequence
from pathlib import Path

import msgspec
import xxhash

from specactor.rollout.decoupled.continuer import Lane
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.speculation.drafter import Drafter, DraftSequence

SCRIPT = "SPECACTOR_BENCHMARK_SCRIPT"


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialled drafter knows."""

    acceptance: float  # P(a draft token is right | those before it are)
    step_s: list[float]  # seconds of one token for 1, 2, .. requests; more cost as many times as the last
    outputs: dict[str, list[int]]  # by the request's seed

    @classmethod
    def read(cls, path: str) -> Script:
        return msgspec.json.decode(Path(path).read_bytes(), type=cls)

    def next_token(self, seed: int, position: int, before: int) -> int:
        """At this output position, after the token `before`; wrong if that is wrong already."""
        right = self.outputs[str(seed)]
        if position >= len(right):
            return 0
        on_track = position == 0 or before == right[position - 1]
        return right[position] if on_track and self._coin(seed, position) else (right[position] + 1) % 16

    def rate(self) -> float:
        """Share of all positions but the first where it is right after a right token."""
        coins = [self._coin(int(seed), at) for seed, right in self.outputs.items() for at in range(1, len(right))]
        return sum(coins) / len(coins) if coins else self.acceptance

    def _coin(self, seed: int, position: int) -> bool:
        return xxhash.xxh32_intdigest(f"{seed}:{position}".encode()) / 2**32 < self.acceptance

    def spend(self, requests: int) -> None:
        """The time of one step."""
        known = len(self.step_s)
        seconds = self.step_s[min(requests, known) - 1] * max(1.0, requests / known)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass


class InEngine(Drafter):
    """Drafts on the engine's device, after windows were chosen."""

    name = "dialled"
    drafts_first = False

    def __init__(self) -> None:
        self._script = Script.read(os.environ[SCRIPT])

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        for depth in range(max(windows)):
            wanting = [i for i, window in enumerate(windows) if window > depth]
            self._script.spend(len(wanting))
            for i in wanting:
                output = sequences[i].output_ids
                before = drafts[i][-1] if drafts[i] else output[-1]
                drafts[i].append(self._script.next_token(sequences[i].seed, len(output) + depth, before))
        return drafts


class Elsewhere:
    """The same as the continuer of a drafter process."""

    version = 0

    def __init__(self, spec: DrafterSpec) -> None:
        self._script = Script.read(spec.model_dir)

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        self._script.spend(len(lanes))
        return [
            [self._script.next_token(lane.seed, len(lane.tokens), lane.tokens[-1] if lane.tokens else -1)]
            for lane in lanes
        ]

    def forget(self, key: Hashable) -> None:
        pass
