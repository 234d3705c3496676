"""A run under torchrun that wakes drafters on the cores of engines that have run dry."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor.metrics import TAIL, read_metrics
from tests.end_to_end.conftest import Launched, Launcher
from tests.end_to_end.test_run import deterministic, writers

SCRIPT = Path(__file__).with_name("lending_run.py")
ROUNDED = ("agreement/", "policy/")
"""Log-probabilities are computed in other batches, and rounded there."""


@pytest.mark.timeout(900)  # it may be the first, and then launches what others use too
def test_a_run_that_wakes_drafters_has_the_same_tokens_rewards_and_losses(
    finished: Launched, launcher: Launcher, draft_model: str
) -> None:
    """Two ranks, whose engines the first one drives; the other run has one engine and does not speculate. The rollout
    is too short for what is woken to draft; that it does is tested in tests/rollout/sglang/test_decoupled.py."""
    speculation = ("--rollout.speculation.mode", "decoupled", "--rollout.speculation.draft-model", draft_model)
    lent = ("--parallel.engines", "2", "--rollout.tail.drafters", "True", "--rollout.speculation.window", "4")
    short = ("--train.steps", "1", "--checkpoint.export", "False")
    lending = launcher.run("lending", *speculation, *lent, *short, script=SCRIPT)
    assert lending.code == 0, lending.output
    for own, plain in zip(deterministic(lending.folder), deterministic(finished.folder), strict=False):
        wanted = {name: value for name, value in plain.items() if not name.startswith(ROUNDED)}
        assert {name: own[name] for name in wanted} == wanted
        for name in plain.keys() & {"policy/loss", "policy/grad_norm", "policy/entropy"}:
            assert own[name] == pytest.approx(plain[name], rel=1e-5)
    [line] = read_metrics(lending.folder)[1:]
    assert {f"tail/{name}" for name in TAIL if "open" not in name and "stale" not in name} <= set(line)
    assert float(str(line["tail/lent"])) > 0
    assert line["tail/differing"] == 0
    logs = sorted(file.name for file in (lending.folder / "engines").glob("drafter-*.log"))
    assert logs == ["drafter-0.log", "drafter-1.log"]
    assert writers(lending.folder / "engines") == []
