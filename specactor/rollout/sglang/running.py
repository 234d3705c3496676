"""An engine for as long as a `with` block lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specactor.rollout.sglang.engine_client import Engine, EngineSpec


@contextmanager
def running(spec: EngineSpec, **environment: str) -> Iterator[Engine]:
    """It takes requests when the block begins, and is stopped when it ends. Raises EngineError if it does not start.

    `environment`: further variables of its processes."""
    engine = Engine(spec, **environment)
    try:
        engine.wait_ready(spec.config.start_timeout_s)
        yield engine
    finally:
        engine.stop()
