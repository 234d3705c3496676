"""A draft model of the warm-up: made once, and good at what the policy was shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specactor.errors import ConfigError
from specactor.recipes import load

WANTED: tuple[str, ...] = ("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "model")
WANTED += ("--rollout.speculation.draft-model", "warm-up")


def two_ranks(folder: Path, *wanted: str) -> str:
    """Return what the first of them prints."""
    command = [sys.executable, "-m", "tests.trainer.warmup_script", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), *wanted], **pipes) for rank in range(2)]  # type: ignore[call-overload]
    try:
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(timeout=10)
    return str(said[0])


@pytest.mark.parametrize("kind", ["warm-up", "warm-up-head"])
def test_a_draft_model_is_made_once_and_knows_the_worked_solutions(tmp_path: Path, kind: str) -> None:
    found = json.loads(two_ranks(tmp_path, *WANTED[:-1], kind).splitlines()[-1])
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
