"""A whole run whose rollouts come from a program that knows the openai client alone: drafts change nothing of it.

Deep: `rollout/sglang/test_endpoint.py` shows that drafts change no token of a session; this trains on sessions, thrice.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specactor.metrics import read_metrics
from specactor.replay import records
from specactor.replay.compare import first_difference
from specactor.replay.records import StepRecord
from tests.end_to_end.agent_run import RUNS
from tests.end_to_end.conftest import ROOT
from tests.end_to_end.test_run import deterministic

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    command = [sys.executable, "-m", "tests.end_to_end.agent_run", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs"


def recorded(run: Path) -> list[StepRecord]:
    return [records.read(records.file_of(run, step)) for step in records.steps_of(run)]


def learned(run: Path) -> list[tuple[object, ...]]:
    """Tokens, log-probabilities, rewards and advantages of every session, and the weights after every step."""
    return [
        (r.step, [(s.request_id, s.whole, s.branches, s.reward, s.advantage) for s in r.samples], r.weights)
        for r in recorded(run)
    ]


def test_a_program_teaches_the_policy(runs: Path) -> None:
    first, second = read_metrics(runs / "plain")[1:]
    assert [first["weights/version"], second["weights/version"]] == [1, 2]
    for line in (first, second):
        assert line["train/sequences"] == 8
        assert line["environment/failed"] == 0
        assert line["environment/turns_mean"] == 2
        assert float(str(line["policy/grad_norm"])) > 0
        assert float(str(line["agreement/logprob_gap_max"])) < 1e-4
    assert [[s.branches for s in r.samples] for r in recorded(runs / "plain")] == [[], [0] * 8, [0] * 8]


def test_drafts_change_no_token_and_no_metric(runs: Path) -> None:
    lines = read_metrics(runs / "drafting")
    assert any(float(str(line.get("speculation/suffix/accepted", 0))) > 0 for line in lines)
    assert deterministic(runs / "drafting") == deterministic(runs / "plain")
    assert learned(runs / "drafting") == learned(runs / "plain")
    held_out = [sorted((runs / name / "evaluations").iterdir()) for name in ("plain", "drafting")]
    assert len(held_out[0]) == 2
    assert [file.read_text() for file in held_out[0]] == [file.read_text() for file in held_out[1]]
    assert first_difference(recorded(runs / "plain"), recorded(runs / "drafting")) is None


def test_wrong_noise_of_drafts_is_caught(runs: Path) -> None:
    assert len(RUNS["wrong"]) == 2
    assert learned(runs / "wrong") != learned(runs / "plain")
    found = first_difference(recorded(runs / "plain"), recorded(runs / "wrong"))
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize("name", RUNS)
def test_the_audit_sees_the_first_turns_of_sessions(runs: Path, name: str) -> None:
    lines = read_metrics(runs / name)[1:]
    assert all(0 < float(str(line["audit/scored"])) < float(str(line["rollout/tokens"])) for line in lines)
    assert (sum(float(str(line["audit/unpicked"])) for line in lines) > 0) == (name == "wrong")
