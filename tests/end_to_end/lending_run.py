"""The main job, whose first engine is given all requests: the others are dry from the start. A drafter is woken there
at once, in responses of any length. A rollout waits for drafters that are starting, which on a slow machine would be
there after its last token."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import train_moe

START_LIMIT_S = 120.0


def main() -> int:
    train_moe.set_environment()
    from specactor.rollout import collector, driver, pool
    from specactor.rollout.driver import BorrowedDevices, Running
    from specactor.types import RolloutRequest

    def to_the_first(requests: Sequence[RolloutRequest], num_engines: int) -> list[list[RolloutRequest]]:
        return [list(requests), *([] for _ in range(num_engines - 1))]

    def at_once(
        self: BorrowedDevices,
        dry: Collection[int],
        running: Callable[[], Running],
        finished: Iterable[int],
        rounds: int,
    ) -> None:
        lend(self, dry, running, finished, max(rounds, 1))  # also before a response has told of rounds

    def when_all_have_started(self: BorrowedDevices, *args: Any, **keywords: Any) -> None:
        create(self, *args, **keywords)
        deadline = time.monotonic() + START_LIMIT_S
        while not all(d.started is not None for d in self._drafters.drafters if d.alive):
            assert time.monotonic() < deadline, "a drafter does not start"
            time.sleep(0.05)

    create = BorrowedDevices.__init__
    BorrowedDevices.__init__ = when_all_have_started  # type: ignore[method-assign]
    lend = BorrowedDevices.lend
    BorrowedDevices.lend = at_once  # type: ignore[method-assign]
    driver.is_worth_waking = lambda *_: True
    pool.assign = to_the_first
    collector.held_back = lambda *_, **__: {}  # while groups wait, no device is lent
    return train_moe.main()


if __name__ == "__main__":
    raise SystemExit(main())
