"""Starting a run: help without torchrun, errors in one line, no rank that outlives its launcher."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import yaml
from torch.distributed import TCPStore

from specactor.errors import ConfigError
from specactor.parallel import seals
from specactor.parallel.layout import check
from specactor.recipes import load, recipes
from tests.test_recipes import SHAPES

LAUNCH = Path(__file__).resolve().parent.parent / "launch"
TRAIN = str(LAUNCH / "train_moe.py")


def start(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=240, env=clean | {"COLUMNS": "80"} | environ
    )


def test_help_needs_neither_torchrun_nor_torch() -> None:
    done = start("-X", "importtime", TRAIN, "quickstart", "--help")
    assert done.returncode == 0
    assert "--rollout.group-size INT" in done.stdout
    assert "Responses per prompt" in done.stdout
    assert "How weights reach the engines in the first sync, and where they cannot" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "specactor.config" in imported
    assert not imported & {"torch", "megatron", "sglang", "wandb"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quickstart", "--train.lr", "1"], "error: unknown setting --train.lr. Did you mean --train.learning-rate?\n"),
        (
            ["quickstart"],
            "error: launcher: got plain python, expected torchrun. "
            "Use: torchrun --nproc-per-node N launch/train_moe.py quickstart\n",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], message: str) -> None:
    done = start(TRAIN, *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_only_rank_0_says_what_is_wrong() -> None:
    done = start(TRAIN, "quickstart", "--train.lr", "1", RANK="1")
    assert (done.returncode, done.stderr) == (2, "")


def test_without_a_recipe_they_are_listed() -> None:
    done = start(TRAIN)
    assert done.returncode == 2
    assert re.search(r"\n  quickstart +Tiny mixture of experts", done.stderr)
    assert start(TRAIN, "--help").returncode == 0


RANK = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("train_moe", sys.argv[1])
train_moe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train_moe)
if len(sys.argv) > 3:
    train_moe.die_with_launcher()
open(sys.argv[2], "w").write(str(__import__("os").getpid()))
time.sleep(60)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize("guarded", [True, False])
def test_a_rank_dies_with_a_launcher_that_is_killed(tmp_path: Path, guarded: bool) -> None:
    pid_file = tmp_path / "pid"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK, TRAIN, str(pid_file), *(["guarded"] if guarded else [])],
        env=os.environ | {"LOCAL_RANK": "0"},
    )
    deadline = time.monotonic() + 120
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rank = psutil.Process(int(pid_file.read_text()))
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(60)
    try:
        rank.wait(60 if guarded else 2)
        alive = False
    except psutil.TimeoutExpired:
        alive = True
        rank.kill()
        rank.wait(60)
    assert alive is not guarded  # without the guard the rank would live on


def test_a_rank_may_open_as_many_files_as_the_hard_limit_allows() -> None:
    """In a large job it has some thousand sockets; the usual soft limit is 1024."""
    run = "import resource, runpy, sys; which = resource.RLIMIT_NOFILE; resource.setrlimit(which, (300, 2000)); "
    run += "main = runpy.run_path(sys.argv.pop(1))['main']; main(); print(resource.getrlimit(which))"
    done = start("-c", run, TRAIN, "quickstart")  # which ends early, without torchrun
    assert done.stdout == "(2000, 2000)\n", done.stderr


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_well_formed(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=120)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True, timeout=60)


def fake(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / name).chmod(0o755)


def run_script(script: str, tmp_path: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    return subprocess.run(
        ["bash", str(LAUNCH / script), *words], capture_output=True, text=True, timeout=120, env=path | environ
    )


def test_the_multi_node_script_calls_torchrun(tmp_path: Path) -> None:
    fake(tmp_path / "bin", "torchrun", 'echo "$@"')
    done = run_script("multi_node.sh", tmp_path, "quickstart", "--seed", "3", NODES="2", HEAD="h:1", GPUS="4")
    meeting = "--rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-conf read_timeout=60 --rdzv-id specactor"
    assert done.stdout == f"--nnodes 2 --nproc-per-node 4 {meeting} {TRAIN} quickstart --seed 3\n"
    missing = run_script("multi_node.sh", tmp_path, "quickstart", HEAD="h:1")
    assert missing.returncode != 0
    assert "set NODES to the number of nodes" in missing.stderr
    assert run_script("multi_node.sh", tmp_path, NODES="2", HEAD="h:1").returncode == 2


@pytest.mark.parametrize(
    ("nvidia_smi", "ranks"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-a)'; echo '  MIG 1g.10gb Device 0: (UUID: MIG-b)'; echo 'GPU 1: x'", 2),
        ('for i in 0 1 2; do echo "GPU $i: NVIDIA H100"; done', 3),
        ("true", 2),
    ],
)
def test_the_multi_node_script_starts_a_rank_per_gpu_or_two(tmp_path: Path, nvidia_smi: str, ranks: int) -> None:
    fake(tmp_path / "bin", "torchrun", 'echo "$@"')
    fake(tmp_path / "bin", "nvidia-smi", nvidia_smi)
    done = run_script("multi_node.sh", tmp_path, "quickstart", NODES="2", HEAD="h:1")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"--nproc-per-node {ranks} " in done.stdout


def test_the_multi_node_script_says_that_nvidia_smi_fails(tmp_path: Path) -> None:
    """Wrong were an end without a word, and two ranks on CPUs beside other nodes' GPUs."""
    fake(tmp_path / "bin", "torchrun", 'echo "$@"')
    fake(tmp_path / "bin", "nvidia-smi", "echo 'NVIDIA-SMI has failed.'; exit 9")
    done = run_script("multi_node.sh", tmp_path, "quickstart", NODES="2", HEAD="h:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "nvidia-smi fails: NVIDIA-SMI has failed." in done.stderr
    assert "set GPUS" in done.stderr
    assert run_script("multi_node.sh", tmp_path, "quickstart", NODES="2", HEAD="h:1", GPUS="8").returncode == 0


def test_the_multi_node_script_starts_again_after_a_failure(tmp_path: Path) -> None:
    fake(tmp_path / "bin", "sleep", "exit 0")
    starts = tmp_path / "starts"
    fake(tmp_path / "bin", "torchrun", f"echo $* >> {starts}; [[ $(wc -l < {starts}) == 3 ]]")
    job = {"NODES": "2", "HEAD": "h:1", "GPUS": "1"}
    assert run_script("multi_node.sh", tmp_path, "quickstart", **job, MAX_RESTARTS="1").returncode == 1
    assert run_script("multi_node.sh", tmp_path, "quickstart", **job, MAX_RESTARTS="9").returncode == 0
    assert re.findall(r"read_timeout=(\d+)", starts.read_text()) == ["60", "600", "60"], "others may start again, too"
    starts.unlink()
    run_script("multi_node.sh", tmp_path, "quickstart", **job, HEAD_S="300")
    assert "read_timeout=300" in starts.read_text(), "a node may come long after another one"
    starts.unlink()
    run_script("multi_node.sh", tmp_path, "quickstart", **job, HEAD_S="900", MAX_RESTARTS="1")
    assert re.findall(r"read_timeout=(\d+)", starts.read_text()) == ["900", "900"], "and again"
    starts.unlink()
    done = run_script("multi_node.sh", tmp_path, "quickstart", **job, MAX_RESTARTS="1", FORGIVE_S="0")
    assert done.returncode == 0, "each start lasted long enough"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_the_multi_node_script_pauses_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    fake(tmp_path / "bin", "sleep", f"echo $$ > {tmp_path}/pauses; exec /bin/sleep 600")
    fake(tmp_path / "bin", "torchrun", f"echo start >> {tmp_path}/starts; exit 3")
    job = {"NODES": "2", "HEAD": "h:1", "GPUS": "1", "MAX_RESTARTS": "3", "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    script = subprocess.Popen(["bash", str(LAUNCH / "multi_node.sh"), "quickstart"], env=job)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pauses").exists() or not (tmp_path / "pauses").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pause = psutil.Process(int((tmp_path / "pauses").read_text()))
    script.send_signal(number)
    assert script.wait(60) == 3
    pause.wait(60)
    assert (tmp_path / "starts").read_text() == "start\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_multi_node_script_ends_torchrun(tmp_path: Path, number: signal.Signals) -> None:
    """And it is not started again. A signal is passed on once; SIGKILL leaves no time to."""
    torchrun = f"""trap 'echo TERM >> {tmp_path}/said; exit 1' TERM; trap 'echo INT >> {tmp_path}/said; exit 1' INT
        echo $$ >> {tmp_path}/pids; while :; do sleep 0.05; done"""
    fake(tmp_path / "bin", "torchrun", torchrun)
    job = {"NODES": "2", "HEAD": "h:1", "GPUS": "1", "MAX_RESTARTS": "3", "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    # What was started in the background ignores SIGINT, and so would all that it starts.
    command = ["env", "--default-signal=INT", "bash", str(LAUNCH / "multi_node.sh"), "quickstart"]
    script = subprocess.Popen(command, env=job)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    [pid] = map(int, (tmp_path / "pids").read_text().split())
    torchrun_process = psutil.Process(pid)
    script.send_signal(number)
    assert script.wait(60) != 0
    torchrun_process.wait(60)
    assert len((tmp_path / "pids").read_text().split()) == 1
    if number is not signal.SIGKILL:
        assert (tmp_path / "said").read_text() == f"{number.name.removeprefix('SIG')}\n"


@pytest.mark.parametrize("by", ["another", "a store", "nobody"])
def test_a_port_of_head_that_another_program_holds_is_told_at_once(tmp_path: Path, by: str) -> None:
    """It may be busy, and say nothing. A store is that of this job or of another one."""
    fake(tmp_path / "bin", "torchrun", "echo started")
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
    with contextlib.ExitStack() as stack:
        if by == "a store":
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = store.port
        else:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = server.getsockname()[1]
            if by == "nobody":
                server.close()
        job = {"NODES": "1", "HEAD": f"127.0.0.1:{port}", "GPUS": "1", "PATH": path}
        done = run_script("multi_node.sh", tmp_path, "quickstart", **job)
    told = f"specactor: HEAD: got 127.0.0.1:{port}, where another program listens, expected a free port. "
    assert (done.returncode, done.stdout, told in done.stderr) == (
        (1, "", True) if by == "another" else (0, "started\n", False)
    )


@pytest.mark.parametrize("who", ["everyone", "the script", "the script, early"])
def test_a_run_that_is_asked_to_end_is_not_killed_by_the_signal(tmp_path: Path, who: str) -> None:
    """Slurm sends SIGUSR1 to every process of a job: the script, torchrun, ranks, and what they start; a person sends
    it to the script. It is not lost where ranks have only begun to start, either, or an image has no pkill."""
    fake(tmp_path / "bin", "pkill", "exit 127")
    other = "import time; time.sleep(1)"
    ready, early = f"open({str(tmp_path / 'ready')!r}, 'w').close()", who.endswith("early")
    rank = f"""import os, runpy, signal, subprocess, sys, time
{ready if early else ""}
time.sleep({int(early)})
runpy.run_path({TRAIN!r})["keep_signal"]()
child = subprocess.Popen([sys.executable, "-c", {other!r}])
{ready}
assert signal.sigwait({{signal.SIGUSR1}}) and child.wait() == 0
print("asked to end")"""
    (tmp_path / "rank.py").write_text(rank)
    fake(tmp_path / "bin", "torchrun", f"{sys.executable} {tmp_path / 'rank.py'}")
    fake(tmp_path / "bin", "sleep", "exec /bin/sleep 0.2")
    job = {"NODES": "2", "HEAD": "h:1", "GPUS": "1", "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    command = ["bash", str(LAUNCH / "multi_node.sh"), "quickstart"]
    script = subprocess.Popen(command, env=job, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    below = psutil.Process(script.pid).children(recursive=True)
    for process in (script, *(below if who == "everyone" else ())):
        process.send_signal(signal.SIGUSR1)
    said, _ = script.communicate(timeout=60)
    assert (script.returncode, "asked to end" in said) == (0, True)


SLURM = {
    "SLURM_JOB_ID": "1042",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_SUBMIT_DIR": str(LAUNCH.parent),
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "96",
}


def test_the_slurm_script_starts_every_node(tmp_path: Path) -> None:
    fake(tmp_path / "bin", "torchrun", 'echo "$@"')
    fake(tmp_path / "bin", "scontrol", "printf 'node7\\nnode8\\n'")
    srun = 'echo "CPUs of a task: $SRUN_CPUS_PER_TASK"; while [[ $1 == --* ]]; do shift; done; exec "$@"'
    fake(tmp_path / "bin", "srun", srun)
    done = run_script("slurm.sh", tmp_path, "qwen3_8b", **SLURM)
    assert done.returncode == 0, done.stderr
    assert "--nnodes 2 --nproc-per-node 8" in done.stdout
    assert "CPUs of a task: 96\n" in done.stdout, "since Slurm 22.05 srun has one where the script says no more"
    assert "--rdzv-endpoint node7:29542 --rdzv-conf read_timeout=60 --rdzv-id 1042" in done.stdout
    assert done.stdout.strip().endswith("qwen3_8b --resume auto")
    own = run_script("slurm.sh", tmp_path, "qwen3_8b", "--resume", "PATH", **SLURM)
    assert own.stdout.strip().endswith("qwen3_8b --resume auto --resume PATH"), "the last one holds"
    assert run_script("slurm.sh", tmp_path, "qwen3_8b").returncode != 0
    asked = re.findall(r"^#SBATCH (--\S+)", (LAUNCH / "slurm.sh").read_text(), re.MULTILINE)
    assert "--mem=0" in asked, "all of a node's, which --exclusive does not give"


def fake_scontrol(tmp_path: Path, preempted: str) -> None:
    """It answers as Slurm 22.05 and newer do, and notes which jobs are requeued."""
    times = f"EndTime=2026-11-29T10:00:00 Deadline=N/A\\n   PreemptEligibleTime=2026-11-28T10:00:00{preempted}"
    answers = f"""case "$*" in
        "show hostnames "*) printf 'node7\\nnode8\\n' ;;
        "show job 1042") printf 'JobId=1042 JobName=specactor\\n   {times}\\n   SuspendTime=None\\n' ;;
        *) echo "$*" >> {tmp_path}/asked ;;
        esac"""
    fake(tmp_path / "bin", "scontrol", answers)


def requeued(tmp_path: Path) -> bool:
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked in ("", "requeue 1042\n")
    return bool(asked)


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize("preempted", ["", " PreemptTime=None", " PreemptTime=2026-11-28T11:30:00"])
def test_a_preempted_job_that_ended_in_its_grace_time_is_requeued(tmp_path: Path, preempted: str, code: int) -> None:
    """For Slurm it is over, as one that nothing pre-empted. The exit code is srun's."""
    fake_scontrol(tmp_path, preempted)
    fake(tmp_path / "bin", "srun", f"exit {code}")
    done = run_script("slurm.sh", tmp_path, "qwen3_8b", **SLURM)
    said = "specactor: job 1042 was pre-empted: Slurm is asked to requeue it; it goes on from its checkpoint\n"
    expected = (code, said, True) if preempted.endswith("00") else (code, "", False)
    assert (done.returncode, done.stderr, requeued(tmp_path)) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_slurm_script_reaches_srun(tmp_path: Path, number: signal.Signals) -> None:
    """Its end is waited for. A job that is cancelled in its grace time is not requeued."""
    fake_scontrol(tmp_path, " PreemptTime=2026-11-28T11:30:00")
    srun = f"""for each in TERM INT USR1; do trap "sleep 0.3; echo $each > {tmp_path}/said; exit 9" $each; done
        touch {tmp_path}/ready; while :; do sleep 0.05; done"""
    fake(tmp_path / "bin", "srun", srun)
    # What was started in the background ignores SIGINT, and so would all that it starts.
    command = ["env", "--default-signal=INT", "bash", str(LAUNCH / "slurm.sh"), "qwen3_8b"]
    script = subprocess.Popen(command, env=SLURM | {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"})
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    script.send_signal(number)
    assert script.wait(60) == 9
    assert (tmp_path / "said").read_text() == f"{number.name.removeprefix('SIG')}\n"
    assert requeued(tmp_path) is (number is signal.SIGUSR1)


JOBSET = json.loads((Path(__file__).parent / "lib" / "jobset.schema.json").read_text())


def manifest() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    jsonschema.validate(made, JOBSET)
    return made


def disagreements(made: dict[str, Any]) -> list[str]:
    """What the schema cannot see: fields of a manifest that must fit each other, and what it starts."""
    name, [job] = made["metadata"]["name"], made["spec"]["replicatedJobs"]
    batch = job["template"]["spec"]
    pod = batch["template"]["spec"]
    [container] = pod["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    used = set(re.findall(r"\$\{?([A-Z_]+)", (LAUNCH / "multi_node.sh").read_text()))
    rules = {
        "hosts": {str(batch["parallelism"]), str(batch["completions"])} == {variables["NODES"]},
        "head": variables["HEAD"].startswith(f"{name}-{job['name']}-0-0.{name}:"),  # pod 0 of job 0, in the subdomain
        "replicas": job["replicas"] == 1 and batch["completionMode"] == "Indexed",
        "one retry is of all": batch["backoffLimit"] == 0 and pod["restartPolicy"] == "Never",
        "mounts": {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]},
        "variables": set(variables) <= used | {seals.KEY},  # which the ranks read
        "command": (LAUNCH.parent / container["command"][0]).exists(),
        "recipe": container["args"][0] in recipes(),
        "resumes": "--resume=auto" in container["args"],
        "late": int(variables["HEAD_S"]) >= 600,  # a pod that does not find the first one fails all
    }
    return [rule for rule, holds in rules.items() if not holds]


def test_the_manifest_for_kubernetes_is_a_jobset() -> None:
    assert disagreements(manifest()) == []


def test_the_manifest_asks_for_the_devices_that_its_command_line_needs() -> None:
    """Without its engines the recipe asks for those of 64 devices."""
    [job] = manifest()["spec"]["replicatedJobs"]
    batch = job["template"]["spec"]
    [container] = batch["template"]["spec"]["containers"]
    world = batch["parallelism"] * container["resources"]["limits"]["nvidia.com/gpu"]
    arguments = container["args"]
    config = load(arguments)
    check(config, world, SHAPES[config.name])
    assert config.parallel.engines * config.parallel.engine_tensor == world
    others = [argument for argument in arguments if not argument.startswith("--parallel.engines")]
    with pytest.raises(ConfigError, match=f"engines x engine_tensor <= {world} ranks"):
        check(load(others), world, SHAPES[config.name])


def test_the_manifest_reads_and_writes_on_the_volume_alone() -> None:
    """Paths of the recipe are relative, and an image has none of them."""
    [job] = manifest()["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    [volume] = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "shared"]
    config = load(container["args"])
    files = [config.model.path, *config.rollout.speculation.draft_model, config.data.train, *config.data.eval]
    assert [file for file in (*files, config.output_dir) if not file.startswith(f"{volume}/")] == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda spec: spec["failurePolicy"].update(maxRestart=3), "'maxRestart' was unexpected"),
        (lambda spec: spec["failurePolicy"].update(restartStrategy="Always"), "'Always' is not one of"),
        (lambda spec: spec["replicatedJobs"][0].update(replicas="1"), "'1' is not of type 'integer'"),
        (lambda spec: spec.pop("replicatedJobs"), "'replicatedJobs' is a required property"),
    ],
)
def test_a_manifest_that_is_no_jobset_is_refused(damage: Callable[[dict[str, Any]], object], said: str) -> None:
    made = manifest()
    damage(made["spec"])
    with pytest.raises(jsonschema.ValidationError, match=said):
        jsonschema.validate(made, JOBSET)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda job: job["template"]["spec"].update(completions=3), "hosts"),
        (lambda job: job.update(name="node"), "head"),
        (
            lambda job: job["template"]["spec"]["template"]["spec"].update(restartPolicy="OnFailure"),
            "one retry is of all",
        ),
    ],
)
def test_a_manifest_whose_fields_do_not_fit_is_seen(damage: Callable[[dict[str, Any]], None], rule: str) -> None:
    made = copy.deepcopy(manifest())
    damage(made["spec"]["replicatedJobs"][0])
    assert disagreements(made) == [rule]
