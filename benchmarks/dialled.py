"""Drafters of known acceptance and cost: they know what the target will emit, and are wrong as often as they are told.

Two serve in the engine (`InEngine`, and `Text`, which errs elsewhere and costs nothing), one in a drafter process
(`Elsewhere`); all read the `Script` that the environment variable SCRIPT, or the drafter's `model_dir`, names. A step
computes nothing and takes its time on the processor, as a model would, or asleep, as a device would that the processor
waits for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from specactor.rollout.decoupled.drafter_side import Continuer, Lane
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.speculation.drafter import Drafter, DraftSequence

SCRIPT = "SPECACTOR_BENCHMARK_SCRIPT"
IN_ENGINE = "benchmarks.dialled:InEngine"
_spent_s = 0.0


def take_spent_s() -> float:
    """Seconds of steps in this process since the last call."""
    global _spent_s
    taken, _spent_s = _spent_s, 0.0
    return taken


class Plan(NamedTuple):
    """First choices of one request, looked up: what a benchmark measures is not its drafter."""

    right: list[int]
    wrong: list[int]
    """First choices after a wrong token."""
    stops: list[int]
    """By position, the first from there on where the first choice is wrong."""

    def draft(self, output: Sequence[int], window: int) -> list[int]:
        """Return what `Script.next_token` gives one by one."""
        start, end = len(output), len(output) + window
        if start >= len(self.right):
            return [0] * window
        follows = not start or output[-1] == self.right[start - 1]
        stop = min(self.stops[start], end) if follows else start
        draft = self.right[start:stop] + self.wrong[stop:end]
        return draft + [0] * (window - len(draft))


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialled drafter knows."""

    acceptance: float  # P(a draft token is right | those before it are), mean over requests
    spread: float = 0.0  # a request's own is up to this much more or less
    runner_up: float = 0.0  # P(the second choice is right | the first is wrong, and those before it right)
    text: float = 0.5  # the acceptance of the drafter over text
    text_spread: float = 0.4
    coins: str = ""  # drafters with other coins err elsewhere
    sleeps: bool = False
    step_s: list[float]  # seconds of one token for 1, 2, .. requests; more cost as many times as the last
    outputs: dict[str, list[int]]  # by the request's seed

    @classmethod
    def read(cls, path: str) -> Script:
        return msgspec.json.decode(Path(path).read_bytes(), type=cls)

    def next_token(self, seed: int, position: int, before: int) -> int:
        """At this output position, after the token `before`; wrong if that is wrong already."""
        return self.choices(seed, position, before)[0]

    def choices(self, seed: int, position: int, before: int) -> tuple[int, int]:
        """The first and the second choice."""
        right = self.outputs[str(seed)]
        if position >= len(right):
            return 0, 1
        token = right[position]
        wrong = (token + 1) % 16, (token + 2) % 16
        if position and before != right[position - 1]:
            return wrong
        coin, own = self._coin(seed, position), self.own(seed)
        if coin < own:
            return token, wrong[0]
        return wrong[0], token if coin < own + (1.0 - own) * self.runner_up else wrong[1]

    def plan(self, seed: int) -> Plan:
        right = self.outputs[str(seed)]
        stop, stops = len(right), [len(right)] * len(right)
        for at in range(len(right) - 1, -1, -1):
            stop = stops[at] = stop if self.is_right(seed, at) else at
        return Plan(right, [(token + 1) % 16 for token in right], stops)

    def rate(self) -> float:
        """Share of all positions but the first where it is right after a right token."""
        coins = [self.is_right(int(seed), at) for seed, right in self.outputs.items() for at in range(1, len(right))]
        return sum(coins) / len(coins) if coins else self.acceptance

    def is_right(self, seed: int, position: int) -> bool:
        """Whether the first choice is right there, if those before it are."""
        return self._coin(seed, position) < self.own(seed)

    def own(self, seed: int) -> float:
        """The acceptance of one request."""
        return self.acceptance + self.spread * (2.0 * self._coin(seed, -1) - 1.0)

    def _coin(self, seed: int, position: int) -> float:
        return xxhash.xxh32_intdigest(f"{self.coins}{seed}:{position}".encode()) / 2**32

    def spend(self, requests: int) -> None:
        """The time of one step."""
        known = len(self.step_s)
        seconds = self.step_s[min(requests, known) - 1] * max(1.0, requests / known)
        global _spent_s
        _spent_s += seconds
        if self.sleeps:
            time.sleep(seconds)
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass


class InEngine(Drafter):
    """Drafts on the engine's device, after windows were chosen."""

    name = "dialled"
    drafts_first = False

    def __init__(self) -> None:
        self._script = Script.read(os.environ[SCRIPT])
        _ = self._plans  # now, and not in the first round

    @cached_property
    def _plans(self) -> dict[int, Plan]:
        return {int(seed): self._script.plan(int(seed)) for seed in self._script.outputs}

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        for depth in range(max(windows)) if any(self._script.step_s) else ():
            self._script.spend(sum(window > depth for window in windows))
        plans = self._plans
        return [
            plans[sequence.seed].draft(sequence.output_ids, window) if window else []
            for sequence, window in zip(sequences, windows, strict=True)
        ]


class Text(Drafter):
    """Drafts in the engine at no cost, before windows are chosen, as drafters over text do."""

    name = "text"

    def __init__(self) -> None:
        self._script = self.erring_elsewhere(Script.read(os.environ[SCRIPT]))

    @staticmethod
    def erring_elsewhere(script: Script) -> Script:
        return msgspec.structs.replace(script, acceptance=script.text, spread=script.text_spread, coins="text ")

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = []
        for sequence, window in zip(sequences, windows, strict=True):
            path = [*sequence.output_ids[-1:]]
            for depth in range(window):
                path.append(self._script.next_token(sequence.seed, len(sequence.output_ids) + depth, path[-1]))
            drafts.append(path[1:])
        return drafts


class Elsewhere(Continuer):
    """The same as the continuer of a drafter process."""

    def __init__(self, spec: DrafterSpec) -> None:
        self._script = Script.read(spec.model_dir)

        self.wants_runners_up = True
        self._runners_up: list[int | None] = []

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        script = self._script
        script.spend(len(lanes))
        both = [script.choices(lane.seed, len(lane.tokens), lane.tokens[-1] if lane.tokens else -1) for lane in lanes]
        self._runners_up = [runner_up if script.runner_up else None for _, runner_up in both]
        return [[first] for first, _ in both]

    def runners_up(self) -> list[int | None]:
        return self._runners_up
