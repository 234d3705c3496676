"""The main job from the command line: what it leaves, and that it is what it says."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from io import StringIO
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from specactor.config.rollout import SAME_BITS
from specactor.cpu.sglang import environment
from specactor.metrics import METRICS, read_metrics
from specactor.replay import command as replaying
from specactor.run_folder import WARM_UPS, RunFolder
from specactor.run_owner import RunOwner
from specactor.trainer.drafter.buffer import read_rollouts
from tests.end_to_end.conftest import Launched, Launcher
from tests.lib.ranks import torchrun

REFERENCE = Path(__file__).with_name("greedy_reference.py")
TIMES = ("time/", "memory/", "speculation/", "drafter/", "audit/")
RATES = ("_per_s",)


def deterministic(folder: Path) -> list[dict[str, object]]:
    """The lines of metrics.jsonl without what a clock or a memory counter says, and which way the weights went."""
    return [
        {k: v for k, v in line.items() if not k.startswith(TIMES) and not k.endswith((*RATES, "sync/buckets"))}
        for line in read_metrics(folder)
    ]


def writers(folder: Path) -> list[str]:
    """Processes whose standard output is a file of this folder."""
    found = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):  # it has just ended
            if output.readlink().is_relative_to(folder):
                found.append(output.parts[2])
    return found


def phases(trace: Path) -> list[str]:
    """What the trainer did in a traced step, one after the other."""
    events = json.loads(trace.read_text())["traceEvents"]
    [pid] = [event["pid"] for event in events if event["name"] == "process_name" and event["args"]["name"] == "trainer"]
    return [
        name for name, _ in groupby(event["name"] for event in events if event["pid"] == pid and event["ph"] == "X")
    ]


def test_a_run_ends_well_and_says_what_it_did(finished: Launched) -> None:
    assert finished.code == 0, finished.output
    assert "Warning" not in finished.output
    assert "held-out accuracy" in finished.output
    assert "replay: of the last 2 steps from a checkpoint, with at most 0 trained again; " in finished.output
    for phase in ("data", "warm-up", "engines", "export"):
        assert phase in finished.output


def test_speculation_changes_neither_tokens_nor_rewards_nor_losses(
    finished: Launched, launcher: Launcher, draft_model: str
) -> None:
    """A drafter process, a drafter in the engine and one that fails; the draft model learns after every step."""
    speculation = ("--rollout.speculation.mode", "decoupled", "--rollout.speculation.draft-model", draft_model)
    liar = "tests.rollout.sglang.drafters:Raises"
    drafters = ("--rollout.speculation.drafters", liar, "decoupled", "suffix")
    window = ("--rollout.speculation.window", "4")  # fixed: whether `auto` drafts depends on the machine's speed
    seen = ("--tracking.trace", "2", "--parallel.drafters", "1")
    learning = ("--distillation.refresh", "inf")
    learning += ("--distillation.max-updates", "2", "--tracking.record", "full")
    audited = ("--rollout.audit", "stop")
    drafted = launcher.run("speculating", *speculation, *drafters, *window, *seen, *learning, *audited)
    assert drafted.code == 0, drafted.output
    assert deterministic(drafted.folder) == deterministic(finished.folder)
    responses = [
        (folder / "evaluations" / "step-000002.jsonl").read_text() for folder in (drafted.folder, finished.folder)
    ]
    assert responses[0] == responses[1]
    lines = read_metrics(drafted.folder)[1:]
    assert any(float(str(line.get("speculation/suffix/accepted", 0))) > 0 for line in lines)
    assert [(line["audit/scored"], line["audit/unpicked"]) for line in lines] == [
        (n["rollout/tokens"], 0) for n in lines
    ]
    problem = "Raises: RuntimeError: a drafter's bug"
    assert drafted.output.count(f"drafter raises: {problem}. That costs speed") == 1, "told once, by all engines"
    told = [str(line.get("speculation/raises/problems", "")) for line in read_metrics(drafted.folder)]
    assert [text.partition(";")[0] for text in told] == [problem, "", ""], "it fails in the first evaluation"
    assert drafted.output.count(problem) == 2, "and in the summary"
    assert all(float(str(line["speculation/decoupled/drafted_ahead"])) > 0 for line in lines)
    assert any(0 < float(str(line["speculation/decoupled/utilisation"])) < 1 for line in lines)
    assert [(line["drafter/refreshed"], line["drafter/updates"]) for line in lines[:1]] == [(1, 2)]
    assert [line["drafter/version"] for line in lines] == [1, 1], "after the last step there is no rollout to serve"
    assert [line["drafter/oldest_version"] for line in lines] == [1, 1]
    assert [line["drafter/refused"] for line in lines] == [0, 0]
    assert [len(read_rollouts([drafted.folder / "records" / f"step-00000{n}.bin"])) for n in (1, 2)] == [64, 64]
    assert (drafted.folder / "draft_model" / "config.json").exists()
    [trace] = (drafted.folder / "traces").iterdir()
    assert trace.name == "step-000002.json"
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {names[event["pid"]] for event in events if event["name"] == "verify"} == {"engine 0"}
    assert {names[event["pid"]] for event in events if event["name"] == "draft"} == {"engine 0", "drafter 0"}
    done = [phase for phase in phases(trace) if phase != "audit"]  # of responses, if there was time
    assert done == ["rollout", "reward", "train", "record", "refresh", "checkpoint", "sync"]
    assert (drafted.folder / "engines" / "drafter-0.log").exists()
    assert writers(drafted.folder / "engines") == []


def replayed(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specactor.cli", "replay", str(folder), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def run_forked(
    command: list[str], *, folder: Path, env: dict[str, str], check: bool
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of torchrun, with ranks that are forked; the deep tests have the command as users do."""
    assert command[1:4] == ["-m", "torch.distributed.run", "--standalone"]
    assert command[4] == "--nproc-per-node"
    assert not check
    code, said = torchrun(int(command[5]), *command[6:], folder=folder, **env)
    return subprocess.CompletedProcess(command, code, said)


