"""What refreshes have done for acceptance is told from what has ended alone, and survives a checkpoint."""

from __future__ import annotations

import json
import math
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.draft.counts import Counts
from specactor.trainer.distillation.history import RECENT, Drafted, History, accept_length


def counts(emitted: int, verifies: int, drafted: int = 0) -> Counts:
    return Counts(emitted=emitted, verifies=verifies, drafted=drafted)


def rollout(accepted: float | None) -> Drafted | None:
    return None if accepted is None else Drafted(accept_length=accepted, window=4.0, share=0.5)


def test_what_the_draft_model_drafted_is_told_from_the_rest() -> None:
    per_drafter = {
        "model": counts(30, 10, 40),
        "decoupled": counts(10, 10, 20),
        "suffix": counts(99, 20),
        "off": counts(60, 0),
    }
    # 20 rounds of 20 + 20 with drafts and 200 - 139 without
    assert Drafted.of(per_drafter, 200) == Drafted(accept_length=2.0, window=3.0, share=20 / (40 + 61))
    assert Drafted.of({"suffix": counts(99, 10)}, 99) is None
    assert Drafted.of({}, 10) is None


@given(st.floats(0, 1), st.integers(0, 16))
def test_tokens_per_verify_are_those_of_independent_positions(a: float, window: int) -> None:
    assert accept_length(a, window) == pytest.approx(sum(a**i for i in range(window + 1)), rel=1e-6)


def test_refreshes_are_judged_on_what_they_did_not_learn_from() -> None:
    history = History()
    history.rollout(rollout(2.0))
    found = []
    for after in (0.6, 0.5, 0.6):
        assert history.gain is None, "too few"
        history.refreshed(0.5, after)
        found.append(math.log(accept_length(after, 4) / accept_length(0.5, 4)))
    error = stdev(found) / math.sqrt(3)
    assert history.gain == pytest.approx(math.exp(mean(found) + error)), "it may well be more than the mean"
    history.refreshed(math.nan, math.nan)
    assert history.gain == pytest.approx(math.exp(mean(found) + error)), "one that was not judged says nothing"
    for _ in range(RECENT):
        history.refreshed(0.5, 0.5)
    assert history.gain == 1.0, "old ones do not count"


def test_refreshes_with_less_than_the_whole_learning_rate_say_nothing() -> None:
    history = History()
    history.rollout(rollout(2.0))
    for _ in range(4):
        history.refreshed(0.5, 0.51, counts=False)
    assert (history.gain, history.refreshes, history.steps_since) == (None, 0, 0)


def test_rollouts_without_drafts_leave_what_is_known() -> None:
    history = History()
    history.rollout(rollout(3.0))
    history.rollout(None)
    assert (history.last, history.window, history.share, history.steps_since) == (3.0, 4.0, 0.0, 2)
    history.refreshed(0.5, 0.5)
    assert history.steps_since == 0


def test_a_checkpoint_keeps_all_of_it() -> None:
    history = History()
    for accepted in (2.0, 1.5, None):
        history.rollout(rollout(accepted))
        history.refreshed(0.4, 0.5)
    history.rollout(rollout(3.0))
    assert History.of(json.loads(json.dumps(history.state()))) == history


def test_a_checkpoint_of_another_version_is_taken_as_far_as_it_goes() -> None:
    history = History.of({"last": 2.0, "fresh": 2.5, "waits": True})
    assert (history.last, history.gain, history.is_lost) == (2.0, None, False)


def test_what_was_reached_is_missed_for_a_while() -> None:
    history = History()
    assert not history.is_lost
    lost = []
    for accepted in (4.0, 3.7, None, *[3.0] * 15):
        history.rollout(rollout(accepted))
        lost.append(history.is_lost)
    assert lost[:3] == [False] * 3
    assert lost[3:] == sorted(lost[3:], reverse=True), "the new level becomes usual"
    assert 5 < sum(lost) < 12
    history.rollout(rollout(4.0))
    assert not history.is_lost
