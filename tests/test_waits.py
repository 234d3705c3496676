"""Waits that are within each other: who waits for somebody must not give up before that one does."""

from __future__ import annotations

from specactor import waits
from specactor.rollout.decoupled.engine_side import BEAT_EVERY_S


def test_who_waits_for_another_waits_longer() -> None:
    assert waits.LOOK_EVERY_S < waits.RETRY_PAUSE_S < waits.MOMENT_S < waits.GRACE_S < waits.LATE_S < waits.SILENT_S
    assert waits.SILENT_S < waits.ANSWER_S < waits.BULK_S


def test_signs_of_life_may_be_lost() -> None:
    """A failed rank stays for `GRACE_S`, so that other hosts' ranks hear of it when they give a sign of life."""
    assert 2 * waits.SIGN_OF_LIFE_S < waits.GRACE_S
    assert 3 * BEAT_EVERY_S < waits.MOMENT_S
