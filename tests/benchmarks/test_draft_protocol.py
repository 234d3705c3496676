"""The benchmark of the draft protocol measures what it says, with and without keys."""

from __future__ import annotations

import pytest

from benchmarks import draft_protocol
from benchmarks.draft_protocol import measure
from specactor.rollout.decoupled.transport import local_endpoint


@pytest.mark.parametrize("curve", [False, True])
def test_drafts_flow_while_it_measures(curve: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_protocol, "FIRST_ROUNDS", 3)
    cost = measure(6, local_endpoint(), curve=curve, rounds=10)
    assert len(cost.control_ms) == 10
    assert min(cost.control_ms) > 0
    assert 0 < cost.drafted <= draft_protocol.WINDOW
