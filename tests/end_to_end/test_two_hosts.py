"""Runs under torchrun on two hosts, as far as their ranks know: engines of one, drafters of the other.

Deep: `test_decoupled_faults` has engines with drafters of two hosts, `tests/cluster` jobs on hosts that are namespaces.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor.metrics import read_metrics
from tests.end_to_end.conftest import Launched, Launcher
from tests.end_to_end.test_run import deterministic, writers

pytestmark = pytest.mark.deep
SCRIPT = Path(__file__).with_name("two_hosts_run.py")


def launch(launcher: Launcher, name: str, draft_model: str, *options: str) -> Launched:
    speculation = ("--rollout.speculation.mode", "decoupled", "--rollout.speculation.draft-model", draft_model)
    window = ("--rollout.speculation.window", "4")
    elsewhere = ("--parallel.drafters", "1", "--parallel.drafter-hosts", "1")
    return launcher.run(name, *speculation, *window, *elsewhere, *options, script=SCRIPT)


def test_drafters_of_another_host_change_neither_tokens_nor_rewards_nor_losses(
    finished: Launched, launcher: Launcher, draft_model: str
) -> None:
    """The second host has no engine. The other run does not speculate, on one host."""
    learning = ("--distillation.refresh", "inf", "--distillation.max-updates", "2")
    run = launch(launcher, "two_hosts", draft_model, *learning)
    assert run.code == 0, run.output
    assert deterministic(run.folder) == deterministic(finished.folder)
    for step in (0, 2):
        file = f"evaluations/step-00000{step}.jsonl"
        assert (run.folder / file).read_text() == (finished.folder / file).read_text()
    lines = read_metrics(run.folder)[1:]
    # on a busy machine all drafts of an untrained model may come too late to be verified
    assert all(float(str(line["speculation/decoupled/drafted_ahead"])) > 0 for line in lines)
    assert [line["speculation/decoupled/processes"] for line in lines] == [1, 1]
    assert [line["drafter/oldest_version"] for line in lines] == [1, 1], "new weights reach it there"
    assert writers(run.folder / "engines") == []
