"""While decoding is plain: nobody need be asked, drafters hear of things later, and looks are few and cheap."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest

from specactor.config import SpeculationConfig
from specactor.rollout.speculation import drafter_set, probing, speculator, suffix
from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.planner import Planner
from specactor.rollout.speculation.probing import LOOK_EVERY
from specactor.rollout.speculation.verification import Drafts
from specactor.rollout.speculation.windows import OFF, Choice
from tests.rollout.speculation import world as world_module
from tests.rollout.speculation.world import STEP_S, Coin, World, auto, truth


class Told(Coin):
    """Notes what it is told, and checks that it knows all whenever it is asked."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.known: dict[str, list[int]] = {}
        self.commits = 0

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        self.known.setdefault(sequence.request_id, []).extend(tokens)
        self.commits += 1

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        assert all(self.known.get(s.request_id, []) == s.output_ids for s in sequences)
        return super().propose(sequences, windows)


def test_drafters_are_told_late_while_decoding_is_plain_and_miss_nothing() -> None:
    told = Told()
    world = World(auto(), told)
    world.play(200)
    assert world.speculator.report()[OFF].rounds > 150
    before = told.commits
    world.play(10 * LOOK_EVERY)
    assert told.commits - before < 10 * LOOK_EVERY  # a quarter: of 4 requests, every round
    ended, world.sequences = world.sequences, [DraftSequence(request_id="new", prompt_ids=(1,))]
    for sequence in ended:
        world.speculator.close(sequence)
    world.speculator.open(world.sequences[0])
    world.play(10 * LOOK_EVERY)  # its prompt is that of the others
    for sequence in ended:
        assert told.known[sequence.request_id] == sequence.output_ids


class Rests(World):
    """Asks for no decision while `rest` promises plain rounds, as the engine does."""

    left = 0
    unasked = 0

    def play(self, rounds: int) -> float:
        started, tokens = self.now, 0
        for _ in range(rounds):
            if not self.left:
                before = sum(len(s.output_ids) for s in self.sequences)
                super().play(1)
                tokens += sum(len(s.output_ids) for s in self.sequences) - before
                self.left = self.promised
                continue
            self.left -= 1
            self.unasked += 1
            seconds = STEP_S + self.row_s * len(self.sequences)
            self.now += seconds
            self.speculator.on_plain_round(len(self.sequences), round_s=seconds)
            for sequence in self.sequences:
                fresh = [truth(sequence, len(sequence.output_ids))]
                sequence.output_ids += fresh
                tokens += 1
        return tokens / (self.now - started)


def test_an_engine_need_not_ask_while_decoding_is_plain() -> None:
    coin = Coin(0.0)
    world = Rests(auto(), coin)
    world.play(400)
    assert world.unasked > 300
    counts = world.speculator.report()[OFF]
    assert counts.rounds > 350
    assert counts.rested == world.unasked
    coin.right = 0.95
    world.play(40 * LOOK_EVERY)
    assert world.speculator.report()["coin"].speculative_rounds > 100


def test_a_window_of_none_is_plain_for_good() -> None:
    world = World(SpeculationConfig(mode="coupled", window=0, max_window=8), Coin(1.0))
    world.play(1)
    assert world.speculator.plain_rounds_ahead > 1000


class Seldom(Coin):
    """Has a draft at some positions alone, and is right then."""

    name = "seldom"

    def __init__(self, every: int) -> None:
        super().__init__(1.0)
        self.every = every

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [
            self._draft(s, w) if len(s.output_ids) % self.every < 2 else []
            for s, w in zip(sequences, windows, strict=True)
        ]


