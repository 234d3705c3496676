"""A run from nothing whose EAGLE-3 head is made by the warm-up and learns with the policy, and one of a policy with an
MTP layer, which learns and drafts."""

from __future__ import annotations

import json
import shutil
from math import log
from pathlib import Path

import pytest

from specactor.data.tokenizer import VOCAB_SIZE
from specactor.metrics import read_metrics
from specactor.replay import records
from tests.end_to_end.conftest import Launched, Launcher
from tests.end_to_end.test_run import deterministic
from tests.lib.ranks import run_alone

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


def responses(folder: Path) -> list[tuple[bytes, float]]:
    """Digests of tokens, and rewards, of all steps."""
    files = [records.file_of(folder, step) for step in records.steps_of(folder)]
    return [(sample.tokens, sample.reward) for file in files for sample in records.read(file).samples]


@pytest.mark.deep
def test_a_policys_mtp_layer_learns_and_drafts_and_changes_nothing(launcher: Launcher, tmp_path: Path) -> None:
    """Its layer is random at first: what it drafts rightly it was taught, in the warm-up and in the steps."""
    run_alone("tests.rollout.sglang.make_mimo", tmp_path / "policy", "untaught")
    mimo = ("--model.path", str(tmp_path / "policy"), "--parallel.expert", "1")
    drafting = ("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "mtp")
    drafted = launcher.run("mtp", *mimo, *drafting, "--rollout.speculation.window", "4", "--rollout.audit", "stop")
    assert drafted.code == 0, drafted.output
    plain = launcher.run("mtp-off", *mimo)
    assert plain.code == 0, plain.output
    assert deterministic(drafted.folder) == deterministic(plain.folder), "losses, the layer's too, rewards and lengths"
    assert responses(drafted.folder) == responses(plain.folder)
    assert len(responses(plain.folder)) == 2 * 64
    lines = [{k: float(str(v)) for k, v in line.items()} for line in read_metrics(drafted.folder)[1:]]
    assert len(lines) == 2
    for line in lines:
        assert 0 < line["policy/mtp_loss"] < log(VOCAB_SIZE)
        assert line["speculation/mtp/accept_rate"] > 0.1, line
        assert "speculation/mtp/failures" not in line
        assert line["audit/unpicked"] == 0
