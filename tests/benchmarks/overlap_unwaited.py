"""The pretended device, under a loop that does not wait for the tokens of rounds launched ahead. Engines import it."""

from __future__ import annotations

from typing import Any

from benchmarks.overlap_engine import Nobody as Nobody
from specactor.rollout.sglang.overlap import Loop

_finish = Loop.finish


def _unwaited(loop: Any) -> None:
    if loop._worker.overlaps and loop._under_way:
        loop._under_way[0][1].copy_done.synchronize = lambda: None
    _finish(loop)


Loop.finish = _unwaited  # type: ignore[method-assign]
