"""Waits that are within each other: who waits for somebody must not give up before that one does."""

from __future__ import annotations

from specactor import waits
from specactor.parallel import failure
from specactor.rollout import child_process, endpoint, process_guard
from specactor.rollout.decoupled.engine_side import BEAT_EVERY_S


def test_who_waits_for_another_waits_longer() -> None:
    assert waits.LOOK_EVERY_S < waits.RETRY_PAUSE_S < waits.MOMENT_S < waits.GRACE_S < waits.LATE_S < waits.SILENT_S
    assert waits.SILENT_S < waits.ANSWER_S < waits.BULK_S
    assert process_guard.GRACE_S < child_process.LATE_S, "a guard ends its process before it is ended itself"
    assert failure.GRACE_S < failure.LATE_S, "others wait for the report of one that stays to be asked"
    assert endpoint.ANSWER_S < 600, "when OpenAI's client hangs up"


def test_signs_of_life_may_be_lost() -> None:
    """A failed rank stays for `GRACE_S`, so that other hosts' ranks hear of it when they give a sign of life."""
    assert 2 * waits.SIGN_OF_LIFE_S < waits.GRACE_S
    assert 3 * BEAT_EVERY_S < waits.MOMENT_S
