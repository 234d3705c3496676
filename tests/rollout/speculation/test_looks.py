"""Looks come often while they find something, and what they cost is bounded."""

from __future__ import annotations

import pytest

from specactor.rollout.speculation.acceptance import CONFIDENCES
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.probing import (
    FEW,
    LOOK_AT_LEAST_EVERY,
    LOOK_EVERY,
    LOOK_SHARE,
    MAX_REST,
    MOST_AGAIN,
    SOON,
    BackOff,
    Look,
    Looks,
)


def until_over(rest: BackOff, requests: int = 16) -> int:
    """Plain rounds until the next look, which is in the last of them."""
    for rounds in range(1, 2 * MAX_REST):
        if rest.count_round(requests):
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


def sequence(*output_ids: int) -> DraftSequence:
    return DraftSequence(request_id="r", prompt_ids=(1,), output_ids=[*output_ids])


@pytest.mark.parametrize(
    ("draft", "sure", "seen"),
    [([5, 6, 7], 2, (3, 2, 3, 2)), ([5, 9], CONFIDENCES, (2, 1, 3, CONFIDENCES)), ([], 0, (0, 0, 3, 0))],
)
def test_a_look_says_how_much_of_a_draft_was_right(draft: list[int], sure: int, seen: tuple[int, ...]) -> None:
    assert Look(sequence(1, 1, 5, 6, 8, 7), 2, 3, draft, sure).seen() == ("r", *seen)


def test_drafts_count_as_far_as_a_request_went() -> None:
    """The ends of responses are as much worth as the rest: what verified drafts are judged by, looks are too."""
    looks, one = Looks(), sequence(1, 1)
    looks.keep("a", Look(one, 2, 4, [5, 6, 7, 8], 3))
    looks.keep("b", Look(one, 2, 4, [9], 0))
    one.output_ids += [5, 6]
    assert looks.over() == {}
    assert looks.ended("r") == {"a": [("r", 2, 2, 2, 3)], "b": [("r", 1, 0, 2, 0)]}
    assert looks.ended("r") == {}
    looks.keep("a", Look(one, 4, 4, [5], 3))
    assert looks.ended("r") == {}, "nothing was emitted since"
    looks.keep("a", Look(one, 0, 4, [1], 3))
    assert looks.over() == {"a": [("r", 1, 1, 4, 3)]}
    assert looks.over() == {}


def test_a_look_may_be_followed_by_another() -> None:
    rest = BackOff()
    rest.paid()
    for _ in range(MOST_AGAIN):
        rest.looked(look_s=0.4, plain_s=1.0, requests=1)
        assert not rest.is_long
        assert until_over(rest) == 1
    rest.looked(look_s=0.4, plain_s=1.0, requests=1)
    assert until_over(rest) >= LOOK_EVERY, "until drafts are accepted again"
    rest.paid()
    rest.looked(look_s=0.4, plain_s=1.0, requests=FEW + 1)
    assert until_over(rest) >= LOOK_EVERY, "of many requests somebody would have had a draft"


def test_looks_in_every_round_have_a_price() -> None:
    """A drafter that takes as long as two rounds would make decoding three times as slow."""
    rest = BackOff()
    rest.paid()
    rest.looked(look_s=0.5, plain_s=1.0, requests=1)
    assert until_over(rest) == 1
    rest.looked(look_s=2.0, plain_s=1.0, requests=1)
    assert until_over(rest) >= 2.0 / LOOK_SHARE


def test_what_is_left_of_a_rest_is_what_it_has() -> None:
    rest = BackOff()
    look(rest)
    rest.looked(look_s=0.0, plain_s=1.0)
    left = rest.rounds_left
    assert left > 0
    assert until_over(rest) == left + 1


def test_half_as_many_requests_are_looked_at_soon() -> None:
    """What does not pay for many may pay for few, and a rest is long compared with the tail of a rollout."""
    rest = BackOff()
    for _ in range(3):
        look(rest)
    rest.looked(look_s=0.0, plain_s=1.0)
    assert not rest.count_round(16)
    assert until_over(rest, 9) == LOOK_AT_LEAST_EVERY - 1, "more than half are there"
    rest.looked(look_s=0.0, plain_s=1.0)
    assert not rest.count_round(16)
    assert until_over(rest, 8) == SOON + 1
    rest.looked(look_s=0.0, plain_s=1.0)
    assert until_over(rest, 8) == LOOK_AT_LEAST_EVERY, "they were looked at"
    rest.looked(look_s=1.0, plain_s=1.0)
    assert not rest.count_round(16)
    assert until_over(rest, 8) >= 1.0 / LOOK_SHARE - 1, "a dear look has its share, whoever runs"
