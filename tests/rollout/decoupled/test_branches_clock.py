"""What branches bring on a clock: a drafter's own loop and an engine's own end, with seconds and coins of the test's.

The engine's rounds and the drafter's turns go on beside each other, and neither waits for the other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from specactor.rollout.decoupled.continuer import Lane
from specactor.rollout.decoupled.foresight import Foresight
from specactor.rollout.decoupled.order import Drops
from specactor.rollout.decoupled.process import Loop
from specactor.rollout.decoupled.tails import Tails
from specactor.rollout.draft.verification import common

WINDOW = 4
RIGHT, WRONG, OTHER = 7, 8, 9


@dataclass(frozen=True, kw_only=True)
class Setting:
    right: float
    hit: float
    token_s: float
    """A turn's, less a fixed part per request."""
    second_s: float = 0.0
    requests: int = 1
    round_s: float = 0.010
    row_s: float = 0.0001


class World:
    """Continuer, hub, engine and clock."""

    version = 0
    chooses = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.drops = Drops("hub")
        self.now_s = 0.0
        self.round_ends_s = 0.0
        self.outputs: list[list[int]] = [[RIGHT] for _ in range(setting.requests)]
        self.drafts: list[list[int]] = [[] for _ in self.outputs]
        self.tails = Tails(1, engine="engine", num_drafters=1, window=WINDOW)
        foresight = Foresight() if self.chooses else None
        self.loop = Loop(self, self, max_tokens=10**9, foresight=foresight, clock=lambda: self.now_s)  # type: ignore[arg-type]
        self.loop.turn()
        for i, output in enumerate(self.outputs):
            self.tails.open(f"r{i}", (1, 2 + i), output, i, 1.0)

    def speed(self, seconds: float) -> float:
        """Tokens per second of a request."""
        while self.now_s < seconds:
            self.loop.turn()
            if not self.loop.busy:
                self.now_s = max(self.now_s, self.round_ends_s)
        return sum(map(len, self.outputs)) / self.setting.requests / seconds

    def engine(self) -> None:
        """Its rounds until now."""
        setting, names = self.setting, [f"r{i}" for i in range(self.setting.requests)]
        while self.round_ends_s <= self.now_s:
            for output, draft in zip(self.outputs, self.drafts, strict=True):
                output += [RIGHT] * (1 + common(draft, [RIGHT] * WINDOW))
            self.tails.commit(names)
            self.drafts = self.tails.drafts(names, [WINDOW] * len(names))
            rows = sum(1 + len(draft) for draft in self.drafts)
            self.round_ends_s += setting.round_s + setting.row_s * rows

    def receive(self) -> list[tuple[int, bytes]]:
        self.engine()
        self.tails.tick(self.now_s)
        return [(1, frame) for frame in self.tails.outgoing(0, self.now_s)]

    def send(self, session: int, frame: bytes) -> bool:
        self.engine()
        self.tails.receive([(0, frame)], self.now_s)
        return True

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        self.now_s += self.setting.token_s + 2e-5 * len(lanes)
        return [[self.draft(lane)] for lane in lanes]

    def draft(self, lane: Lane) -> int:
        return RIGHT if self.coin(lane) < self.setting.right else WRONG

    def coin(self, lane: Lane, kind: str = "first") -> float:
        return random.Random(f"{kind} {lane.seed} {len(lane.tokens)}").random()

    def forget(self, key: object) -> None:
        pass


class Guessing(World):
    """Always with branches."""

    guessing = True

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        self.now_s += self.setting.second_s * self.guessing
        self._second = [[self.second(lane)] for lane in lanes]
        return super().extend(lanes)

    def second(self, lane: Lane) -> int:
        foreseen = self.draft(lane) == WRONG and self.coin(lane, "second") < self.setting.hit
        return RIGHT if foreseen else OTHER

    def runner_ups(self) -> list[list[int]]:
        return self._second


class Choosing(Guessing):
    """As the planner predicts."""

    chooses = True


SETTINGS = {
    "pays": Setting(right=0.6, hit=0.7, token_s=0.0007),
    "pays, several": Setting(right=0.7, hit=0.6, token_s=0.0004, requests=3),
    "hopeless": Setting(right=0.6, hit=0.0, token_s=0.001, second_s=0.0001),
    "dear": Setting(right=0.6, hit=0.3, token_s=0.001, second_s=0.001),
    "busy": Setting(right=0.8, hit=0.5, token_s=0.003, second_s=0.0005, requests=4),
    "nothing to mend": Setting(right=1.0, hit=0.5, token_s=0.001),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_choosing_does_no_harm(name: str) -> None:
    """In the first one never to draft branches would not do, in the busy one to draft them always."""
    without, always, choosing = (kind(SETTINGS[name]).speed(30.0) for kind in (World, Guessing, Choosing))
    assert choosing > 0.98 * without
    assert choosing > 0.96 * max(without, always)
    assert (without < 0.96 * always) == name.startswith("pays")
    assert (always < 0.96 * without) == (name == "busy")
