"""The doctor: what it finds here, and on machines made worse on purpose, in processes of their own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from transformers import LlamaConfig

from specactor.doctor import STACKS, Finding, _places, checkpoints, host_memory, loopback, report, room, stack
from specactor.doctor import _recipe as recipe_findings
from specactor.planning.memory import checkpoint_bytes
from specactor.recipes import load

AUTO = ("--rollout.speculation.mode", "auto", "--rollout.speculation.drafters")
DRAFT = ("--rollout.speculation.draft-model",)
COMMAND = str(Path(sys.executable).parent / "specactor")


def specactor(*words: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "160"} | environ,
    )


def test_the_doctor_finds_this_machine_fit() -> None:
    done = specactor("doctor", "quickstart")
    assert done.returncode == 0, done.stdout
    assert "A run can start." in done.stdout
    assert "rows: same bits in plain rounds, verifications and any batch" in " ".join(done.stdout.split())
    for component in ("sglang", "megatron-core", "torch", "GPU", "apex", "transformer_engine", "wandb key", "model"):
        assert component in done.stdout


def test_a_low_hard_limit_of_open_files_is_named_with_its_remedy() -> None:
    low = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (900, 1024)); "
    code = low + "from specactor.doctor import examine; print(*examine(None, {}), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    [line] = [line for line in done.stdout.splitlines() if "open files" in line]
    assert "1024 for a process" in line
    assert "ulimit -Hn" in line


def distribution(site: Path, name: str, version: str) -> None:
    """Metadata as pip writes them; the module itself is not needed."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("torch", "transformers", "kernel", "fits"),
    [
        ("2.14.1", "5.19.0", "0.4.10", "GPU"),
        ("2.11.0", "5.17.3", "0.4.4", "GPU, torch 2.11"),
        ("2.11.0", "5.17.0", "0.4.10", ""),
    ],
)
def test_sets_of_versions_are_known_by_name(
    tmp_path: Path, torch: str, transformers: str, kernel: str, fits: str
) -> None:
    """Those for GPUs, on a path where they seem to be installed; here the CPU's are."""
    installed = {"torch": torch, "transformers": transformers, "sglang-kernel": kernel, "transformer-engine": "2.11.0"}
    for name, version in installed.items():
        distribution(tmp_path, name, version)
    code = "from specactor.doctor import pinned, stack; f = stack(True); print(f.used or f.found); "
    code += "print([p.component for p in pinned() if p.fatal])"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert done.stdout.splitlines() == [fits or "a set that was not tried together", "[]"], done.stderr
    assert stack(False).found == "CPU"


def test_the_page_about_gpus_lists_these_versions() -> None:
    page = (Path(__file__).parents[1] / "docs/gpu.md").read_text()
    for title, versions in STACKS.items():
        told = [versions.get(name, "none").removeprefix("==") for name in STACKS["GPU"]]
        assert f"| {title} | {' | '.join(told)} |" in page


def test_requirements_pin_these_versions() -> None:
    for title, file in (("CPU", "cpu.txt"), ("GPU", "gpu.txt")):
        lines = (Path(__file__).parents[1] / "requirements" / file).read_text().splitlines()
        pinned = {need.name: str(need.specifier) for need in map(Requirement, (x for x in lines if x[:1] not in "#-"))}
        for name, wanted in STACKS[title].items():
            if name in pinned:  # torch's CPU build has an index of its own
                assert SpecifierSet(pinned[name]) == SpecifierSet(wanted), name


