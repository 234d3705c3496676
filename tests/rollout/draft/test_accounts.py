"""A machine that is slow for a while says nothing of drafts; rounds that are long of themselves do."""

from __future__ import annotations

import pytest

from specactor.rollout.draft import accounts
from specactor.rollout.draft.accounts import Accounts
from specactor.rollout.draft.decision import Decision
from specactor.rollout.draft.verification import Credit
from specactor.rollout.planning.costs import CostTable
from specactor.rollout.planning.online_costs import OnlineCosts

PLAIN_S, ROUND_S = 0.01, 0.015
GOOD = 3
"""Rounds that win half a plain one each."""


def handicap(slow: float, *, is_steady: bool = True, rounds: int = 3) -> float:
    """After good rounds and some that take so many times as long."""
    points = [(1, k, ROUND_S) for k in (2, 4)]
    costs = OnlineCosts(CostTable.fit(points, plain=[(1, 1, PLAIN_S)]))
    of = Accounts(["d"], costs)
    for k in range(GOOD + rounds):
        decision = Decision(drafter="d", windows=[3], depth=3, drafts=[[1, 2, 3]], predicted_s=ROUND_S)
        credit = Credit(first=0, drafted=3, accepted=1, agreed=1, reached=True)
        round_s = ROUND_S if k < GOOD else slow * ROUND_S
        of.round(decision, [[credit]], 1, round_s=round_s, is_steady=is_steady)
    return of.balance.handicap


def test_a_slow_machine_is_no_loss_by_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert handicap(3.0) == 0.0
    monkeypatch.setattr(accounts, "STALL", float("inf"))
    assert handicap(3.0) > 0.5


def test_rounds_that_stay_long_are_losses() -> None:
    assert handicap(3.0, rounds=60) > 0.5


def test_catching_up_is_charged() -> None:
    assert handicap(3.0, is_steady=False) > 0.5
