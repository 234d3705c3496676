"""What decides about distillation is pure: it imports without torch, and reads neither clock nor environment."""

from __future__ import annotations

import ast

import pytest

from tests import test_structure

PURE = [f"trainer.distillation.{name}" for name in ("buffer", "budget", "emphasis", "settings")]


def test_it_needs_no_engine_trainer_or_tensor() -> None:
    done = test_structure.run(PURE)
    assert done.returncode == 0, done.stderr
    assert "torch is blocked" in test_structure.run(["trainer.distillation.losses"]).stderr


@pytest.mark.parametrize("module", PURE)
def test_it_reads_no_clock_and_no_environment(module: str) -> None:
    tree = ast.parse(test_structure.file_of(module).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in names} & test_structure.IMPURE
