"""Decided from the past alone: windows that pay, plain decoding where drafting does not, and no harm by bugs."""

from __future__ import annotations

import random
import time
import timeit
from collections.abc import Sequence

import pytest

from specactor.config import SpeculationConfig
from specactor.errors import ConfigError
from specactor.rollout.speculation import probing
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.drafter_set import FAILURES
from specactor.rollout.speculation.probing import LOOK_EVERY
from specactor.rollout.speculation.registry import make_drafters
from specactor.rollout.speculation.windows import OFF
from specactor.trace import Recorder
from tests.rollout.speculation.world import STEP_S, Coin, World, auto, truth


class Broken(Coin):
    name = "broken"

    def __init__(self) -> None:
        super().__init__(1.0)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        raise RuntimeError("a bug")


class Sometimes(Drafter):
    """Right at every position but those of a class of remainders."""

    def __init__(self, name: str, every: int, wrong: int) -> None:
        self.name, self.every, self.wrong = name, every, wrong

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [self._draft(s, w) for s, w in zip(sequences, windows, strict=True)]

    def _draft(self, sequence: DraftSequence, window: int) -> list[int]:
        start = len(sequence.output_ids)
        places = range(start, start + window)
        return [truth(sequence, t) + (t % self.every == self.wrong) for t in places]


class Sure(Drafter):
    """Right in the rounds of a request in which it says so, and wrong in the others."""

    name = "sure"

    def __init__(self, *, tells: bool) -> None:
        self.tells = tells
        self.coins = random.Random(0)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        sure = [self.coins.random() < 0.5 for _ in sequences]
        self.confidence = [3 * is_sure for is_sure in sure] if self.tells else []
        return [
            [truth(s, len(s.output_ids) + j) + (not is_sure) for j in range(w)]
            for s, w, is_sure in zip(sequences, windows, sure, strict=True)
        ]


def test_a_drafter_that_tells_how_sure_it_is_wastes_nothing() -> None:
    speeds = []
    for tells in (True, False):
        world = World(auto(), Sure(tells=tells))
        world.play(100)
        world.speculator.report()
        speeds.append(world.play(100))
        counts = world.speculator.report()["sure"]
        assert (counts.accepted > 0.95 * counts.drafted) == tells
    assert speeds[0] > 1.1 * speeds[1]


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
    recorder = Recorder(on=True)
    world.speculator.recorder = recorder
    coin.right = 0.95
    world.play(40 * LOOK_EVERY)
    assert world.speculator.report()["coin"].speculative_rounds > 100
    switches = [span for span in recorder.take() if span.name == "switch to coin"]
    assert switches, "the trace says when"
    assert all(span.details["why"] for span in switches), "and why"


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


def coupled() -> SpeculationConfig:
    return SpeculationConfig(mode="coupled", max_window=12)


def complements() -> list[Drafter]:
    return [Sometimes("one", 3, 0), Sometimes("two", 4, 1), Sometimes("three", 5, 2)]


def test_a_drafter_that_is_better_is_noticed_while_another_leads() -> None:
    """All are hopeful at first, and the first of them leads; what the others drafted is compared all the same."""
    world = World(coupled(), *complements(), row_s=1e-6)
    only = World(coupled(), complements()[2], row_s=1e-6)
    for one in (world, only):
        one.play(60)
    assert world.play(60) > 0.97 * only.play(60)
    report = world.speculator.report()
    assert report["three"].speculative_rounds > report["one"].speculative_rounds


@pytest.mark.parametrize("most", [1, 3])
def test_credits_of_several_drafters_add_up_to_what_was_emitted(most: int) -> None:
    world = World(auto(mode="auto", fastest_of=most), *complements(), row_s=1e-6, requests=2, max_branches=100)
    world.play(50)
    total = sum(world.speculator.report().values(), Counts())
    assert total.emitted == total.accepted + total.verifies
    assert total.drafted == world.rows - 50 * len(world.sequences)
    assert total.accepted == sum(len(s.output_ids) for s in world.sequences) - 50 * len(world.sequences)


def test_without_room_for_branches_one_drafter_drafts_for_a_request() -> None:
    world = World(auto(fastest_of=3), *complements(), row_s=1e-6, requests=1, max_branches=0)
    for _ in range(60):
        world.play(1)
        assert not world.speculator._decision.beside


@pytest.mark.parametrize("wrong", [[], [[1], [2], [3], [4], [5]], [[1], None, [2], [3]]])
def test_malformed_drafts_are_a_failure_and_no_harm(wrong: list[list[int]]) -> None:
    coin = Coin(1.0)
    coin.propose = lambda sequences, windows: wrong  # type: ignore[method-assign]
    world = World(SpeculationConfig(mode="coupled", window=2), coin)
    world.play(5)
    assert world.speculator.report()["coin"].failures == FAILURES


def test_drafts_end_before_a_token_that_does_not_exist() -> None:
    world = World(SpeculationConfig(mode="coupled", window=4), Coin(1.0))
    world.speculator.drafter_set.vocab_size = truth(world.sequences[0], 2)
    assert [len(d) for d in world.speculator.decide(world.sequences[:1], [8]).drafts] == [2]


class Slow(Coin):
    """Right, but drafting takes far longer than it saves."""

    name = "slow"

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        self.world.now += 10 * STEP_S
        return super().propose(sequences, windows)

    world: World


def speed_with_a_slow_drafter() -> float:
    """Over that of plain decoding."""
    slow = Slow(0.9)
    world = World(auto(), slow)
    slow.world = world
    world.play(200)
    return world.play(2000) / world.plain_speed()


def test_looks_at_a_slow_drafter_cost_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speed_with_a_slow_drafter() > 0.98
    monkeypatch.setattr(probing, "LOOK_SHARE", 1e9)
    assert speed_with_a_slow_drafter() < 0.95


def test_all_drafters_are_looked_at_while_decoding_is_plain() -> None:
    good = Coin(0.0)
    good.name = "good"
    world = World(auto(), Coin(0.0), good)
    world.play(400)
    world.speculator.report()
    good.right = 0.95
    world.play(40 * LOOK_EVERY)
    assert world.speculator.report()["good"].speculative_rounds > 100


def test_mode_coupled_notices_a_drafter_that_becomes_good() -> None:
    coin = Coin(0.0)
    world = World(auto(mode="coupled"), coin)
    world.play(400)
    world.speculator.report()
    coin.right = 0.95
    world.play(200)
    assert world.speculator.report()["coin"].speculative_rounds > 100


@pytest.mark.parametrize("requests", [1, 3])
def test_requests_without_room_get_no_drafts(requests: int) -> None:
    world = World(coupled(), *complements(), requests=requests, max_branches=100)
    world.play(30)
    decision = world.speculator.decide(world.sequences, [0] * requests, max_branches=100)
    assert decision.windows == [0] * requests
    assert all(tree.num_rows == 1 for tree in decision.trees)


@pytest.mark.parametrize("most", [1, 3])
def test_deciding_takes_a_small_part_of_a_round(most: int) -> None:
    """64 requests, windows up to 8, three drafters: about 1 ms where it was measured, most of it the drafters' own; the
    bound leaves room for a busy machine."""
    world = World(auto(fastest_of=most), *complements(), row_s=1e-6, requests=64, max_branches=1000)
    world.play(30)

    def decide() -> None:
        world.speculator.decide(world.sequences, [100] * 64, max_branches=1000)

    assert min(timeit.repeat(decide, timer=time.process_time, number=5, repeat=10)) / 5 < 10e-3
