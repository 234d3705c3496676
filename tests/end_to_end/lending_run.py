"""The main job, whose first engine is given all requests: the others are dry from the start. Waking a drafter there is
believed to cost nothing: it pays at once, in responses of any length. Where a run has a cost table, drafts elsewhere
are believed to be good from the start."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import train_moe


def main() -> int:
    train_moe.set_environment()
    from specactor import job
    from specactor.config import RolloutConfig, TailConfig
    from specactor.rollout import pool
    from specactor.rollout.layout_plan import LayoutPlanner, layout_planner
    from specactor.rollout.lending import Lending
    from specactor.rollout.planning.costs import CostTable
    from specactor.rollout.tail_plan import Planned, TailCosts
    from specactor.types import RolloutRequest

    def to_the_first(requests: Sequence[RolloutRequest], num_engines: int) -> list[list[RolloutRequest]]:
        return [list(requests), *([] for _ in range(num_engines - 1))]

    def at_once(config: TailConfig, *, max_window: int) -> Planned:
        costs = TailCosts(max_window=max_window, acceptance=0.9, draft_step=0.0, per_request=0.0, notice_rounds=0.0)
        return Planned(migrate=config.migrate, drafters=config.drafters, costs=costs)

    def of_good_drafts(config: RolloutConfig, table: CostTable | None) -> LayoutPlanner | None:
        asked = layout_planner(config, table)
        return asked and replace(asked, acceptance={"decoupled": 0.9}, response_tokens=100.0)

    real = Lending.wake_rounds
    Lending.wake_rounds = lambda self, *of: dict.fromkeys(real(self, *of), 0.0)  # type: ignore[method-assign]
    job.tail_policy = at_once  # type: ignore[assignment]
    job.layout_planner = of_good_drafts
    TailCosts.notice_rounds = 0.0  # type: ignore[misc]
    pool.assign = to_the_first
    return train_moe.main()


if __name__ == "__main__":
    raise SystemExit(main())
