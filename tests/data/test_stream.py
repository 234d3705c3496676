from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.data.stream import CurriculumStream, MixedStream, PromptStream, Visit, request_seed
from specactor.errors import CheckpointError, ConfigError

sizes = st.integers(1, 40)
takes = st.lists(st.integers(0, 30), max_size=12)


def indices(visits: Iterable[Visit]) -> tuple[int, ...]:
    return tuple(visit.problem for visit in visits)


@given(dataset_len=sizes, seed=st.integers(0, 2**31 - 1), shuffle=st.booleans(), before=takes, after=takes)
def test_a_restored_stream_goes_on_as_if_nothing_had_happened(
    dataset_len: int, seed: int, shuffle: bool, before: list[int], after: list[int]
) -> None:
    def stream() -> PromptStream:
        return PromptStream(dataset_len, seed, shuffle=shuffle)

    undisturbed, stopped = stream(), stream()
    for count in before:
        assert undisturbed.take(count) == stopped.take(count)
    saved = json.loads(json.dumps(stopped.state()))
    resumed = stream()
    resumed.take(3)  # whatever was drawn before a restore does not matter
    resumed.restore(saved)
    assert [resumed.take(count) for count in after] == [undisturbed.take(count) for count in after]
    assert resumed.state() == undisturbed.state()


def test_going_back_within_an_epoch_shuffles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As dynamic sampling does in every step: of a million problems it takes half a second, on every rank."""
    stream = PromptStream(100, 0)
    begin = stream.state()
    taken = stream.take(7)
    with monkeypatch.context() as patched:
        patched.setattr(random, "Random", None)
        stream.restore(begin)
        assert stream.take(7) == taken
    stream.take(100)
    stream.restore(begin)
    assert stream.take(7) == taken, "another epoch has another order"


@given(dataset_len=sizes, seed=st.integers(0, 2**31 - 1), counts=takes)
def test_the_sequence_does_not_depend_on_how_it_is_taken(dataset_len: int, seed: int, counts: list[int]) -> None:
    pieces, whole = PromptStream(dataset_len, seed), PromptStream(dataset_len, seed)
    assert tuple(i for count in counts for i in pieces.take(count)) == whole.take(sum(counts))


@given(dataset_len=sizes, seed=st.integers(0, 2**31 - 1))
def test_every_epoch_has_every_problem_once(dataset_len: int, seed: int) -> None:
    stream = PromptStream(dataset_len, seed)
    for epoch in range(3):
        assert sorted(stream.take(dataset_len)) == [(index, epoch) for index in range(dataset_len)]


def test_epochs_and_seeds_differ() -> None:
    stream = PromptStream(100, 0)
    first, second = indices(stream.take(100)), indices(stream.take(100))
    assert first != second
    assert indices(PromptStream(100, 1).take(100)) != first


def test_unshuffled_problems_come_in_the_order_of_their_source() -> None:
    stream = PromptStream(4, 7, shuffle=False)
    assert indices(stream.take(3) + stream.take(6)) == (0, 1, 2, 3, 0, 1, 2, 3, 0)


def test_the_order_is_pinned_across_versions_of_python() -> None:
    assert indices(PromptStream(10, 7).take(15)) == PINNED_ORDER


PINNED_ORDER = (9, 2, 5, 4, 6, 1, 3, 7, 8, 0, 8, 0, 3, 5, 4)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"dataset_len": 9, "seed": 7, "shuffle": 1, "epoch": 0, "position": 0}, "dataset_len: got 9, expected 10"),
        ({"dataset_len": 10, "seed": 8, "shuffle": 1, "epoch": 0, "position": 0}, "seed: got 8, expected 7"),
        ({"dataset_len": 10, "seed": 7, "shuffle": 0, "epoch": 0, "position": 0}, "shuffle: got 0, expected 1"),
        ({"dataset_len": 10, "seed": 7, "shuffle": 1, "epoch": 0}, "expected integers dataset_len"),
        ({"dataset_len": 10, "seed": 7, "shuffle": 1, "epoch": 0, "position": 1.0}, "expected integers dataset_len"),
        ([1, 2], "expected integers dataset_len"),
    ],
)
def test_a_foreign_or_damaged_state_is_refused_and_changes_nothing(state: object, message: str) -> None:
    stream, other = PromptStream(10, 7), PromptStream(10, 7)
    with pytest.raises(CheckpointError, match=message):
        stream.restore(state)
    assert stream.take(20) == other.take(20)


def test_nothing_to_draw_from() -> None:
    with pytest.raises(ConfigError, match=r"data\.train: got 0, expected at least one problem"):
        PromptStream(0, 0)


def test_request_seeds_are_pinned() -> None:
    numbers = [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (2**31 - 1, 10**6, 10**9, 63)]
    assert [request_seed(*n) for n in numbers] == PINNED_SEEDS


PINNED_SEEDS = [1705254105, 1479956114, 1127844579, 1169475568, 2001582111, 54500154]


def test_request_seeds_collide_no_more_than_random_numbers_do() -> None:
    """100,000 draws from 2**31 share 2.3 values on average; a step's own requests share none."""
    seeds = [[request_seed(5, step, p * 7, s) for p in range(125) for s in range(8)] for step in range(100)]
    assert all(len(set(of_step)) == 1000 for of_step in seeds)
    every = [seed for of_step in seeds for seed in of_step]
    assert 0 <= min(every) < 2**31 // 1000
    assert 2**31 - 2**31 // 1000 < max(every) < 2**31
    assert len(every) - len(set(every)) <= 10


