"""A draft model of the warm-up: made once, and good at what the policy was shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specactor.errors import ConfigError
from specactor.recipes import load

WANTED = ("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "model")
WANTED += ("--rollout.speculation.draft-model", "warm-up")


@pytest.mark.parametrize("kind", ["warm-up", "warm-up-head"])
def test_a_draft_model_is_made_once_and_knows_the_worked_solutions(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-m", "tests.trainer.warmup_script", str(tmp_path), *WANTED[:-1], kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    first, second = found["folders"]
    assert first == second
    assert Path(first).parent == tmp_path / ".warm-up"
    assert found["else_as_asked"]
    assert found["told"] == 1, "the second time it is read"
    learned, fresh = found["entropy"] if kind == "warm-up" else [1 - share for share in found["overlap"]]
    assert learned < 0.7 * fresh
    for said, response in zip(found["not_learned"], found["responses"], strict=True):
        question, _, rest = response.partition("=")
        a, b = map(int, question.split("*"))
        assert (said, rest) == (f"{a * b};", f"{a * b};#{a * b}<eos>"), "what an environment says is not learned"
    assert found["left_alone"] == [True, True], "without speculation, and with a folder"


def test_it_takes_worked_solutions() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.draft_model: got \('warm-up',\), expected a folder where"):
        load(["quickstart", *WANTED, "--warmup.solver", ""])
