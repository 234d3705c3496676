"""The planner imports without torch and engines, and reads neither clock nor environment."""

from __future__ import annotations

import pytest

from tests import test_structure

PLANNER = [
    f"rollout.planning.{name}"
    for name in (
        "candidates",
        "devices",
        "paper",
        "plans",
        "reconfiguration",
        "rooflines",
        "rounds",
        "search",
        "shapes",
    )
]


def test_the_planner_needs_no_engine_trainer_or_tensor() -> None:
    done = test_structure.run(PLANNER)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", PLANNER)
def test_the_planner_reads_no_clock_and_no_environment(module: str) -> None:
    test_structure.test_pure_modules_read_no_clock_and_no_environment(module)


def test_the_search_does_not_know_where_costs_come_from() -> None:
    for module in ("plans", "search", "rounds", "reconfiguration", "paper"):
        text = test_structure.file_of(f"rollout.planning.{module}").read_text()
        assert not any(f"planning.{other} import" in text for other in ("rooflines", "devices", "shapes", "candidates"))
