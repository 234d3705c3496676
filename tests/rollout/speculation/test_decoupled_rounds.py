"""Speeds of decoupled rounds of a batch are those that a scalar loop finds for every request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor.rollout.speculation.costs import CostTable, Grid
from specactor.rollout.speculation.decoupled_rounds import LiveCosts, speeds
from tests.lib.pipelined import pipelined

W = 4
AXIS = (1.0, 64.0)


def grid(base_s: float, per_request_s: float, per_each_s: float) -> Grid:
    each = (1.0, 2.0, 9.0)
    return Grid(
        requests=AXIS,
        per_request=each,
        seconds=tuple(tuple(base_s + n * per_request_s + k * per_each_s for k in each) for n in AXIS),
    )


TABLE = CostTable(
    model="m",
    device="d",
    date="",
    verify=grid(0.010, 1e-4, 0.0005),
    plain=Grid(requests=AXIS, per_request=(1.0,), seconds=((0.0095,), (0.016,))),
    drafters={},
)
REMOTE = grid(1e-4, 1e-5, 0.002)


def one_by_one(survival: tuple[float, ...], requests: int) -> list[float]:
    """Speeds by window, by scalars."""
    verify_s = [TABLE.verify.at(requests, k) for k in range(1, W + 2)]
    found = []
    for w in range(1, W + 1):
        rounds = pipelined(survival, w)
        whole_s = np.interp(1 + w * rounds.ready, range(1, W + 2), verify_s)
        found.append(rounds.tokens / max(whole_s, REMOTE.at(2 * requests, w + 1) + 2e-4))
    return found


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.floats(0.01, 1), min_size=W, max_size=W), min_size=1, max_size=6))
def test_every_request_as_one_by_one(steps: list[list[float]]) -> None:
    survival_BW = np.cumprod(np.array(steps), axis=1)
    live = LiveCosts.of(TABLE, requests=8, max_window=W, remote=REMOTE, served=16, message_s=2e-4)
    wanted = np.array([one_by_one(tuple(row), 8) for row in survival_BW.tolist()])
    assert live.plain_s == TABLE.plain_s(8)
    assert speeds(survival_BW, live) == pytest.approx(wanted)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(AssertionError):
        LiveCosts.of(TABLE, requests=1, max_window=W, remote=REMOTE, served=0)