def test_one_request_is_drafted_for_wherever_there_is_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round without a draft is no sign that drafting does not pay."""
    speeds = []
    for again in (probing.MOST_AGAIN, 0):
        monkeypatch.setattr(probing, "MOST_AGAIN", again)
        world = World(auto(), Seldom(12), requests=1)
        world.look_s = 1e-5
        world.play(100)
        speeds.append(world.play(400) / world.plain_speed())
    assert speeds[0] > 1.6
    assert speeds[1] < 1.3


def test_of_many_requests_a_look_drafts_for_some() -> None:
    """If the drafter drafts ahead, and so for all that it has heard of; when it has become good, it hears of all."""
    asked: set[int] = set()
    opened: set[str] = set()

    class Ahead(Coin):
        drafts_ahead = True

        def open(self, sequence: DraftSequence) -> None:
            opened.add(sequence.request_id)

        def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
            asked.add(len(sequences))
            return super().propose(sequences, windows)

    coin = Ahead(0.0)
    world = World(auto(), coin, requests=64, row_s=1e-5)
    world.play(400)  # until costs are known
    for sequence in world.sequences:
        world.speculator.close(sequence)
    world.sequences = [DraftSequence(request_id=f"new {i}", prompt_ids=(2,), seed=i) for i in range(64)]
    for sequence in world.sequences:
        world.speculator.open(sequence)
    asked.clear()
    opened.clear()
    world.play(20 * LOOK_EVERY)
    assert asked == {speculator.LOOKED_AT}
    assert len(opened) == speculator.LOOKED_AT
    coin.right = 0.95
    world.play(40 * LOOK_EVERY)
    assert 64 in asked
    assert len(opened) == 64
    assert world.speculator.report()["coin"].speculative_rounds > 50


def test_a_look_enters_so_much_text_however_long_the_rest_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "AT_ONCE", 1_024, raising=False)
    entered = 0

    class Entered(suffix.SuffixDrafter):
        def _enter(self) -> None:
            nonlocal entered
            entered += self._num_pending
            super()._enter()

    world = World(auto(), Entered(), requests=16)
    world.play(400)  # drafts are good, and tell what rounds cost; then none is
    monkeypatch.setattr(world_module, "truth", lambda s, position: zlib.crc32(f"{s.seed} {position}".encode()))
    world.look_s = 0.01  # so looks are hundreds of rounds apart
    world.play(1_000)
    looks = []
    for _ in range(8_000):
        before = entered
        world.play(1)
        if entered > before:
            looks.append(entered - before)
    assert 1 < len(looks) < 8_000 / 256
    # The last tokens of each request are told after its drafts from some tokens ago.
    assert 512 < max(looks) <= 1_024 + 16 * world.speculator.config.max_window


def rounds_until_noticed(*, right: float = 0.8, row_s: float = 3e-5, ahead_s: float = 0.0) -> int:
    """That the drafts of 64 requests have become good; `ahead_s`: of one that drafts ahead, in each round."""

    class Slow(Coin):
        drafts_ahead = ahead_s > 0

        def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
            world.now += ahead_s
            return super().propose(sequences, windows)

    coin = Slow(0.0)
    world = World(auto(), coin, requests=64, row_s=row_s)
    world.play(600)
    world.speculator.report()
    coin.right = right
    for rounds in range(1, 1000):
        world.play(1)
        if world.speculator.report()["coin"].speculative_rounds:
            return rounds
    return 1000


def test_old_evidence_makes_way_for_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounds_until_noticed() < 400
    monkeypatch.setattr(AcceptanceModel, "limit", lambda self: None)
    assert rounds_until_noticed() == 1000


class SomeAlone(Planner):
    """Wrong: requests that are not looked at count as if they had no drafts."""

    def options(
        self, sequences: Sequence[DraftSequence], caps: Sequence[int], drafts: Drafts, *, max_branches: int = 0
    ) -> dict[str, Choice]:
        if self.current == OFF:
            for lists in drafts.values():
                lists[speculator.LOOKED_AT :] = [[] for _ in lists[speculator.LOOKED_AT :]]
        return super().options(sequences, caps, drafts, max_branches=max_branches)


def test_a_look_at_some_predicts_for_all_as_if_they_were_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafts pay for 64 requests, and for 16 of them do not."""
    assert rounds_until_noticed(right=0.95, row_s=1e-6, ahead_s=2 * STEP_S) < 1000
    monkeypatch.setattr(speculator, "Planner", SomeAlone)
    assert rounds_until_noticed(right=0.95, row_s=1e-6, ahead_s=2 * STEP_S) == 1000


def rounds_until_new_requests_are_drafted_for() -> int:
    """Requests with good drafts come after others with bad ones."""
    coin = Coin(0.0)
    world = World(auto(), coin, requests=32, row_s=3e-5)
    world.play(600)
    world.speculator.report()
    for sequence in world.sequences:
        world.speculator.close(sequence)
    world.sequences = [DraftSequence(request_id=f"new {i}", prompt_ids=(2,), seed=i) for i in range(32)]
    for sequence in world.sequences:
        world.speculator.open(sequence)
    coin.right = 0.9
    for rounds in range(1, 200):
        world.play(1)
        if world.speculator.report()["coin"].speculative_rounds:
            return rounds
    return 200


def test_new_requests_are_soon_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """And their own last tokens tell at once how good drafts are."""
    assert rounds_until_new_requests_are_drafted_for() <= probing.SOON + 1
    monkeypatch.setattr(drafter_set.DrafterSet, "hindsight", lambda *_: None)
    without_hindsight = rounds_until_new_requests_are_drafted_for()
    monkeypatch.undo()
    monkeypatch.setattr(probing.BackOff, "requests_came", lambda _: None)
    assert min(without_hindsight, rounds_until_new_requests_are_drafted_for()) > 2 * probing.SOON
