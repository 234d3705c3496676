"""A run from nothing whose EAGLE-3 head is made by the warm-up and learns with the policy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specactor.metrics import read_metrics
from tests.end_to_end.conftest import Launched, Launcher
from tests.end_to_end.test_run import deterministic

STEPS = ("--train.steps", "5", "--train.learning-rate", "3e-3")
SPECULATION = ("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "model")
HEAD = (*SPECULATION, "--rollout.speculation.draft-model", "warm-up-head", "--rollout.speculation.window", "4")
LEARNING = ("--distillation.refresh", "inf")
LEARNING += ("--distillation.max-updates", "4", "--distillation.tokens-per-update", "2048")
OF_HEAD = ("version", "oldest_version", "updates", "tokens", "loss", "kl", "overlap", "grad_norm", "buffer_tokens")


def learned(folder: Path) -> list[dict[str, str]]:
    return [{name: repr(line.get(f"drafter/{name}")) for name in OF_HEAD} for line in read_metrics(folder)[1:]]


def lengths(run: Launched) -> list[float]:
    return [float(str(line["speculation/model/accept_length"])) for line in read_metrics(run.folder)[1:]]


@pytest.mark.deep
def test_a_head_learns_with_the_policy_and_a_killed_run_goes_on_exactly(launcher: Launcher) -> None:
    run = launcher.run("head", *STEPS, *HEAD, *LEARNING)
    assert run.code == 0, run.output
    plain = launcher.run("headless", *STEPS)
    assert plain.code == 0, plain.output
    assert deterministic(run.folder) == deterministic(plain.folder), "no token, reward or loss depends on it"
    lines = read_metrics(run.folder)[1:]
    assert [line["drafter/version"] for line in lines] == [1, 2, 3, 4, 4], "nothing is learned after the last"
    assert [line["drafter/oldest_version"] for line in lines] == [1, 2, 3, 4, 4]
    assert [line["drafter/refused"] for line in lines] == [0] * 5
    frozen = launcher.run("frozen", *STEPS, *HEAD)
    assert frozen.code == 0, frozen.output
    assert deterministic(frozen.folder) == deterministic(plain.folder)
    # which requests run together depends on time, and what a draft may reach at a response's end on that
    assert lengths(run)[0] == pytest.approx(lengths(frozen)[0], rel=0.02), "before it has learned"
    assert sum(lengths(run)[2:]) > sum(lengths(frozen)[2:]), (lengths(run), lengths(frozen))
    exported = json.loads((run.folder / "draft_model" / "config.json").read_text())
    assert exported["architectures"] == ["LlamaForCausalLMEagle3"]

    killed = run.folder.with_name("killed")
    shutil.copytree(run.folder, killed)
    for step in (3, 4, 5):  # as if it had been killed in step 3
        shutil.rmtree(killed / "checkpoints" / f"step-{step:06d}", ignore_errors=True)
    resumed = launcher.run("killed", *STEPS, *HEAD, *LEARNING, "--resume", "auto")
    assert resumed.code == 0, resumed.output
    assert deterministic(killed) == deterministic(run.folder)
    assert learned(killed) == learned(run.folder)
    assert lengths(resumed) == pytest.approx(lengths(run), rel=0.02)