mixes = st.lists(st.tuples(sizes, st.floats(0.1, 10)), min_size=1, max_size=4)


def mixed(sets: list[tuple[int, float]], seed: int = 3) -> MixedStream:
    return MixedStream([size for size, _ in sets], [weight for _, weight in sets], seed)


@given(sets=mixes, count=st.integers(1, 200))
def test_sets_are_drawn_by_their_weights_and_each_in_its_own_order(sets: list[tuple[int, float]], count: int) -> None:
    taken, start, total = mixed(sets).take(count), 0, sum(weight for _, weight in sets)
    for i, (size, weight) in enumerate(sets):
        own = [(index - start, epoch) for index, epoch in taken if start <= index < start + size]
        assert tuple(own) == PromptStream(size, 3 + i).take(len(own))
        assert abs(len(own) - count * weight / total) <= len(sets)
        start += size


@given(sets=mixes, before=takes, after=takes)
def test_a_restored_mix_goes_on_as_if_nothing_had_happened(
    sets: list[tuple[int, float]], before: list[int], after: list[int]
) -> None:
    undisturbed, resumed = mixed(sets), mixed(sets)
    for count in before:
        undisturbed.take(count)
    resumed.restore(json.loads(json.dumps(undisturbed.state())))
    assert [resumed.take(count) for count in after] == [undisturbed.take(count) for count in after]


@given(before=st.integers(0, 100), old=st.floats(0.1, 10), new=st.floats(0.1, 10), more=st.integers(0, 50))
def test_other_weights_hold_from_the_resume_on(before: int, old: float, new: float, more: int) -> None:
    """And not from the start: else one set alone would come until it has caught up. A second resume changes nothing."""
    first = mixed([(7, 1.0), (9, old)])
    first.take(before)
    second, third = mixed([(7, 1.0), (9, new)]), mixed([(7, 1.0), (9, new)])
    second.restore(first.state())
    if old != new:
        taken = second.take(40)
        assert abs(sum(index >= 7 for index, _ in taken) - 40 * new / (1 + new)) <= 2
    second.take(more)
    third.restore(json.loads(json.dumps(second.state())))
    assert third.take(20) == second.take(20)


def test_a_mix_of_other_sets_is_not_resumed() -> None:
    for state in (mixed([(3, 1.0)]).state(), PromptStream(3, 3).state(), None):
        with pytest.raises(CheckpointError, match="expected those of 2 sets"):
            mixed([(3, 1.0), (4, 1.0)]).restore(state)
    with pytest.raises(CheckpointError, match="dataset_len: got 4, expected 5"):
        mixed([(3, 1.0), (5, 1.0)]).restore(mixed([(3, 1.0), (4, 1.0)]).state())


def tried(stream: CurriculumStream, rates: dict[int, float]) -> CurriculumStream:
    for index, rate in rates.items():
        stream.learn(index, rate)
    return stream


def test_a_curriculum_draws_what_teaches() -> None:
    """Problem i of 5 is solved in so many of 4 tries; each is drawn as often as its chance says, within 4 sigma."""
    epochs, rates = 2000, {0: 0.0, 1: 0.25, 2: 0.5, 3: 1.0}
    stream = tried(CurriculumStream(PromptStream(5, 1), 1), rates)
    chances = [0.1, 0.75, 1.0, 0.1, 1.0]
    taken = indices(stream.take(round(epochs * sum(chances))))
    for index, chance in enumerate(chances):
        assert abs(taken.count(index) - epochs * chance) <= 4 * (epochs * chance) ** 0.5
    assert CurriculumStream(PromptStream(5, 1), 1).take(50) == PromptStream(5, 1).take(50)


