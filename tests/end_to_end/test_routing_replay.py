"""Replaying the engine's experts: exact where nothing differs, and as near as a dense model where roundings do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specactor.metrics import read_metrics
from tests.end_to_end.conftest import ROOT
from tests.end_to_end.replay_run import RUNS

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("replay")
    command = [sys.executable, "-m", "tests.end_to_end.replay_run", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        name: [{k: float(str(v)) for k, v in line.items()} for line in read_metrics(folder / "runs" / name)]
        for name in RUNS
    }


def test_in_float32_replay_with_speculation_changes_no_log_probability(
    lines: dict[str, list[dict[str, float]]],
) -> None:
    """Of the first update. In the second one free routers choose by weights that the first one changed."""
    families = ("reward", "response", "agreement", "correction")
    (free, _), (replayed, _) = lines["exact-free"], lines["exact-replayed"]
    names = [name for name in free if name.partition("/")[0] in families]
    assert "agreement/logprob_gap_mean" in names
    assert {name: replayed[name] for name in names} == {name: free[name] for name in names}
    assert replayed["rollout/expert_bytes"] > 0


def test_with_rounded_weights_the_gap_falls_to_that_of_a_dense_model(lines: dict[str, list[dict[str, float]]]) -> None:
    """A token that goes to another expert in the trainer is far away; two steps, each of 16 responses."""

    def gap(name: str) -> float:
        return max(line["agreement/logprob_gap_max"] for line in lines[name])

    assert gap("rounded-free") > 2 * gap("rounded-replayed")
    assert gap("rounded-replayed") < 2 * gap("rounded-dense")
