"""What tests of one engine of their own share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specactor.rollout.sglang.engine_client import Engine
from tests.rollout.sglang.asking import probe


@pytest.fixture
def speculating(started: Engine) -> Iterator[Engine]:
    """The module's engine with empty caches; what a test breaks in it is healed."""
    started.flush()
    yield started
    probe(started, "heal")
