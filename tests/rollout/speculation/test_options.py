"""A sample of the requests costs its share of a round of all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.planner import Part, of_drafter


class Known:
    """Costs by a formula, with a jump."""

    def verify_s(self, requests: int, rows: int) -> float:
        return 1.0 + 0.1 * requests + 0.02 * rows + 0.5 * (rows > 1.5 * requests)

    def verify_curve(self, requests: int, max_rows: int) -> NDArray[np.float64]:
        return np.array([self.verify_s(requests, rows) for rows in range(requests, max_rows + 1)])

    def draft_s(self, drafter: str, requests: int) -> Callable[[int], float]:
        return lambda depth: 0.001 * requests * depth


@pytest.mark.parametrize("requests", [16, 17, 50, 64, 128])
def test_a_part_of_alike_requests_is_predicted_like_all(requests: int) -> None:
    sample, costs, model = 16, Known(), AcceptanceModel(max_window=6)
    part = Part(costs, sample=sample, requests=requests)
    sequences = [DraftSequence(request_id=str(i), prompt_ids=(1,)) for i in range(requests)]
    drafts = [[7] * 6 for _ in sequences]
    of_all = of_drafter("d", model, costs, sequences, [6] * requests, drafts)
    of_part = of_drafter("d", model, part, sequences[:sample], [6] * sample, drafts[:sample])
    assert of_part.tokens_per_s == pytest.approx(of_all.tokens_per_s, rel=0.02)
    assert of_part.windows[0] == of_all.windows[0]


def test_a_part_costs_its_share() -> None:
    part = Part(Known(), sample=16, requests=64)
    assert part.verify_s(16, 40) == pytest.approx(Known().verify_s(64, 160) / 4)
    assert part.verify_curve(16, 40)[-1] == pytest.approx(part.verify_s(16, 40))
    assert part.draft_s("d", 16)(3) == pytest.approx(Known().draft_s("d", 64)(3) / 4)
