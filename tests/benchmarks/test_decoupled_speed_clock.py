"""A batch whose requests end is slower than one that goes on, by what its last requests wait for each other."""

from __future__ import annotations

import pytest

from benchmarks.decoupled_speed_clock import Text, coupled, coupled_of_endless, decoupled, decoupled_of_endless
from specactor.planning.plans import Pace
from specactor.rollout.speculation.costs import Grid

FLAT = Grid(requests=(1.0,), per_request=(1.0,), seconds=((0.01,),))


def pace(requests: int, token_s: float = 1e-4) -> Pace:
    return Pace(requests=requests, round_s=FLAT, token_s=token_s, message_s=0.0, most=16)


def test_drafts_that_are_all_right_end_together() -> None:
    played = coupled(1.0, 4, pace(8), tokens=95)
    assert (played.rounds, played.seconds) == (19, pytest.approx(0.19))
    assert coupled_of_endless(1.0, 4, pace(8), tokens=95, engines=2) == pytest.approx(1.0)
    assert decoupled_of_endless(1.0, 4, pace(8), tokens=1000) == pytest.approx(1.0, rel=0.02)


def test_drafts_that_are_never_right_cost_nothing_but_rounds() -> None:
    assert coupled(0.0, 4, pace(2), tokens=95).rounds == 95
    played = decoupled(0.0, 4, pace(2), tokens=95)
    assert (played.rounds, played.tokens) == (95, 190)


def test_the_last_request_is_waited_for() -> None:
    one, many = (coupled_of_endless(0.7, 4, pace(n), tokens=95, engines=1) for n in (1, 16))
    assert many < 0.92 < one
    assert coupled_of_endless(0.7, 4, pace(16), tokens=95, engines=2) < many
    assert decoupled_of_endless(0.7, 4, pace(16), tokens=95) < 0.92


def test_a_tail_on_another_prefix_is_not_verified() -> None:
    text = Text(committed=5, known=5, end=5)
    text.draft(right=True, arrives_s=1.0)
    text.draft(right=False, arrives_s=2.0)
    assert text.verified(0.5, 4) == (0, 0), "it has not arrived"
    assert text.verified(1.0, 4) == (1, 1)
    assert text.verified(2.0, 4) == (2, 1)
    text.committed = 7
    assert text.verified(2.0, 4) == (0, 0), "position 6 is another token"
    text.hear(7)
    assert (text.end, text.wrong) == (7, None)
