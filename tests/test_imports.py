"""What a process imports before it needs it: a rank and an engine cannot start before it is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANK = "from specactor.cpu import megatron; megatron.install(); import specactor.run"
LATE = ("wandb", "scipy", "matplotlib", "reasoning_gym", "math_verify", "sglang", "deepspeed", "datasets", "sklearn")
"""Used by some runs, or at some moment: wandb by rank 0, matplotlib at the end, reasoning_gym where it is the data."""
FAMILIES = ("mbridge.models.glm4_vl", "mbridge.models.gemma3", "mbridge.models.internvl3", "mbridge.models.qwen2_5_vl")


def imported(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print('MODULES', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    return set(done.stdout.partition("MODULES")[2].split())


def test_the_package_imports_nothing() -> None:
    assert {name.partition(".")[0] for name in imported("import specactor")} & {"torch", "numpy", "msgspec"} == set()


def test_what_starts_engines_needs_no_torch() -> None:
    """A run starts the warm starter before anything else is imported."""
    assert "torch" not in imported("import specactor.rollout.warm_starter")


def test_a_rank_imports_what_it_needs() -> None:
    modules = imported(RANK)
    assert "mbridge.models.qwen3moe" in modules
    assert modules & {*LATE, *FAMILIES} == set()
