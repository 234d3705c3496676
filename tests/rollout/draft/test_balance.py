"""Mode auto loses little against plain decoding, whatever it believes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor.rollout.draft.balance import AT_ONCE, MOST, STAKE, START, TRIAL_SHARE, Balance

PLAIN_S = 2**-7


def rests(of: Balance) -> int:
    """Plain rounds until something may be tried."""
    rounds = 0
    while of.left(PLAIN_S):
        of.rested(PLAIN_S, plain_s=PLAIN_S, after_another=False)
        rounds += 1
        assert rounds < 10_000
    return rounds


def test_what_may_be_lost_at_the_start() -> None:
    of = Balance()
    lost = 0.0
    while not of.left(PLAIN_S):
        of.drafted(-PLAIN_S / 2, plain_s=PLAIN_S)
        lost += PLAIN_S / 2
    assert START * PLAIN_S < lost <= (START + 1) * PLAIN_S
    left = of.left(PLAIN_S)
    assert rests(of) == pytest.approx(left, abs=1)
    assert left == pytest.approx((STAKE + 0.5) / TRIAL_SHARE, abs=2)


def test_what_was_won_may_be_lost_again_up_to_a_bound() -> None:
    of = Balance()
    for _ in range(1000):
        of.drafted(PLAIN_S, plain_s=PLAIN_S)
    rounds = 0
    while not of.left(PLAIN_S):
        of.drafted(-PLAIN_S, plain_s=PLAIN_S)
        rounds += 1
    assert rounds == MOST + 1


def test_a_stall_counts_for_little() -> None:
    of = Balance()
    of.drafted(-1000.0, plain_s=PLAIN_S)
    assert rests(of) <= (STAKE + AT_ONCE) / TRIAL_SHARE


def test_plain_rounds_alone_pay_for_no_more_than_the_stake() -> None:
    of = Balance()
    of.looked(START * PLAIN_S + 1e-9, plain_s=PLAIN_S)
    for _ in range(10_000):
        of.rested(PLAIN_S, plain_s=PLAIN_S, after_another=False)
    of.looked(1.1 * STAKE * PLAIN_S, plain_s=PLAIN_S)
    assert of.left(PLAIN_S)


def test_work_that_the_next_plain_round_did_is_charged() -> None:
    of = Balance()
    of.looked(START * PLAIN_S - 1e-4, plain_s=PLAIN_S)
    assert not of.left(PLAIN_S)
    of.rested(PLAIN_S + 1e-3, plain_s=PLAIN_S, after_another=False)
    assert not of.left(PLAIN_S)
    of.rested(PLAIN_S + 1e-3, plain_s=PLAIN_S, after_another=True)
    assert of.left(PLAIN_S)


def test_only_what_drafts_won_pays_for_looks_in_every_round() -> None:
    of = Balance()
    assert not of.pays_for(1e-3)
    of.drafted(4e-3, plain_s=PLAIN_S)
    assert of.pays_for(1e-3)
    of.looked(1e-3, plain_s=PLAIN_S)
    of.looked(1e-3, plain_s=PLAIN_S)
    assert not of.pays_for(1e-3)
    of.promised(4e-3, plain_s=PLAIN_S)
    assert of.pays_for(1e-3)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("dlr"), st.floats(-0.1, 0.1)), max_size=200))
def test_the_loss_is_bounded_whatever_happens(rounds: list[tuple[str, float]]) -> None:
    """Rounds are as the engine's: plain ones while nothing is left."""
    of = Balance()
    lost = plain = 0.0
    for kind, seconds in rounds:
        if kind == "r" or of.left(PLAIN_S):
            of.rested(PLAIN_S, plain_s=PLAIN_S, after_another=False)
            plain += PLAIN_S
            continue
        won = max(seconds, -AT_ONCE * PLAIN_S) if kind == "d" else -min(abs(seconds), AT_ONCE * PLAIN_S)
        (of.drafted if kind == "d" else lambda s, plain_s: of.looked(-s, plain_s=plain_s))(won, plain_s=PLAIN_S)
        lost -= won
    assert lost <= (START + AT_ONCE) * PLAIN_S + TRIAL_SHARE * plain + 1e-9
