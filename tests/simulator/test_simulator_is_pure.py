"""The simulator imports without torch and engines, and reads neither clock nor environment nor global randomness."""

from __future__ import annotations

import re

import pytest

from tests import test_structure

SIMULATOR = [f"simulator.{name}" for name in ("engine", "requests", "rollout")]
GLOBAL_RANDOMNESS = re.compile(r"np\.random\.(?!Generator|default_rng)|^import random|default_rng\(\)", re.MULTILINE)


def test_the_simulator_needs_no_engine_trainer_or_tensor() -> None:
    done = test_structure.run(SIMULATOR)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", SIMULATOR)
def test_the_simulator_reads_no_clock_environment_or_global_randomness(module: str) -> None:
    test_structure.test_pure_modules_read_no_clock_and_no_environment(module)
    assert not GLOBAL_RANDOMNESS.search(test_structure.file_of(module).read_text())


@pytest.mark.parametrize("text", ["x = np.random.normal()", "import random", "rng = np.random.default_rng()"])
def test_global_randomness_would_be_seen(text: str) -> None:
    assert GLOBAL_RANDOMNESS.search(text)
    assert not GLOBAL_RANDOMNESS.search("rng = np.random.default_rng([1, 2])")
