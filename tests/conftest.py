"""For all tests: properties, the order of files and what shares a worker, what `make check-fast` leaves out, one warm
starter.

A property may take long: the machine may be busy, and how long it takes is no part of it. Files that take minutes come
first, so that no worker is left alone with one of them at the end.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from launch import train_moe
from specactor.cpu import megatron as cpu_platform
from specactor.rollout.warm_starter import WarmStarter

cpu_platform.install()  # before the first test file that imports Megatron, whichever that is

settings.register_profile("check", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("deep", deadline=None, derandomize=True, max_examples=200)  # a failure repeats
settings.load_profile("check")

TESTS = Path(__file__).parent
LONGEST = (
    "trainer/test_layouts.py",
    "end_to_end/test_run.py",
    "weights_sync/test_sync.py",
    "faults/test_faults.py",
    "rollout/sglang/test_decoupled.py",
    "rollout/sglang/test_model_drafter.py",
    "rollout/sglang/test_law.py",
    "rollout/sglang/test_verify_worker.py",
    "end_to_end/test_recipes.py",
)
"""Longest first, each with its group."""


STARTING = {"warm_starter", "launcher", "two_ranks", "one_rank", "four_ranks", "undisturbed", "results", "engines"}
"""Fixtures that start processes which take seconds to import what they need."""


SHARING = ("tests/end_to_end", "tests/trainer")
"""Folders whose files run on one worker: the other one would start the same runs and ranks again."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder = file.rpartition("/")[0]
            return folder if folder in SHARING else file

    return Scheduler(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", default="0/1", metavar="K/N", help="of N parts of the tests run the K-th, from 0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in places), "a file was renamed"
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        if item.path in places or STARTING & set(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
    part, parts = map(int, config.getoption("--slice").split("/"))
    mine = [zlib.crc32(item.nodeid.encode()) % parts == part for item in items]
    config.hook.pytest_deselected(items=[item for item, is_mine in zip(items, mine, strict=True) if not is_mine])
    items[:] = [item for item, is_mine in zip(items, mine, strict=True) if is_mine]


@pytest.fixture(scope="session")
def warm_starter() -> Iterator[WarmStarter]:
    """Forks the engines of all tests of this worker, and of the jobs that they launch."""
    train_moe.set_environment()  # it forks in no environment but its own, and ranks have this one
    with WarmStarter(f"specactor-tests-{os.getpid()}") as starter:
        yield starter
