"""The main job, whose first engine is given all requests: the others are dry from the start. Waking a drafter there is
believed to cost nothing: it pays at once, in responses of any length. A rollout waits for drafters that are starting,
which on a slow machine would be there after its last token."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import train_moe

START_LIMIT_S = 120.0


def main() -> int:
    train_moe.set_environment()
    from specactor import run
    from specactor.config import Config
    from specactor.rollout import collector, pool
    from specactor.rollout.tail import BorrowedDevices, EngineLoad, WakeWhereItPays
    from specactor.types import RolloutRequest

    def to_the_first(requests: Sequence[RolloutRequest], num_engines: int) -> list[list[RolloutRequest]]:
        return [list(requests), *([] for _ in range(num_engines - 1))]

    def at_once(config: Config) -> WakeWhereItPays:
        max_window = config.rollout.speculation.max_window
        return WakeWhereItPays(
            max_window=max_window, acceptance=0.9, draft_step=0.0, per_request=0.0, notice_rounds=0.0
        )

    def awake_at_once(self: BorrowedDevices, loads: Sequence[EngineLoad], rounds: int) -> list[EngineLoad]:
        found = real(self, loads, max(rounds, 1))  # at once, also before a response has told of rounds
        return [replace(load, wake_rounds=load.wake_rounds and 0.0) for load in found]

    def when_all_have_started(self: BorrowedDevices, *args: Any, **keywords: Any) -> None:
        create(self, *args, **keywords)
        deadline = time.monotonic() + START_LIMIT_S
        while self._drafters is not None and not all(d.has_started() for d in self._drafters.drafters if d.alive):
            assert time.monotonic() < deadline, "a drafter does not start"
            time.sleep(0.05)

    create = BorrowedDevices.__init__
    BorrowedDevices.__init__ = when_all_have_started  # type: ignore[method-assign]
    real = BorrowedDevices._with_wakes
    BorrowedDevices._with_wakes = awake_at_once  # type: ignore[method-assign]
    run.tail_policy = at_once  # type: ignore[assignment]
    pool.assign = to_the_first
    collector.held_back = lambda *_, **__: {}  # while groups wait, no device is lent
    return train_moe.main()


if __name__ == "__main__":
    raise SystemExit(main())