def test_one_response_is_run_again_with_speculation(
    finished: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkpoint of step 1: weights are loaded, nothing is trained, the response is what it was."""
    monkeypatch.setattr(replaying, "subprocess", SimpleNamespace(run=partial(run_forked, folder=tmp_path)))
    speculating = ["--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "suffix"]
    told = StringIO()
    arguments = [str(finished.folder), "--step", "2", "--sample", "3.1", *speculating]
    assert replaying.replay(arguments, Console(file=told)) == 0, told.getvalue()
    assert "step 2 from the checkpoint of step 1, of step 2 3.1 alone" in told.getvalue()
    assert "guarantee: same bits" in told.getvalue()
    assert "equal: steps 1 to 2, 1 responses" in told.getvalue()


@pytest.mark.deep
def test_twenty_responses_are_each_made_alone_with_a_drafter_process(finished: Launched, draft_model: str) -> None:
    """Of all groups: what the whole step gave. `python -m benchmarks.replay` does so on 1 and 2 ranks."""
    drafting = ("--rollout.speculation.mode", "decoupled", "--rollout.speculation.draft-model", draft_model)
    drafting += ("--rollout.speculation.drafters", "decoupled", "suffix", "--parallel.drafters", "1")
    names = [f"{i % 8}.{(i + i // 8) % 8}" for i in range(20)]
    done = replayed(finished.folder, "--step", "2", "--sample", *names, *drafting)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: steps 1 to 2, 20 responses" in done.stdout


@pytest.mark.deep
def test_steps_are_run_again_and_a_fault_is_found(finished: Launched) -> None:
    """From the start, on more engines and with speculation: equal, and trained equally. With another rate: not."""
    speculating = ("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "suffix")
    done = replayed(finished.folder, "--step", "2", *speculating, "--parallel.engines", "2", "--resume", "off")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: steps 0 to 2, 128 responses" in done.stdout
    other = replayed(finished.folder, "--step", "2", "--train.learning-rate", "1e-4", "--resume", "off")
    assert other.returncode == 1, other.stdout + other.stderr
    assert "differ at step 1" in other.stdout
    assert "cause: learning rate" in other.stdout


def test_every_step_is_logged_under_known_names(finished: Launched) -> None:
    lines = read_metrics(finished.folder)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(name in METRICS for line in lines for name in line if name != "step")
    wanted = {
        *("reward/mean", "accuracy/train", "response/length_mean", "policy/entropy", "policy/clip_fraction"),
        *("agreement/logprob_gap_max", "agreement/logprob_gap_mean", "time/rollout_s", "time/reward_s"),
        *("time/train_s", "time/sync_s", "rollout/tokens_per_s", "weights/version", "sync/bytes", "sync/gb_per_s"),
        *("memory/rank_rss_bytes", "memory/engine_rss_bytes"),
    }
    assert all(wanted <= set(line) for line in lines[1:])
    assert [line["weights/version"] for line in lines] == [0, 1, 2]
    assert {"accuracy/eval"} <= set(lines[0]) & set(lines[-1])


def test_every_metric_that_is_declared_is_logged(finished: Launched) -> None:
    seen = {name for line in read_metrics(finished.folder) for name in line}
    others = ("critic/", "environment/", "time/environment_s", "rollout/expert_bytes", "policy/mtp_loss")  # elsewhere
    others += ("memory/gpu_", "reward/drawn_")
    others += ("time/audit_s", "time/refresh_")
    assert {name for name in METRICS if not name.startswith(others)} - seen == set()


def test_engine_and_trainer_agree_on_the_sampled_tokens(finished: Launched) -> None:
    gaps = [float(str(line["agreement/logprob_gap_max"])) for line in read_metrics(finished.folder)[1:]]
    assert 0 < max(gaps) < 1e-4


def test_the_run_folder_holds_config_tracking_checkpoint_and_export(finished: Launched) -> None:
    folder = finished.folder
    config = json.loads((folder / "config.json").read_text())
    assert config["train"]["steps"] == 2
    base = RunFolder(root=folder).read_base()
    assert base is not None
    assert (base.parent.name, (base / "config.json").exists()) == (WARM_UPS, True)
    assert list((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    assert (folder / "export" / "model.safetensors").exists() or list((folder / "export").glob("*.safetensors"))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["engine/attention"], summary["engine/guarantee"]) == ("rows", SAME_BITS)
    assert phases(folder / "traces" / "step-000001.json") == [
        "rollout",
        "reward",
        "train",
        "record",
        "checkpoint",
        "sync",
    ]


def test_the_exported_model_answers_greedily_like_the_engine(finished: Launched) -> None:
    """transformers in a clean process, token for token, on 64 held-out prompts."""
    evaluated = finished.folder / "evaluations" / "step-000002.jsonl"
    command = [sys.executable, str(REFERENCE), str(finished.folder / "export"), str(evaluated)]
    done = subprocess.run(
        command, env={**os.environ, **environment([0])}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"prompts": 64, "different": []}


def test_nothing_of_the_run_is_left(finished: Launched) -> None:
    mine = str(finished.folder.parent)
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if mine in " ".join(p.info["cmdline"] or [])]
    assert left == []


def test_a_finished_run_is_not_overwritten(finished: Launched, launcher: Launcher) -> None:
    again = launcher.run("finished")
    assert again.code != 0
    assert "Continue it with --resume auto, choose another --name, or remove the folder." in again.output


def test_a_run_that_another_job_is_in_is_refused(launcher: Launcher) -> None:
    owner = RunOwner(launcher.base / "runs" / "owned", on_lost=lambda told: None)
    with contextlib.closing(owner):
        owner.claim()
        (launcher.base / "runs" / "owned" / "checkpoints" / "step-000009.tmp").mkdir(parents=True)
        refused = launcher.run("owned", "--resume", "auto")
        assert refused.code != 0
        assert f"runs/owned belongs to {owner.own}. Choose another --name, or end that job." in refused.output
    assert sorted(path.name for path in refused.folder.rglob("*")) == ["checkpoints", "step-000009.tmp"]


@pytest.mark.deep
def test_resuming_for_another_step_gives_what_one_longer_run_gives(finished: Launched, launcher: Launcher) -> None:
    """Also from the cached warm-up, which must give the same start as the run that made it. A copy goes on: the run
    itself stays as other tests know it."""
    before = deterministic(finished.folder)
    shutil.copytree(finished.folder, finished.folder.with_name("resumed"))
    resumed = launcher.run("resumed", "--resume", "auto", "--train.steps", "3")
    assert resumed.code == 0, resumed.output
    straight = launcher.run("straight", "--train.steps", "3")
    assert straight.code == 0, straight.output
    longer = deterministic(straight.folder)
    assert deterministic(resumed.folder)[3] == longer[3]
    ignored = {"accuracy/eval", "score/eval"}  # the shorter run evaluated after its last step
    assert [{k: v for k, v in line.items() if k not in ignored} for line in before] == [
        {k: v for k, v in line.items() if k not in ignored} for line in longer[:3]
    ]
