"""Looks come often while they find something, and what they cost is bounded."""

from __future__ import annotations

from specactor.rollout.speculation.probing import (
    LOOK_AT_LEAST_EVERY,
    LOOK_EVERY,
    LOOK_SHARE,
    MAX_REST,
    BackOff,
    Look,
    Looks,
    Seen,
)


def until_over(rest: BackOff) -> int:
    """Plain rounds until the next look, which is in the last of them."""
    for rounds in range(1, 2 * MAX_REST):
        if rest.is_due():
            return rounds
    raise AssertionError("never")


def look(rest: BackOff, *, look_s: float = 0.0) -> int:
    rest.looked(look_s=look_s, plain_s=1.0)
    return until_over(rest)


def test_looks_that_find_nothing_become_rare() -> None:
    rest = BackOff()
    assert until_over(rest) == LOOK_EVERY
    waits = [look(rest) for _ in range(5)]
    assert waits == [2 * LOOK_EVERY, *[LOOK_AT_LEAST_EVERY] * 4]


def test_where_drafting_paid_looks_come_soon_again() -> None:
    rest = BackOff()
    for _ in range(5):
        look(rest)
    rest.restart()
    assert until_over(rest) == LOOK_EVERY


def test_looks_take_a_bounded_share_of_the_time() -> None:
    rest = BackOff()
    for look_s in (0.001, 0.1, 1.0, 10.0):
        rounds = look(rest, look_s=look_s)
        assert look_s <= LOOK_SHARE * rounds
    assert look(rest, look_s=1e9) == MAX_REST


def test_a_look_says_how_much_of_each_draft_was_right() -> None:
    one = Look(start=2, asked=3, drafts={"a": [5, 6, 7], "b": [5, 9], "c": []}, confidence={"a": 2})
    seen = [Seen("a", 3, 2, 3, 2), Seen("b", 2, 1, 3, None), Seen("c", 0, 0, 3, None)]
    assert list(one.seen([1, 1, 5, 6, 8, 7])) == seen


def test_drafts_count_as_far_as_a_request_went() -> None:
    """The ends of responses are as much worth as the rest: what verified drafts are judged by, looks are too."""
    looks = Looks()
    looks.keep("r", Look(start=2, asked=4, drafts={"a": [5, 6, 7, 8], "b": [9]}))
    assert list(looks.over("r", [1, 1, 5, 6])) == []
    assert list(looks.ended("r", [1, 1, 5, 6])) == [Seen("a", 2, 2, 2, None), Seen("b", 1, 0, 2, None)]
    assert not looks.has("r")
    looks.keep("r", Look(start=2, asked=4, drafts={"a": [5]}))
    assert list(looks.ended("r", [1, 1])) == []


def test_a_look_may_be_followed_by_another() -> None:
    rest = BackOff()
    rest.looked(look_s=0.4, plain_s=1.0, again=True)
    assert not rest.is_long
    assert until_over(rest) == 1
    assert look(rest, look_s=0.4) >= LOOK_EVERY


def test_what_is_left_of_a_rest_is_what_it_has() -> None:
    rest = BackOff()
    look(rest)
    rest.looked(look_s=0.0, plain_s=1.0)
    left = rest.rounds_left
    assert left > 0
    assert until_over(rest) == left + 1
