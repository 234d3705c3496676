"""What decides is pure: it imports without torch, engines or trainers, and reads neither clock nor environment."""

from __future__ import annotations

import ast
import csv
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "specactor"
PLANNER = (
    "model_shapes",
    "plans",
    "profile_grid",
    "rooflines",
    "search",
)
PURE = [
    "errors",
    "measurements",
    "types",
    "waits",
    "data.stream",
    "parallel.layout",
    "rollout.resume",
    "rollout.decoupled.protocol",
    "rollout.decoupled.drafter_side",
    "rollout.decoupled.engine_side",
    "rollout.requests",
    "rollout.sglang.draft_slots",
    "trainer.advantages",
    "trainer.drafter.buffer",
    "trainer.packing",
    "weights_sync.buckets",
    "weights_sync.plan",
    *(f"config.{path.stem}" for path in sorted((PACKAGE / "config").glob("[!_]*.py"))),
    *(f"rollout.speculation.{path.stem}" for path in sorted((PACKAGE / "rollout/speculation").glob("[!_]*.py"))),
    *(f"planning.{name}" for name in PLANNER),
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


def imported(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def importing(package: str, folders: Iterable[str]) -> set[str]:
    """Files in these folders of the library that import a package or a module of it."""
    paths = [path for folder in folders for path in (PACKAGE / folder).rglob("*.py")]
    assert paths
    return {
        str(path.relative_to(PACKAGE))
        for path in paths
        if any(name == package or name.startswith(package + ".") for name in imported(path))
    }


def test_sglang_is_touched_in_few_folders() -> None:
    """Engines, and what stands in for a GPU."""
    folders = {path.rpartition("/")[0] for path in importing("sglang", ["."])}
    assert folders == {"rollout/sglang", "cpu"}


def test_rollouts_import_neither_the_planner_nor_the_simulator() -> None:
    """These import what engines decide by, so that one policy is planned, simulated and run."""
    for package in ("specactor.planning", "specactor.simulator"):
        assert importing(package, ["rollout"]) == set()
    assert importing("specactor.planning", ["simulator"]), "the check would see one"
    assert importing("specactor.rollout.speculation", ["planning"])


def test_files_stay_readable() -> None:
    long = [path.name for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > 500]
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


def test_every_test_that_a_claim_rests_on_exists() -> None:
    """As `tests/README.md` and `docs/gpu.md` name them."""
    tests = PACKAGE.parent / "tests"
    pages = (tests / "README.md").read_text() + (tests.parent / "docs" / "gpu.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", pages)
    assert len(named) > 20
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (tests / file).read_text()]
    files = re.findall(r"`((?:\w+/)*test_\w+\.py)`", pages)
    assert len(files) > 10
    assert missing + [file for file in files if not (tests / file).is_file()] == []


def missing_carriers(tests: Path) -> list[str]:
    """Return what is wrong with `removed.csv`: tests that are still there or listed twice, and claims without reason
    or carrier, or with one that does not exist."""
    names = {str(path.relative_to(tests)): names_in(path) for path in tests.rglob("test_*.py")}
    with open(tests / "removed.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    wrong = [
        f"{file}::{test}" for (file, test), count in Counter((r["file"], r["test"]) for r in rows).items() if count > 1
    ]
    for row in rows:
        carriers = row["carried by"].split()
        if row["test"] in names.get(row["file"], ()) or not (row["what left or changed"] or carriers):
            wrong.append(f"{row['file']}::{row['test']}")
        wrong += [c for c in carriers if c.partition("::")[2] not in names.get(c.partition("::")[0], ())]
    return wrong


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_left_has_a_reason_or_a_carrier_that_exists() -> None:
    assert missing_carriers(PACKAGE.parent / "tests") == []


@pytest.mark.parametrize(
    "wrong", ["gone.py,test_a,1,,", "gone.py,test_a,1,left,test_b.py::test_c", "test_b.py,test_b,1,left,"]
)
def test_a_wrong_list_of_tests_that_left_is_caught(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "test_b.py").write_text("def test_b() -> None: ...\n")
    right = "gone.py,test_z,1,renamed,test_b.py::test_b"
    (tmp_path / "removed.csv").write_text("file,test,commit,what left or changed,carried by\n" + right + "\n")
    assert missing_carriers(tmp_path) == []
    for line in (wrong, right):
        with open(tmp_path / "removed.csv", "a") as file:
            file.write(line + "\n")
        assert len(missing_carriers(tmp_path)) == (1 if line == wrong else 2)
