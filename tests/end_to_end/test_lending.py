"""A run under torchrun that wakes a drafter on the core of an engine that has run dry, and verifies what it drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor.metrics import TAIL, read_metrics
from specactor.rollout import cost_file
from tests.end_to_end.conftest import Launched, Launcher
from tests.end_to_end.test_run import deterministic, writers
from tests.rollout.test_layout_plan import table

SCRIPT = Path(__file__).with_name("lending_run.py")
FAULT = "tests.rollout.sglang.wrong_versions:accepts_all"
"""A draft method that drafts nothing; engines that load it accept every draft token without comparing it."""
BEFORE = "evaluations/step-000000.jsonl"
"""Prompts and responses before the first step."""
ROUNDED = ("agreement/", "policy/")
"""Log-probabilities are computed in other batches, and rounded there."""


def launch(
    launcher: Launcher,
    name: str,
    draft_model: str,
    *options: str,
    mode: str = "decoupled",
    methods: tuple[str, ...] = (),
) -> Launched:
    """One step on two ranks, whose engines the first one drives. The first engine has few requests at once, so that its
    rollout lasts for some hundred rounds, and the second one has none. Args: draft methods besides the drafters."""
    speculation = ("--rollout.speculation.mode", mode, "--rollout.speculation.draft-model", draft_model)
    drafters = ("--rollout.speculation.drafters", "decoupled", *methods, "--rollout.speculation.window", "4")
    lent = ("--parallel.engines", "2", "--rollout.tail.drafters", "True", "--rollout.engine.max-running-requests", "4")
    short = ("--train.steps", "1", "--checkpoint.export", "False")
    run = launcher.run(name, *speculation, *drafters, *lent, *short, *options, script=SCRIPT)
    assert run.code == 0, run.output
    return run


def assert_drafted(run: Launched) -> None:
    [line] = read_metrics(run.folder)[1:]
    assert float(str(line["tail/lent"])) > 0
    assert float(str(line["speculation/decoupled/drafted"])) > 0


def differing(run: Launched, plain: Launched) -> set[str]:
    """Metrics of the steps of `run` that differ from those of `plain`, and the responses, if they do."""
    found = {BEFORE} if (run.folder / BEFORE).read_text() != (plain.folder / BEFORE).read_text() else set()
    for own, wanted in zip(deterministic(run.folder), deterministic(plain.folder), strict=False):
        close = wanted.keys() & {"policy/loss", "policy/grad_norm", "policy/entropy"}
        found |= {name for name in close if own[name] != pytest.approx(wanted[name], rel=1e-5)}
        found |= {name for name in wanted if not name.startswith(ROUNDED) and own[name] != wanted[name]}
    return found


def test_a_run_that_wakes_drafters_has_the_same_tokens_rewards_and_losses(
    finished: Launched, launcher: Launcher, draft_model: str
) -> None:
    """The other run has one engine and does not speculate."""
    lending = launch(launcher, "lending", draft_model)
    assert_drafted(lending)
    assert differing(lending, finished) == set()
    [line] = read_metrics(lending.folder)[1:]
    assert {f"tail/{name}" for name in TAIL if "open" not in name and "stale" not in name} <= set(line)
    assert line["tail/differing"] == 0
    logs = sorted(file.name for file in (lending.folder / "engines").glob("drafter-*.log"))
    assert logs == ["drafter-0.log", "drafter-1.log"]
    assert writers(lending.folder / "engines") == []


def test_a_run_whose_second_engine_is_set_aside_has_the_same_tokens_rewards_and_losses(
    finished: Launched, launcher: Launcher, draft_model: str, tmp_path: Path
) -> None:
    """By a cost table after which all engines are no faster than one."""
    cost_file.write(tmp_path / "costs.json", table(base_s=1.0))
    costs = ("--rollout.speculation.cost-table", str(tmp_path / "costs.json"))
    run = launch(launcher, "set_aside", draft_model, *costs, mode="auto")
    assert differing(run, finished) == set()
    [line] = read_metrics(run.folder)[1:]
    assert (line["tail/set_aside"], line["tail/differing"]) == (1, 0)
    assert float(str(line["tail/lent"])) > 0
    assert "1 of 2 engines serve, for which drafters on the devices of 1 draft" in run.output
    assert writers(run.folder / "engines") == []


def test_a_verifier_that_compares_nothing_is_caught(finished: Launched, launcher: Launcher, draft_model: str) -> None:
    """The run would stop by itself, since the trainer finds other log-probabilities than the engine."""
    wrong = launch(launcher, "wrong_lending", draft_model, "--train.max-logprob-gap", "inf", methods=(FAULT,))
    assert_drafted(wrong)
    assert {"response/length_mean", "policy/loss"} & differing(wrong, finished)