def drawn_like(scores: dict[int, float], rates: dict[int, float], sizes: tuple[int, ...] = (5,)) -> bool:
    """Whether problems with these mean scores are drawn as those of one set with these success rates."""
    total = sum(sizes)
    stream = tried(CurriculumStream(PromptStream(total, 1), 1, sizes=sizes), scores)
    return stream.take(200) == tried(CurriculumStream(PromptStream(total, 1), 1), rates).take(200)


def test_scores_outside_of_0_to_1_are_success_rates_in_the_range_of_their_set() -> None:
    """-1 and 1, as environments give them; costs; points of up to 8; and two sets, each of its own range."""
    rates = {0: 0.0, 1: 0.25, 2: 0.5, 3: 1.0}
    assert drawn_like({0: -1, 1: -0.5, 2: 0, 3: 1}, rates)
    assert drawn_like({0: -3, 1: -2, 2: -1, 3: 1}, rates)
    assert drawn_like({0: 0, 1: 2, 2: 4, 3: 8}, rates)
    assert drawn_like({0: 0, 1: 0.25, 2: 0.5}, {0: 0, 1: 0.25, 2: 0.5}), "within 0..1 nothing is stretched"
    assert drawn_like({0: 2, 1: 4, 2: 8, 3: 0.5, 4: 0.25}, {0: 0.25, 1: 0.5, 2: 1.0, 3: 0.5, 4: 0.25}, sizes=(3, 2))
    assert not drawn_like({0: -1, 1: -0.5, 2: 0, 3: 1}, {0: 0, 1: 0, 2: 0, 3: 1}), "held within 0..1"
    assert not drawn_like({0: 2, 1: 4, 2: 8, 3: 0.5}, {0: 0.25, 1: 0.5, 2: 1.0, 3: 0.0625}, sizes=(3, 2)), "one range"


@given(before=takes, after=takes, rates=st.dictionaries(st.integers(0, 6), st.floats(-9, 9), max_size=7))
def test_a_restored_curriculum_goes_on_as_if_nothing_had_happened(
    before: list[int], after: list[int], rates: dict[int, float]
) -> None:
    undisturbed = tried(CurriculumStream(PromptStream(7, 3), 3, sizes=(3, 4)), rates)
    for count in before:
        undisturbed.take(count)
    resumed = CurriculumStream(PromptStream(7, 3), 3, sizes=(3, 4))
    resumed.restore(json.loads(json.dumps(undisturbed.state())))
    assert [resumed.take(count) for count in after] == [undisturbed.take(count) for count in after]


def test_what_is_learned_between_takes_counts_at_once() -> None:
    """As for a stream that is made anew from the state before every take."""
    chance = random.Random(0)
    own = CurriculumStream(PromptStream(7, 3), 3, sizes=(3, 4))
    for _ in range(50):
        anew = CurriculumStream(PromptStream(7, 3), 3, sizes=(3, 4))
        anew.restore(own.state())
        assert own.take(2) == anew.take(2)
        own.learn(chance.randrange(7), chance.uniform(-9, 9))


def test_ranges_are_found_once_for_many_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a look at all that is known, and dynamic sampling draws one problem at a time."""
    looks: list[int] = []
    ranges = CurriculumStream._ranges

    def look(stream: CurriculumStream) -> dict[int, tuple[float, float]]:
        looks.append(1)
        return ranges(stream)

    monkeypatch.setattr(CurriculumStream, "_ranges", look)
    stream = tried(CurriculumStream(PromptStream(7, 3), 3), dict.fromkeys(range(7), 0.5))
    for count in (0, 1, -3, 1, 1):
        stream.take(count)
    assert len(looks) == 1


def test_a_curriculum_and_a_plain_order_are_not_resumed_as_each_other() -> None:
    plain, curriculum = PromptStream(3, 3), CurriculumStream(PromptStream(3, 3), 3)
    with pytest.raises(CheckpointError, match=r"expected that of a curriculum. Resume with the data.order that"):
        curriculum.restore(plain.state())
    with pytest.raises(CheckpointError, match="data position: got"):
        plain.restore(curriculum.state())
