"""What decides is pure: it imports without torch, engines or trainers, and reads neither clock nor environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "specactor"
PURE = [
    "errors",
    "measurements",
    "types",
    "data.stream",
    "parallel.layout",
    "rollout.resume",
    "rollout.decoupled.protocol",
    "rollout.decoupled.drafter_side",
    "rollout.decoupled.order",
    "rollout.decoupled.batch_timing",
    "rollout.decoupled.wait_policy",
    "rollout.decoupled.engine_side",
    "rollout.speculation.counters",
    "rollout.speculation.drafter_set",
    "rollout.speculation.fastest_of_n",
    "rollout.speculation.planner",
    "rollout.speculation.probing",
    "rollout.speculation.suffix",
    "rollout.speculation.suffix_automaton",
    "rollout.speculation.trees",
    "rollout.speculation.verification",
    "rollout.open_groups",
    "rollout.requests",
    "rollout.sglang.draft_slots",
    "trainer.advantages",
    "trainer.distillation.buffer",
    "trainer.packing",
    "trainer.schedule",
    "weights_sync.buckets",
    "weights_sync.plan",
    *(f"config.{path.stem}" for path in sorted((PACKAGE / "config").glob("[!_]*.py"))),
    *(f"rollout.planning.{path.stem}" for path in sorted((PACKAGE / "rollout/planning").glob("[!_]*.py"))),
]
BLOCKED = ("torch", "megatron", "mbridge", "sglang", "transformers", "wandb", "rich", "zmq")
IMPURE = {"time", "os", "socket", "subprocess", "threading", "secrets"}

SCRIPT = """
import importlib, importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{fullname}} is blocked")
sys.meta_path.insert(0, Block())
for name in {pure!r}:
    importlib.import_module("specactor." + name)
"""


def file_of(module: str) -> Path:
    return PACKAGE / (module.replace(".", "/") + ".py")


def run(pure: list[str]) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(blocked=BLOCKED, pure=pure)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


def test_pure_modules_need_no_engine_trainer_or_tensor() -> None:
    done = run(PURE)
    assert done.returncode == 0, done.stderr


def test_the_block_works() -> None:
    done = run(["weights_sync.sender"])
    assert "torch is blocked" in done.stderr


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_read_no_clock_and_no_environment(module: str) -> None:
    tree = ast.parse(file_of(module).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in names} & IMPURE


PLANNER = ("search", "plans", "throughput_model", "rooflines", "gpu_specs", "model_shapes", "job_plan")


def planners_in(text: str) -> set[str]:
    """Modules of planner and simulator that a text imports."""
    imported = {str(node.module) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    planner = {f"specactor.rollout.planning.{name}" for name in PLANNER}
    return {name for name in imported if name in planner or ".simulator" in name}


def test_rollouts_do_not_import_the_planner_or_the_simulator() -> None:
    """They import what engines decide by, so that one policy is planned, simulated and run."""
    own = [path for path in (PACKAGE / "rollout").rglob("*.py") if not {"planning", "simulator"} & {*path.parts}]
    assert len(own) > 50
    assert {str(path): planners_in(path.read_text()) for path in own if planners_in(path.read_text())} == {}
    assert planners_in("from specactor.planning.search import search"), "the check would see one"


def test_files_stay_readable() -> None:
    long = [path.name for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > 400]
    assert long == [], "a file fits on a few screens"


def test_what_can_fail_on_one_rank_fails_on_all() -> None:
    """The actor hands what its engines do with memory to `Collective.together`."""
    calls = [
        node.func.attr
        for node in ast.walk(ast.parse((PACKAGE / "actor.py").read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    assert "together" in calls
    assert not {"release_memory", "resume_memory", "restart_lost"} & {*calls}
