"""The environment of an engine without a GPU, and that it reaches no other process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from specactor.cpu import sglang as cpu
from specactor.parallel.seals import KEY


def python(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_shims_are_seen_by_engine_processes_alone() -> None:
    where = "import sgl_kernel; print(sgl_kernel.__version__)"
    assert python(where, **cpu.environment()) == "0.0.0+specactor"
    spec = importlib.util.find_spec("sgl_kernel")
    assert spec is None or not str(spec.origin).startswith(str(cpu.SHIMS))


def test_kernels_without_a_stand_in_name_themselves() -> None:
    code = "from sgl_kernel import verify_tree_greedy_cpu as f\ntry: f()\nexcept NotImplementedError as e: print(e)"
    assert "verify_tree_greedy_cpu" in python(code, **cpu.environment())
    assert python("import sgl_kernel; print(hasattr(sgl_kernel, 'top_k'))", **cpu.environment()) == "False"


def test_megatron_is_not_imported_in_an_engine() -> None:
    code = "try:\n import megatron.core\nexcept ImportError: print('refused')"
    assert python(code, **cpu.environment()) == "refused"


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert cpu.environment()["PYTHONPATH"] == f"{cpu.SHIMS}{os.pathsep}/somewhere"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in cpu.environment([3])
    assert cpu.environment([0, 5])["SGLANG_CPU_OMP_THREADS_BIND"] == "0|5"


def test_an_engine_does_not_inherit_the_trainers_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    variables = cpu.process_environment([0])
    assert "KEPT" in variables
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(
        variables
    )


def test_no_child_has_the_jobs_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier is code of others, and may run what a response says."""
    monkeypatch.setenv(KEY, "k" * 64)
    assert "k" * 64 not in cpu.process_environment([0]).values()


def test_an_engine_that_replaces_another_has_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what a trainer, which was made between them, has set for its own arithmetic."""
    for name in ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "x")
    before = cpu.process_environment([0])
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setattr(cpu, "OF_TRAINER", {"NVIDIA_TF32_OVERRIDE"})
    assert cpu.process_environment([0]) == before
    assert before["NCCL_ALGO"] == "x"  # the user's


@pytest.mark.skipif(cpu.has_gpu(), reason="this machine has a GPU")
def test_without_a_gpu_the_engine_is_a_cpu_engine() -> None:
    assert cpu.process_environment([0])["SGLANG_USE_CPU_ENGINE"] == "1"


def test_gpus_keep_the_names_that_the_launcher_gave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert cpu.process_environment([1, 2])["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    variables = cpu.process_environment([1, 2])
    assert variables["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert str(cpu.SHIMS) not in variables.get("PYTHONPATH", "")
