"""A run whose default group stands for NCCL's: what goes through it is the trainer's, and nothing while engines run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Launcher

SCRIPT = Path(__file__).with_name("nccl_rules_run.py")


@pytest.mark.deep
def test_only_tensors_of_the_model_go_through_nccl_and_none_while_engines_generate(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checkpoint, evaluation, weight sync and export. The control plane has a group of gloo's."""
    monkeypatch.setenv("NCCL_RULES", str(tmp_path))
    run = launcher.run("nccl-rules", "--train.steps", "1", "--eval.problems", "4", script=SCRIPT)
    assert run.code == 0, run.output
    for rank in range(2):
        calls = json.loads((tmp_path / f"{rank}.json").read_text())
        assert not [call for call in calls if call[2]], "while an engine generated"
        ours = {file for _, file, _, _ in calls if "/" in file}
        assert "trainer/objective.py" in ours, "the rules see what goes through"
        assert all(file.startswith("trainer/") for file in ours), ours
