"""The benchmark of the draft protocol measures what it says, with and without keys."""

from __future__ import annotations

import pytest

from benchmarks import draft_protocol
from benchmarks.draft_protocol import Cost, aims, measure
from specactor.rollout.decoupled.transport import local_endpoint


@pytest.mark.parametrize("curve", [False, True])
def test_drafts_flow_while_it_measures(curve: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_protocol, "FIRST_ROUNDS", 3)
    cost = measure(6, local_endpoint(), curve=curve, rounds=40)
    assert len(cost.control_ms) == 40
    assert min(cost.control_ms) > 0
    assert 0 < cost.drafted <= draft_protocol.WINDOW


def test_the_page_says_which_aims_are_missed() -> None:
    def costs(*medians: float) -> list[Cost]:
        return [Cost(control_ms=[0.0, ms, 9.0], drafted=1.0) for ms in medians]

    said = aims({1: costs(5.0), 64: costs(0.2, 0.3), 256: costs(1.0, 1.25, 1.5)})
    assert said.endswith(
        "aims: 0.3 ms at 64 requests: met (0.20-0.30); 1 ms at 256 requests: met by 1 of 3 (1.00-1.50)."
    )
    assert "64 requests: missed (0.50-0.50)" in aims({64: costs(0.5), 256: costs(0.5)})
