"""What refreshes have done for acceptance is told from ended rollouts alone, and survives a checkpoint."""

from __future__ import annotations

import json

from specactor.rollout.draft.counts import Counts
from specactor.trainer.distillation.history import History, accept_length


def counts(emitted: int, verifies: int) -> Counts:
    return Counts(emitted=emitted, verifies=verifies)


def test_accept_length_is_that_of_what_the_draft_model_drafted() -> None:
    drafted = {"model": counts(30, 10), "decoupled": counts(10, 10), "suffix": counts(99, 10), "off": counts(5, 0)}
    assert accept_length(drafted) == 2.0
    assert accept_length({"suffix": counts(99, 10)}) is None
    assert accept_length({}) is None


def test_a_refresh_is_judged_by_the_first_rollout_after_it() -> None:
    history = History()
    history.rollout(2.0)
    history.refreshed()
    assert (history.fresh, history.gain) == (None, None)
    history.rollout(None)  # nothing was drafted: says nothing
    assert history.waits
    history.rollout(3.0)
    history.rollout(2.5)
    assert (history.before, history.fresh, history.gain, history.last, history.steps_since) == (2.0, 3.0, 1.5, 2.5, 3)


def test_the_outlook_of_a_run_that_begins() -> None:
    history = History()
    history.rollout(None)
    outlook = history.outlook(rollout_s=1.0, refresh_s=0.1, steps_left=3)
    assert (outlook.accept_length, outlook.fresh_accept_length, outlook.gain, outlook.steps_since) == (
        1.0,
        None,
        None,
        1,
    )


def test_a_checkpoint_keeps_all_of_it() -> None:
    history = History()
    for accepted in (2.0, 1.5, None):
        history.rollout(accepted)
        history.refreshed()
    history.rollout(3.0)
    assert History.of(json.loads(json.dumps(history.state()))) == history


def test_what_was_reached_is_missed_for_a_while() -> None:
    history = History()
    assert not history.is_lost
    lost = []
    for accepted in (4.0, 3.7, None, *[3.0] * 15):
        history.rollout(accepted)
        lost.append(history.is_lost)
    assert lost[:3] == [False] * 3
    assert lost[3:] == sorted(lost[3:], reverse=True), "the new level becomes usual"
    assert 5 < sum(lost) < 12
    history.rollout(4.0)
    assert not history.is_lost
    assert History.of({"last": 2.0}).is_lost is False, "an older checkpoint does not say"
