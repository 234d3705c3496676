"""The protocol as one state machine: two engines, two drafters, and a network that does whatever it likes."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specactor.rollout.decoupled.drafter_side import MirroredRequests
from specactor.rollout.decoupled.engine_side import Tails
from specactor.rollout.decoupled.protocol import AHEAD, MAGIC, VERSION
from tests.rollout.decoupled.network import WINDOW, World

SMALL, LARGE = 60, 100_000
"""Tokens of a drafter: so few that requests are evicted all the time, or enough for all."""
EITHER = st.integers(0, 1)
PICK = st.integers(0, 1 << 16)


class Protocol(RuleBasedStateMachine):
    """Wrong versions of the two ends are put in as class attributes."""

    tails: type[Tails] = Tails
    mirrors: type[MirroredRequests] = MirroredRequests

    @initialize(max_tokens=st.sampled_from([SMALL, LARGE]), warm=st.booleans())
    def begin(self, max_tokens: int, warm: bool) -> None:
        self.world = World(max_tokens=max_tokens, tails=self.tails, mirrors=self.mirrors)
        if warm:
            self.world.settle(2)

    def some(self, engine: int, pick: int) -> str | None:
        names = sorted(self.world.engines[engine].texts)
        return names[pick % len(names)] if names else None

    @rule(engine=EITHER, prompt=st.integers(1, 12), output=st.integers(0, 3))
    def open(self, engine: int, prompt: int, output: int) -> None:
        if len(self.world.engines[engine].texts) < 5:
            self.world.open(engine, tuple(range(prompt)), range(output))

    @rule(engine=EITHER, pick=PICK, right=st.integers(0, 4), wrong=EITHER)
    def commit(self, engine: int, pick: int, right: int, wrong: int) -> None:
        name = self.some(engine, pick)
        if name is not None and right + wrong:
            self.world.commit(engine, name, right, wrong)

    @rule(engine=EITHER, pick=PICK)
    def close(self, engine: int, pick: int) -> None:
        name = self.some(engine, pick)
        if name is not None:
            self.world.close(engine, name)

    @rule(engine=EITHER)
    def flush(self, engine: int) -> None:
        self.world.flush(engine)

    @rule(drafter=EITHER, steps=st.integers(1, AHEAD * WINDOW))
    def step(self, drafter: int, steps: int) -> None:
        for _ in range(steps):
            self.world.step(drafter)

    @rule(engine=EITHER)
    def round(self, engine: int) -> None:
        """Of an engine whose network works."""
        self.world.flush(engine)
        self.world.deliver_all()
        for drafter in range(2):
            self.world.step(drafter)
        self.world.deliver_all()

    @rule(pick=PICK)
    def deliver(self, pick: int) -> None:
        """Any frame, so they overtake each other."""
        if self.world.flying:
            self.world.deliver(self.world.flying.pop(pick % len(self.world.flying)))

    @rule()
    def deliver_all(self) -> None:
        self.world.deliver_all()

    @rule(pick=PICK)
    def lose(self, pick: int) -> None:
        if self.world.flying:
            del self.world.flying[pick % len(self.world.flying)]

    @rule(pick=PICK)
    def repeat(self, pick: int) -> None:
        """A frame that has arrived already."""
        if self.world.past:
            self.world.deliver(self.world.past[pick % len(self.world.past)])

    @rule(engine=EITHER, drafter=EITHER, seed=PICK, known=st.booleans())
    def garbage(self, engine: int, drafter: int, seed: int, known: bool) -> None:
        rng = random.Random(seed)
        end, world = self.world.engines[engine], self.world
        data = rng.randbytes(rng.randrange(80))
        if known:  # up to where it begins to be wrong
            data = MAGIC + bytes([VERSION, 0, 0, 0]) + end.session.to_bytes(8, "little") + data
        elif world.flying:
            whole = rng.choice(world.flying).data
            data = whole[: rng.randrange(len(whole))]
        world.drafters[drafter].mirrors.receive(end.session, data, world.now_s)
        end.tails.receive([(drafter, data)], world.now_s)

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.2, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule(engine=EITHER)
    def restart_engine(self, engine: int) -> None:
        self.world.restart_engine(engine)

    @rule(drafter=EITHER)
    def restart_drafter(self, drafter: int) -> None:
        self.world.restart_drafter(drafter)

    @rule(engine=EITHER, window=st.integers(1, WINDOW))
    def draft(self, engine: int, window: int) -> None:
        for name in self.world.engines[engine].texts:
            self.world.draft(engine, name, window)

    @invariant()
    def holds(self) -> None:
        self.world.check()
        for engine, end in enumerate(self.world.engines):
            for name in end.texts:
                self.world.draft(engine, name)

    def teardown(self) -> None:
        if self.world.max_tokens == LARGE:
            self.world.check_quiet()
        self.world.check_closed()
