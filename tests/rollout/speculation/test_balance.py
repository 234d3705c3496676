"""After losses mode auto trusts predictions less, and what is much faster is tried at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.speculation import probing
from specactor.rollout.speculation.planner import ENTRY_MARGIN
from specactor.rollout.speculation.probing import AT_ONCE, HANDICAP, MOST, TRIAL_SHARE, Balance
from specactor.rollout.speculation.windows import OFF, Choice, Option
from tests.rollout.speculation.world import Coin, World, auto

PLAIN_S = 2**-7


def after_losing(rounds: float) -> Balance:
    of = Balance()
    while rounds > 0:
        of.drafted(-min(rounds, AT_ONCE) * PLAIN_S, plain_s=PLAIN_S)
        rounds -= AT_ONCE
    return of


def test_the_handicap_grows_with_what_was_lost_and_is_bounded() -> None:
    assert Balance().handicap == 0.0
    assert after_losing(2.0).handicap == pytest.approx(2 * HANDICAP)
    assert after_losing(1000.0).handicap == pytest.approx(MOST * HANDICAP)


def test_plain_rounds_forgive_it() -> None:
    of = after_losing(2.0)
    for _ in range(round(1 / TRIAL_SHARE)):
        of.rested(PLAIN_S, plain_s=PLAIN_S, after_drafts=False)
    assert of.handicap == pytest.approx(HANDICAP)
    for _ in range(1000):
        of.rested(PLAIN_S, plain_s=PLAIN_S, after_drafts=False)
    of.drafted(-PLAIN_S, plain_s=PLAIN_S)
    assert of.handicap == pytest.approx(HANDICAP), "rest earns nothing"


def test_what_was_won_long_ago_does_not_pay() -> None:
    of = Balance()
    for _ in range(1000):
        of.drafted(PLAIN_S, plain_s=PLAIN_S)
    for _ in range(int(MOST)):
        assert of.handicap == 0.0
        of.drafted(-PLAIN_S, plain_s=PLAIN_S)
    of.drafted(-PLAIN_S, plain_s=PLAIN_S)
    assert of.handicap > 0


def test_a_stall_counts_for_little() -> None:
    of = Balance()
    of.drafted(-1000.0, plain_s=PLAIN_S)
    assert of.handicap == pytest.approx(AT_ONCE * HANDICAP)


def test_looks_are_no_losses() -> None:
    """However often there are any: else new requests, which bring looks, would keep good drafts from being tried."""
    of = Balance()
    for _ in range(1000):
        of.looked(PLAIN_S, plain_s=PLAIN_S)
        of.rested(PLAIN_S, plain_s=PLAIN_S, after_drafts=False)
    assert of.handicap == 0.0
    for _ in range(1000):
        of.looked(-PLAIN_S, plain_s=PLAIN_S)
    assert not of.pays_for(PLAIN_S / 100, plain_s=PLAIN_S), "nor do they win anything"


def test_new_weights_halve_what_was_lost() -> None:
    of = after_losing(2.0)
    of.renewed(0.5)
    assert of.handicap == pytest.approx(HANDICAP)


def test_work_that_the_next_plain_round_did_is_charged() -> None:
    of = Balance()
    of.rested(2 * PLAIN_S, plain_s=PLAIN_S, after_drafts=False)
    assert of.handicap == 0.0
    of.rested(2 * PLAIN_S, plain_s=PLAIN_S, after_drafts=True)
    assert of.handicap > 0


def test_only_what_drafts_won_pays_for_looks_in_every_round() -> None:
    of, look_s = Balance(), PLAIN_S / 10
    assert not of.pays_for(look_s, plain_s=PLAIN_S)
    of.drafted(4 * look_s, plain_s=PLAIN_S)
    assert of.pays_for(look_s, plain_s=PLAIN_S)
    of.looked(1.5 * look_s, plain_s=PLAIN_S)
    assert not of.pays_for(look_s, plain_s=PLAIN_S)
    of.promised(4 * look_s, plain_s=PLAIN_S)
    assert of.pays_for(look_s, plain_s=PLAIN_S)


@given(st.lists(st.tuples(st.sampled_from("dlpr"), st.floats(-1e3, 1e3)), max_size=100))
def test_it_stays_within_its_bounds(rounds: list[tuple[str, float]]) -> None:
    of = Balance()
    for kind, seconds in rounds:
        if kind == "r":
            of.rested(abs(seconds), plain_s=PLAIN_S, after_drafts=seconds > 0)
        else:
            {"d": of.drafted, "l": of.looked, "p": of.promised}[kind](seconds, plain_s=PLAIN_S)
        assert 0.0 <= of.handicap <= HANDICAP * MOST
        assert not of.pays_for(MOST * PLAIN_S, plain_s=PLAIN_S)


def chosen(gain: float, lost: float) -> str:
    """What mode auto takes if drafting is predicted to be so much faster than plain decoding."""
    world = World(auto(), Coin(0.5))
    world.play(100)
    world.speculator.planner.current = OFF
    world.speculator.estimates.balance = after_losing(lost)
    plain_s = world.speculator.costs.plain_s(4)
    choice = Choice(windows=(1, 1, 1, 1), emitted=4.0 * gain, round_s=plain_s)
    return world.speculator.planner.choose({"coin": Option(choice=choice)}, 4).drafter


@pytest.mark.parametrize(
    ("gain", "lost", "expected"),
    [
        (1 + ENTRY_MARGIN / 2, 0.0, OFF),
        (1.2, 0.0, "coin"),
        (1.2, 2.0, OFF),
        (2.0, 2.0, "coin"),
        (2.0, 100.0, OFF),
        (3.0, 100.0, "coin"),
    ],
)
def test_much_faster_is_tried_at_once_and_a_little_faster_only_without_losses(
    gain: float, lost: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(gain, lost) == expected
    if lost and expected == OFF:
        monkeypatch.setattr(probing, "HANDICAP", 0.0)
        assert chosen(gain, lost) == "coin"
