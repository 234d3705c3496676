"""Random walks through the protocol: rounds as an engine makes them, with trouble in between."""

from __future__ import annotations

import random

from specactor.rollout.decoupled.drafter_side import MirroredRequests
from specactor.rollout.decoupled.engine_side import Tails
from specactor.rollout.decoupled.protocol import AHEAD
from tests.rollout.decoupled.network import WINDOW, World

SMALL, LARGE = 60, 100_000
"""Tokens of a drafter: so few that requests are evicted all the time, or enough for all."""
MOVES = {
    "round": 20,
    "commit": 20,
    "open": 8,
    "close": 3,
    "flush": 5,
    "step": 5,
    "deliver": 8,
    "deliver_all": 3,
    "lose": 4,
    "repeat": 3,
    "wait": 3,
    "silence": 0.3,
    "restart_engine": 0.6,
    "restart_drafter": 0.6,
}
"""Move -> weight."""


class Walk:
    def __init__(
        self, seed: int, *, tails: type[Tails] = Tails, mirrors: type[MirroredRequests] = MirroredRequests
    ) -> None:
        self.rng = random.Random(seed)
        self.max_tokens = SMALL if seed % 3 == 0 else LARGE
        self.world = World(max_tokens=self.max_tokens, tails=tails, mirrors=mirrors)

    def run(self, steps: int = 120) -> None:
        """Raises AssertionError where the ends are wrong."""
        for move in self.rng.choices(list(MOVES), list(MOVES.values()), k=steps):
            self.move(move)
            self.world.check()
        if self.max_tokens == LARGE:
            self.world.check_quiet()
        self.world.check_closed()

    def move(self, move: str) -> None:
        world, rng = self.world, self.rng
        engine, drafter = rng.randrange(2), rng.randrange(2)
        names = list(world.engines[engine].texts)
        name = rng.choice(names) if names else None
        if move == "open" and len(names) < 5:
            world.open(engine, tuple(range(rng.randrange(1, 13))), range(rng.randrange(3)))
        elif move == "commit" and name:
            world.commit(engine, name, rng.randrange(4), int(rng.random() < 0.3))
            world.draft(engine, name)
        elif move == "close" and name:
            world.close(engine, name)
        elif move == "round":
            world.flush(engine)
            world.deliver_all()
            for _ in range(rng.randrange(1, AHEAD * WINDOW)):
                world.step(drafter)
            world.deliver_all()
        elif move == "flush":
            world.flush(engine)
        elif move == "step":
            world.step(drafter)
        elif move == "deliver_all":
            world.deliver_all()
        elif move in ("deliver", "lose") and world.flying:
            frame = world.flying.pop(rng.randrange(len(world.flying)))
            if move == "deliver":
                world.deliver(frame)
        elif move == "repeat" and world.past:
            world.deliver(rng.choice(world.past))
        elif move == "wait":
            world.now_s += 0.3
        elif move == "silence":
            world.now_s += rng.choice((1.2, 40.0))
        elif move == "restart_engine":
            world.restart_engine(engine)
        elif move == "restart_drafter":
            world.restart_drafter(drafter)
