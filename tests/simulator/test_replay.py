"""A run's metrics become distributions that give them back."""

from __future__ import annotations

import numpy as np
import pytest

from specactor.errors import DataError
from specactor.simulator.replay import of_metrics

LINE = {
    "step": 1,
    "response/length_mean": 100.0,
    "response/length_p95": 250,
    "response/length_max": 400,
    "rollout/responses": 64,
    "train/tokens_per_s": 900.0,
    "time/sync_s": 0.25,
    "speculation/small/drafted_at_1": 100,
    "speculation/small/accepted_at_1": 80,
    "speculation/small/drafted_at_2": 100,
    "speculation/small/accepted_at_2": 40,
    "speculation/off/share_of_rounds": 0.5,
}


def test_metrics_come_back() -> None:
    found = of_metrics([{"step": 0}, LINE, {**LINE, "step": 2}], max_window=4)
    lengths = np.array(found.lengths.observed)
    assert lengths.mean() == pytest.approx(100, rel=0.1)
    assert np.quantile(lengths, 0.95) == pytest.approx(250, rel=0.15)
    assert found.lengths.longest == 400
    assert set(found.methods) == {"small"}
    assert found.methods["small"].by_position == pytest.approx((0.8, 0.5)), "40 of the 80 whose first was accepted"
    assert (found.responses, found.train_tokens_per_s, found.sync_s) == (64, 900.0, 0.25)


def test_metrics_without_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="response/length_mean"):
        of_metrics([{"step": 0, "accuracy/eval": 0.5}], max_window=4)
