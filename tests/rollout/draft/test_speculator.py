"""Decided from the past alone: windows that pay, plain decoding where drafting does not, and no harm by bugs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specactor.config import SpeculationConfig
from specactor.errors import ConfigError
from specactor.rollout.draft.drafter import Drafter, DraftSequence
from specactor.rollout.draft.speculator import FAILURES, LOOK_EVERY, Speculator, make_drafters
from specactor.rollout.draft.verification import accepted_path, chain
from specactor.rollout.planning.windows import OFF

STEP_S, ROW_S = 1e-3, 1e-4


class Coin(Drafter):
    """Right with a probability, per token."""

    name = "coin"

    def __init__(self, right: float) -> None:
        self.right = right
        self.coins = random.Random(0)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [self._draft(s, w) for s, w in zip(sequences, windows, strict=True)]

    def _draft(self, sequence: DraftSequence, window: int) -> list[int]:
        start = len(sequence.output_ids)
        return [truth(sequence, start + j) + (self.coins.random() >= self.right) for j in range(window)]


class Broken(Coin):
    name = "broken"

    def __init__(self) -> None:
        super().__init__(1.0)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        raise RuntimeError("a bug")


def truth(sequence: DraftSequence, position: int) -> int:
    return 2 * ((7 * position + sequence.seed) % 40)


class World:
    """An engine that knows only costs and true tokens, on a clock of its own."""

    def __init__(self, config: SpeculationConfig, *drafters: Drafter, requests: int = 4, row_s: float = ROW_S) -> None:
        self.now = 0.0
        self.row_s = row_s
        self.speculator = Speculator(config, drafters, clock=lambda: self.now)
        self.sequences = [DraftSequence(request_id=str(i), prompt_ids=(1,), seed=i) for i in range(requests)]
        for sequence in self.sequences:
            self.speculator.open(sequence)

    def play(self, rounds: int) -> float:
        """Tokens per second."""
        started, tokens = self.now, 0
        for _ in range(rounds):
            decision = self.speculator.decide(self.sequences, [100] * len(self.sequences))
            assert all(len(d) <= w for d, w in zip(decision.drafts, decision.windows, strict=True))
            accepted = []
            for sequence, draft in zip(self.sequences, decision.drafts, strict=True):
                start = len(sequence.output_ids)
                samples = [truth(sequence, start + j) for j in range(len(draft) + 1)]
                fresh = [samples[row] for row in accepted_path(chain(draft), samples)]
                accepted.append(len(fresh) - 1)
                sequence.output_ids += fresh
                tokens += len(fresh)
            rows = len(self.sequences) + sum(map(len, decision.drafts))
            verify_s = STEP_S + self.row_s * rows
            self.now += verify_s
            self.speculator.learn(self.sequences, [len(d) for d in decision.drafts], accepted, verify_s=verify_s)
            for sequence, more in zip(self.sequences, accepted, strict=True):
                self.speculator.commit(sequence, sequence.output_ids[-more - 1 :])
        return tokens / (self.now - started)

    def plain_speed(self) -> float:
        return len(self.sequences) / (STEP_S + self.row_s * len(self.sequences))


def auto(**fields: object) -> SpeculationConfig:
    return SpeculationConfig(**{"mode": "auto", "max_window": 8, **fields})  # type: ignore[arg-type]


def test_good_drafts_are_used_and_pay() -> None:
    world = World(auto(), Coin(0.9))
    world.play(100)
    assert world.play(100) > 1.8 * world.plain_speed()
    assert world.speculator.report()["coin"].speculative_rounds > 150


def test_bad_drafts_cost_next_to_nothing() -> None:
    world = World(auto(), Coin(0.02))
    world.play(200)
    assert world.play(300) > 0.98 * world.plain_speed()


def test_windows_are_shorter_where_rows_are_dear() -> None:
    cheap, dear = World(auto(), Coin(0.7), row_s=1e-5), World(auto(), Coin(0.7), row_s=4e-4)
    widths = []
    for world in (cheap, dear):
        world.play(200)
        counts = world.speculator.report()["coin"]
        widths.append(counts.drafted / max(1, counts.verifies))
    assert widths[0] > 1.5 * widths[1]


def test_a_drafter_that_becomes_good_is_noticed_although_it_is_off() -> None:
    coin = Coin(0.0)
    world = World(auto(), coin)
    world.play(400)
    world.speculator.report()
    coin.right = 0.95
    world.play(40 * LOOK_EVERY)
    assert world.speculator.report()["coin"].speculative_rounds > 100


def test_the_better_of_two_drafters_is_chosen() -> None:
    good = Coin(0.9)
    good.name = "good"
    world = World(auto(), Coin(0.3), good)
    world.play(200)
    world.speculator.report()
    world.play(100)
    report = world.speculator.report()
    assert report["good"].rounds > 90


def test_a_fixed_window_is_given_to_all() -> None:
    world = World(SpeculationConfig(mode="coupled", window=3, max_window=8), Coin(0.0))
    world.play(20)
    counts = world.speculator.report()["coin"]
    assert counts.drafted == 20 * 4 * 3
    assert counts.speculative_rounds == counts.rounds == 20


def test_mode_coupled_never_decodes_plainly_once_it_knows_the_costs() -> None:
    world = World(SpeculationConfig(mode="coupled", max_window=8), Coin(0.05))
    world.play(50)
    world.speculator.report()
    world.play(50)
    assert world.speculator.report()[OFF].rounds == 0


def test_a_broken_drafter_is_not_asked_for_ever() -> None:
    world = World(auto(), Broken(), Coin(0.9))
    world.play(100)
    report = world.speculator.report()
    assert report["broken"].failures == FAILURES
    assert report["coin"].speculative_rounds > 50


def test_limits_are_respected() -> None:
    world = World(SpeculationConfig(mode="coupled", window=8, max_window=8), Coin(1.0))
    decision = world.speculator.decide(world.sequences, [0, 1, 5, 100])
    assert [len(draft) for draft in decision.drafts] == [0, 1, 5, 8]


def test_the_future_is_not_seen() -> None:
    """Two worlds with one past decide alike, whatever comes next."""
    one, two = World(auto(), Coin(0.6)), World(auto(), Coin(0.6))
    one.play(60)
    two.play(60)
    two.speculator.drafters["coin"].right = 0.0  # type: ignore[attr-defined]
    decisions = [w.speculator.decide(w.sequences, [100] * 4) for w in (one, two)]
    assert decisions[0].windows == decisions[1].windows
    assert decisions[0].drafter == decisions[1].drafter


@pytest.mark.parametrize("name", ["sufix", "no.such.module:X", "specactor.errors:ConfigError", "json:dumps"])
def test_unknown_drafters_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout.speculation.drafters: got"):
        make_drafters(SpeculationConfig(drafters=(name,)))
