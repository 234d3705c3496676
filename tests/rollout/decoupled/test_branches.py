"""Drafts for rejections that were foreseen."""

from __future__ import annotations

import pytest

from specactor.rollout.decoupled.branches import NONE, Guesses, chain
from specactor.rollout.decoupled.messages import Branch, pack
from specactor.rollout.decoupled.mirror import AHEAD
from tests.rollout.decoupled.network import WINDOW, World

TAIL = [1, 2, 3, 4]
BRANCHES = [
    Branch(accepted=0, bonus=9, tokens=pack([5, 6])),
    Branch(accepted=2, bonus=9, tokens=pack([7, 8])),
]


@pytest.mark.parametrize(
    ("known", "way"),
    [
        ([], TAIL),
        ([1, 2, 3], TAIL),
        ([1, 2, 3, 4], TAIL),
        ([9], [9, 5, 6]),
        ([9, 5], [9, 5, 6]),
        ([9, 6], []),
        ([1, 2, 9], [1, 2, 9, 7, 8]),
        ([1, 9], []),
        ([1, 2, 3, 9], []),
        ([1, 2, 9, 7, 8, 8], []),
    ],
)
def test_the_way_through_a_tail(known: list[int], way: list[int]) -> None:
    assert chain(TAIL, BRANCHES, known) == way


def guessed(*, runner_ups: list[int], window: int = 2) -> Guesses:
    """All that are wanted, for a draft from position 10 on; every token is 50."""
    guesses = Guesses(window)
    guesses.learn(10, runner_ups)
    while (guess := guesses.next(10)) is not None:
        guesses.extend(guess, [50])
    return guesses


def test_one_guess_per_position_of_the_window() -> None:
    guesses = guessed(runner_ups=[91, NONE, 93, 94], window=3)
    assert guesses.branches(10) == [
        Branch(accepted=0, bonus=91, tokens=pack([50] * 3)),
        Branch(accepted=2, bonus=93, tokens=pack([50] * 3)),
    ]
    assert guesses.num_tokens == 6 <= Guesses.bound(3)


def test_what_was_foreseen() -> None:
    guesses = guessed(runner_ups=[91, 92])
    assert guesses.after(10, [91]) == [50, 50]
    assert guesses.after(11, [92, 50]) == [50]
    assert guesses.after(11, [92, 50, 50]) == []
    assert guesses.after(11, [92, 51]) == []
    assert guesses.after(11, [91]) == []
    assert guesses.after(12, [91]) == []


def test_guesses_go_with_the_text_that_they_stand_on() -> None:
    guesses = guessed(runner_ups=[91, 92])
    assert guesses.drop_before(11) == 2
    assert guesses.branches(11) == [Branch(accepted=0, bonus=92, tokens=pack([50, 50]))]
    assert guesses.clear() == 2
    assert guesses.branches(11) == []
    assert guesses.next(11) is None


def test_a_continuer_without_an_answer_is_not_asked_again() -> None:
    guesses = Guesses(2)
    guesses.learn(10, [91])
    guess = guesses.next(10)
    assert guess is not None
    assert guesses.extend(guess, []) == 0
    assert guesses.next(10) is None
    assert guesses.branches(10) == []


@pytest.mark.parametrize("branching", [True, False])
@pytest.mark.parametrize("right", range(WINDOW))
def test_after_a_foreseen_rejection_a_draft_is_there_at_once(right: int, branching: bool) -> None:
    world = World(branching=branching)
    name = world.open(0, (1, 2, 3))
    world.settle(3)
    for _ in range(AHEAD * WINDOW * WINDOW):
        for drafter in range(2):
            world.step(drafter)
    world.deliver_all()
    world.commit(0, name, right, wrong=1)
    assert len(world.draft(0, name)) == (WINDOW if branching else 0)
    assert world.engines[0].tails.branched == int(branching)
    world.flush(0)
    world.deliver_all()
    [mirror] = (m for drafter in world.drafters for m in drafter.mirrors._oldest.values())
    assert mirror.num_ahead == (WINDOW if branching else 0), "the drafter goes on from there"
    world.check_quiet()
    world.check_closed()


def test_guesses_wait_until_no_draft_is_wanted() -> None:
    world = World(engines=1, drafters=1, branching=True)
    first = world.open(0, (1,))
    world.settle(3)
    world.open(0, (2,))
    world.commit(0, first, 1)
    world.flush(0)
    world.deliver_all()
    mirrors = world.drafters[0].mirrors
    assert [len(lane.tokens) for lane in mirrors.wanted(10)] == [0, AHEAD * WINDOW]
