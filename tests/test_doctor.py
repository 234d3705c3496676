"""The doctor: what it finds here, and on machines made worse on purpose, in processes of their own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console

from specactor.doctor import STACKS, Finding, loopback, report, room, stack

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
    assert "expected a folder with config.json" in done.stdout
    assert "trained again" in done.stdout, "how far back a replay reaches"
    assert "error: data.train: data/math_train.jsonl is not a file. Correct --data.train." in done.stdout


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


def test_the_report_without_a_terminal_has_no_control_codes() -> None:
    out = io.StringIO()
    findings = [Finding(component="a", found="1"), Finding(component="b", found="[x]", fatal=True, remedy="Do [this].")]
    assert report(findings, Console(file=out, width=100)) == 1
    assert "\x1b" not in out.getvalue()
    assert "error: b: [x]. Do [this]." in out.getvalue()
    assert report(findings[:1], Console(file=out)) == 0
