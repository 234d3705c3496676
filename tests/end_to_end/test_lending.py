"""A run under torchrun that wakes a drafter on the core of an engine that has run dry, and verifies what it drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor.metrics import read_metrics
from tests.end_to_end.conftest import Launched, Launcher
from tests.end_to_end.test_run import deterministic, writers

SCRIPT = Path(__file__).with_name("lending_run.py")
FAULT = "tests.rollout.sglang.wrong_versions:accepts_all"
"""A draft method that drafts nothing; engines that load it accept every draft token without comparing it."""
WAITS = "tests.end_to_end.patient:waits"
BEFORE = "evaluations/step-000000.jsonl"
"""Prompts and responses before the first step."""
ROUNDED = ("agreement/", "policy/")
"""Log-probabilities are computed in other batches, and rounded there."""


def launch(
    launcher: Launcher,
    name: str,
    draft_model: str,
    *options: str,
    methods: tuple[str, ...] = (WAITS,),
) -> Launched:
    """One step on two ranks, whose engines the first one drives. The first engine has two requests at once, so that its
    rollout lasts for some hundred rounds, and the second one has none. Args: draft methods besides the drafters."""
    speculation = ("--rollout.speculation.mode", "decoupled", "--rollout.speculation.draft-model", draft_model)
    drafters = ("--rollout.speculation.drafters", "decoupled", *methods, "--rollout.speculation.window", "4")
    lent = ("--parallel.engines", "2", "--rollout.engine.max-running-requests", "2")
    short = ("--train.steps", "1", "--checkpoint.export", "False")
    run = launcher.run(name, *speculation, *drafters, *lent, *short, *options, script=SCRIPT)
    assert run.code == 0, run.output
    return run


def assert_drafted(run: Launched) -> None:
    [line] = read_metrics(run.folder)[1:]
    assert float(str(line["tail/drafters_woken"])) > 0
    assert float(str(line["speculation/decoupled/drafted"])) > 0


def differing(run: Launched, plain: Launched) -> set[str]:
    """Metrics of the steps of `run` that differ from those of `plain`, and the responses, if they do."""
    found = {BEFORE} if (run.folder / BEFORE).read_text() != (plain.folder / BEFORE).read_text() else set()
    for own, wanted in zip(deterministic(run.folder), deterministic(plain.folder), strict=False):
        close = wanted.keys() & {"policy/loss", "policy/grad_norm", "policy/entropy"}
        found |= {name for name in close if own[name] != pytest.approx(wanted[name], rel=1e-5)}
        found |= {name for name in wanted if not name.startswith(ROUNDED) and own[name] != wanted[name]}
    return found


@pytest.mark.deep
def test_a_run_that_wakes_drafters_has_the_same_tokens_rewards_and_losses(
    finished: Launched, launcher: Launcher, draft_model: str
) -> None:
    """The other run has one engine and does not speculate."""
    lending = launch(launcher, "lending", draft_model)
    assert_drafted(lending)
    assert differing(lending, finished) == set()
    logs = sorted(file.name for file in (lending.folder / "engines").glob("drafter-*.log"))
    assert logs == ["drafter-0.log", "drafter-1.log"]
    assert writers(lending.folder / "engines") == []


@pytest.mark.deep
def test_a_verifier_that_compares_nothing_is_caught(finished: Launched, launcher: Launcher, draft_model: str) -> None:
    """The run would stop by itself, since the trainer finds other log-probabilities than the engine."""
    wrong = launch(launcher, "wrong_lending", draft_model, "--train.max-logprob-gap", "inf", methods=(WAITS, FAULT))
    assert_drafted(wrong)
    assert {"response/length_mean", "policy/loss"} & differing(wrong, finished)
