"""What is detected, tried on this machine and on made-up packages."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from specactor.parallel import devices
from specactor.parallel.devices import PROBES, detect, gpu_uuid, gpus, probe, return_unused, wandb_key


def test_this_machine() -> None:
    found = detect()
    assert found.cores == len(os.sched_getaffinity(0))
    assert 2**30 < found.memory_bytes < 2**50
    assert set(found.packages) == set(PROBES)
    assert len(found.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert found.wandb_key in (True, False)


def test_a_container_or_job_has_less_free_memory_than_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group and those around it the fullest counts, without the files that it caches."""
    monkeypatch.setattr(devices, "CGROUPS", tmp_path)
    monkeypatch.setattr(devices, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("1:cpu:/\n0::/job/step\n")
    whole = devices.free_memory_bytes()
    assert whole > 2**20, "there are no groups here"
    (tmp_path / "job/step").mkdir(parents=True)

    def group(folder: Path, limit: object, used: int) -> None:
        for name, text in {"max": limit, "current": used, "stat": "anon 1\nactive_file 30\ninactive_file 12"}.items():
            (folder / f"memory.{name}").write_text(f"{text}\n")

    group(tmp_path / "job", 1000, 400)
    group(tmp_path / "job/step", "max", 400)
    assert devices.free_memory_bytes() == 642
    assert devices._memory_bytes() == 1000
    group(tmp_path / "job/step", 500, 400)
    assert devices.free_memory_bytes() == 142
    group(tmp_path / "job", 300, 400)
    assert devices.free_memory_bytes() == 0


def test_a_limit_of_control_groups_of_version_1_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a Slurm job on a cluster with cgroup/v1. The machine has a limit there, too, that is none."""
    monkeypatch.setattr(devices, "CGROUPS", tmp_path)
    monkeypatch.setattr(devices, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("4:memory:/slurm/job_7\n3:cpu,cpuacct:/\n0::/\n")

    def group(name: str, limit: int, used: int) -> None:
        folder = tmp_path / "memory" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        stat = "active_file 1\ninactive_file 1\ntotal_active_file 30\ntotal_inactive_file 12\n"
        (folder / "memory.stat").write_text(stat)

    group("", 9223372036854771712, 900)
    assert devices.free_memory_bytes() > 2**20
    assert devices._memory_bytes() == psutil.virtual_memory().total
    group("slurm/job_7", 1000, 400)
    assert (devices.free_memory_bytes(), devices._memory_bytes()) == (642, 1000)
    group("", 500, 400)
    assert (devices.free_memory_bytes(), devices._memory_bytes()) == (142, 500), "a container sees its own as the root"


def test_free_pages_between_used_ones_go_back() -> None:
    process, size = psutil.Process(), 2**16  # too small to be mapped alone
    every = [ctypes.create_string_buffer(size) for _ in range(2000)]
    kept = every[::8]
    del every
    before = process.memory_info().rss
    return_unused()
    assert before - process.memory_info().rss > 1500 * size
    assert len(kept) == 250


def test_the_cpu_platform_is_no_gpu() -> None:
    if torch.version.cuda is not None:
        pytest.skip("torch has CUDA")
    code = (
        "from specactor.cpu import megatron; megatron.install_torch();"
        "from specactor.parallel.devices import gpus; print(gpus())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "()", done.stderr
    assert gpus() == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA H100 80GB HBM3", "GPU-5ac0"), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG-5ac0")],
)
def test_a_part_of_a_gpu_is_named_as_one(monkeypatch: pytest.MonkeyPatch, name: str, expected: str) -> None:
    """What CUDA_VISIBLE_DEVICES of an engine's process gets."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(name=name, uuid="5ac0"), raising=False
    )
    assert gpu_uuid(0) == expected


def test_a_shim_of_the_same_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_memory_saver.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = probe("torch_memory_saver")
    assert (found.works, found.version) == (False, "")
    assert found.problem == "a module of this name, but not the package"
    assert "torch_memory_saver" not in sys.modules


def test_wandb_keys(tmp_path: Path) -> None:
    assert not wandb_key({}, tmp_path)
    assert wandb_key({"WANDB_API_KEY": "k"}, tmp_path)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert wandb_key({}, tmp_path)
    (tmp_path / ".netrc").write_text("machine example.org login user password secret\n")
    assert not wandb_key({}, tmp_path)
    (tmp_path / ".netrc").write_text("nonsense\n")
    assert not wandb_key({}, tmp_path)
