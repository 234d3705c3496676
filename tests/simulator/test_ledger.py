"""The ledger finds a device that does two things at once."""

from __future__ import annotations

import pytest

from specactor.errors import PlanError
from specactor.simulator.ledger import Span, busy_s, checked, merged, moved


def span(first: int, devices: int, start_s: float, end_s: float, kind: str = "off") -> Span:
    return Span(first=first, devices=devices, start_s=start_s, end_s=end_s, kind=kind)


def test_two_things_at_once_are_found() -> None:
    fine = [span(0, 2, 0, 1), span(2, 2, 0.5, 2), span(0, 2, 1, 3)]
    assert checked(fine, 4) == fine
    with pytest.raises(PlanError, match=r"device 1 got .* while it was busy until 1"):
        checked([*fine, span(1, 1, 0.9, 1.1)], 4)
    with pytest.raises(PlanError, match=r"devices 0\.\.2"):
        checked(fine, 3)
    with pytest.raises(PlanError, match="an end after the start"):
        checked([span(0, 1, 2, 1)], 4)


def test_spans_that_follow_each_other_are_merged() -> None:
    spans = [span(0, 2, 0, 1), span(0, 2, 1, 2), span(0, 2, 2, 3, "coupled"), span(0, 2, 4, 4)]
    assert merged(spans) == [span(0, 2, 0, 2), span(0, 2, 2, 3, "coupled")]
    assert busy_s(merged(spans)) == {"off": 4.0, "coupled": 2.0}
    assert moved([span(0, 1, 0, 1)], by_s=2.0) == [span(0, 1, 2.0, 3.0)]
