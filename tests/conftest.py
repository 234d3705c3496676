"""For all tests: a property may take long. The machine may be busy, and how long it takes is no part of it.

Files that take minutes come first, so that no worker is left alone with one of them at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from specactor.rollout.warm import WarmStarter

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

TESTS = Path(__file__).parent
LONGEST = (
    "rollout/sglang/test_model_drafter.py",
    "faults/test_faults.py",
    "weights_sync/test_sync.py",
    "trainer/test_layouts.py",
    "end_to_end/test_run.py",
    "rollout/sglang/test_decoupled.py",
    "trainer/test_checkpoint.py",
    "end_to_end/test_lending.py",
)
"""Longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in places), "a file was renamed"
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def warm_starter() -> Iterator[WarmStarter]:
    """Forks the engines of all tests of this worker, and of the jobs that they launch."""
    with WarmStarter(f"specactor-tests-{os.getpid()}") as starter:
        yield starter