def test_the_doctor_names_the_remedy_for_a_wrong_version(tmp_path: Path) -> None:
    distribution(tmp_path, "sglang", "0.5.9")
    done = specactor("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "error: sglang: 0.5.9, expected ==0.5.23." in done.stdout
    assert "-m pip install --no-deps 'sglang==0.5.23'" in done.stdout
    assert "A run cannot start." in done.stdout
    assert done.stdout.count("error:") == 1


def test_the_doctor_finds_packages_that_break_others(tmp_path: Path) -> None:
    distribution(tmp_path, "transformer-engine", "2.9.0")
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text("raise RuntimeError('no CUDA [here]')\n")
    distribution(tmp_path, "apex", "0.9.10")
    (tmp_path / "apex.py").write_text("")
    done = specactor("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "but does not import: RuntimeError: no CUDA [here]. " in done.stdout
    assert "pip uninstall transformer-engine" in done.stdout
    assert "'apex' is not a package. " in done.stdout
    assert "pip uninstall apex" in done.stdout


def test_the_doctor_reads_the_model_of_a_recipe(tmp_path: Path) -> None:
    done = specactor("doctor", "qwen3_8b", "--model.path", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 1
    assert "tiny, or tiny:LAYERS. Give the folder of a model in Hugging Face format with --model.path;" in done.stdout
    assert "trained again" in done.stdout, "how far back a replay reaches"
    assert "error: data.train: data/math_train.jsonl: no such file. Check the path" in done.stdout


def faults(*words: str) -> list[str]:
    """What the doctor finds wrong with a recipe."""
    findings = recipe_findings(load([*words]))
    return [f"{finding.component}: {finding.found}. {finding.remedy}" for finding in findings if finding.fatal]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of Hugging Face's datasets, and a file, each with one problem; the latter's has no verifier."""
    monkeypatch.chdir(tmp_path)
    good = {"prompt": "1+1=", "answer": "2", "verifier": "exact"}
    (tmp_path / "saved").mkdir()
    table = pyarrow.Table.from_pylist([good])
    with pyarrow.OSFile("saved/data.arrow", "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "saved/state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (tmp_path / "bad.jsonl").write_text(json.dumps(good | {"verifier": "nowhere:score"}))
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"rope_theta": 5e5, "original_max_position_embeddings": 8192}
    LlamaConfig(num_hidden_layers=2, num_key_value_heads=8, rope_parameters=scaled).save_pretrained(tmp_path / "llama")
    return tmp_path


OWN = ("custom_reward", "--data.train", "./saved")


def test_the_doctor_takes_all_that_a_run_takes(rows: Path) -> None:
    assert faults(*OWN, "--eval.problems", "0") == []
    assert faults("quickstart") == faults("calculator") == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((*OWN, "--data.eval", "bad.jsonl"), "data.eval: bad.jsonl, line 1: verifier: got 'nowhere:score'"),
        ((*OWN, "--data.eval", "examples.hooks:rows", "bad.jsonl"), "data.eval: bad.jsonl, line 1: verifier: got"),
        ((*OWN, "--data.mix", "none.jsonl", "1", "--eval.problems", "0"), "data.mix: none.jsonl: no such file."),
        (
            ("quickstart_plain", *OWN[1:], "--eval.problems", "0"),
            "prompt_template: got {number}, expected one of prompt",
        ),
        (("quickstart", "--data.train", "gsm8k"), "Nothing is downloaded: save it with the save_to_disk"),
        ((*OWN[:2], "openai/gsm8k", "--eval.problems", "0"), "Nothing is downloaded: save it with the save_to_disk"),
        (("quickstart", "--data.eval", "Makefile"), "got 'Makefile', expected the name of a reasoning-gym task."),
        (
            ("quickstart", "--parallel.expert", "3"),
            "parallel.expert: got 3, expected a divisor of the model's 8 experts",
        ),
        (("quickstart_plain", *AUTO, "sufix"), "got 'sufix', expected suffix, previous"),
        (
            ("quickstart_plain", *AUTO, "model", *DRAFT, "none"),
            "draft_model: got 'none', expected a folder with config.json",
        ),
        (
            ("quickstart_plain", *AUTO, "decoupled", *DRAFT, "none", "--parallel.drafters", "1"),
            "draft_model: got 'none', expected a folder with config.json",
        ),
        ((*OWN, "--eval.problems", "0", "--model.path", "llama"), "model: "),
        (
            ("quickstart_plain", "--rollout.engine.extra-args", "chunked_prefil_size=16"),
            "got 'chunked_prefil_size', expected an argument of SGLang's ServerArgs. Did you mean chunked_prefill_",
        ),
    ],
)
def test_the_doctor_refuses_what_a_run_refuses(words: tuple[str, ...], told: str, rows: Path) -> None:
    assert any(told in fault for fault in faults(*words)), faults(*words)


def test_a_missing_package_is_fatal_and_extras_are_not(tmp_path: Path) -> None:
    distribution(tmp_path, "specactor", "0")
    with (tmp_path / "specactor-0.dist-info/METADATA").open("a") as file:
        file.write("Requires-Dist: absent==1.0\nRequires-Dist: extra==1; extra == 'gpu'\n")
    code = "from specactor.doctor import pinned; print([(f.component, f.fatal, f.found) for f in pinned()])"
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert done.stdout.strip() == "[('absent', True, 'missing, expected ==1.0')]", done.stderr


def test_room_and_loopback(tmp_path: Path) -> None:
    assert not room("disk", tmp_path, 1, "x").fatal
    full = room("disk", tmp_path, 2**60, "Free some room.")
    assert full.fatal
    assert "expected 1073741824.00 GiB" in full.found
    assert room("shared memory", tmp_path / "none", 1, "x").fatal
    assert loopback().found == "works"


def test_a_disk_is_compared_with_the_checkpoints_of_a_run() -> None:
    """Of a mixture of 30B parameters three of 398 GiB; in float32 a parameter takes 16 bytes."""
    config = load(["qwen3_30b_a3b"])
    [low], [enough] = checkpoints(config, 10**12), checkpoints(config, 2 * 10**12)
    assert low.found.startswith("3 of 398.")
    assert "--checkpoint.keep" in low.remedy
    assert not low.fatal, "it is an estimate, and a resume has some of them already"
    assert not enough.remedy
    assert checkpoints(load(["qwen3_8b", "--model.path", "none"]), 0) == []
    assert checkpoint_bytes(load(["quickstart_plain", "--model.path", "tiny:2"])) == 16 * 913_408


def test_a_hosts_memory_is_compared_with_what_a_run_needs_there() -> None:
    """A node with the optimizer on the host needs 582 GiB, and 941 at a checkpoint; one of eight hosts less."""
    config = load(["qwen3_30b_a3b_node"])
    [low], [enough] = (host_memory(config, 8, gib * 2**30) for gib in (800, 1000))
    needed = "582 GiB needed, 941 at a checkpoint, by a host of 8 ranks in all, without processes' own"
    assert low.found == enough.found == needed
    assert "Slurm: --mem=0" in low.remedy
    assert not low.fatal, "it is an estimate"
    assert not enough.remedy
    [of_eight] = host_memory(load(["qwen3_30b_a3b"]), 8, 600 * 2**30)
    assert not of_eight.remedy
    assert host_memory(load(["qwen3_8b", "--model.path", "none"]), 8, 0) == []


def test_a_run_folder_that_cannot_be_written_to_is_fatal() -> None:
    [found] = [x for x in _places(load(["quickstart", "--output-dir", "/proc/none"])) if x.component == "disk"]
    assert found.fatal
    assert found.found.startswith("/proc cannot be written to")


def test_a_small_shared_memory_keeps_no_run_with_large_buckets_from_starting() -> None:
    """Weights travel in memory files, which no mount bounds."""
    large = load(["quickstart", "--weights-sync.bucket-bytes", str(2**45)])
    [found] = [x for x in _places(large) if x.component == "shared memory"]
    assert not found.fatal


def test_the_report_without_a_terminal_has_no_control_codes() -> None:
    out = io.StringIO()
    findings = [Finding(component="a", found="1"), Finding(component="b", found="[x]", fatal=True, remedy="Do [this].")]
    assert report(findings, Console(file=out, width=100)) == 1
    assert "\x1b" not in out.getvalue()
    assert "error: b: [x]. Do [this]." in out.getvalue()
    assert report(findings[:1], Console(file=out)) == 0
