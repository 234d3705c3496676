"""The trainer's end of a weight sync. Engines copy the weights by a plan. Without one a push goes by buckets, each
packed while engines take the one before, and makes the plan.

Invariants: by buckets nothing is loaded before all tensors were checked on all engine ranks; by the plan all digests
are compared before an engine goes on; all trainer ranks raise WeightSyncError or none; an engine that holds a mixture
is killed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specactor.config import WeightsSyncConfig
from specactor.parallel.collective import Collective
from specactor.weights_sync.memory import SharedBuffer, SharedCopy
from specactor.weights_sync.messages import CHECK, LOAD, Holding
from specactor.weights_sync.mirrors import Mirrors
from specactor.weights_sync.pulls import JobPlan
from specactor.weights_sync.push import Push

if TYPE_CHECKING:
    from specactor.rollout.sglang.engine_client import Engine
    from specactor.trainer.shards import RankShards


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    num_bytes: int  # of the model's tensors, counted once, however many engines take them
    num_rounds: int  # of buckets; 0 where engines took the weights by the plan
    seconds: float
    link_bytes: int = 0  # of tensors, from host to host
    note: str = ""  # why there is no plan; said once
    through_host: str = ""  # why engines read host memory of what lies on their own GPU; said once

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class WeightSender:
    def __init__(self, config: WeightsSyncConfig, collective: Collective) -> None:
        self._config = config
        self._collective = collective
        self._buffers: list[SharedBuffer] = []
        self._mirrors: list[Mirrors] = []  # of other hosts' buckets, per side, and per round that is kept
        self._plan: JobPlan | None = None
        self._planned: Holding | None = None  # of which the plan is
        self._refused: Holding | None = None  # of which there will be no plan
        self._told: Holding | None = None  # of which it was said why there is none

    def push(self, source: RankShards, engines: Sequence[Engine], *, version: int) -> SyncReport:
        """Bring all engines of all ranks to `version`; `engines` are this rank's. Collective. Raises WeightSyncError on
        every rank if an engine rank did not take the weights, CopiesDifferError where new ones would not either."""
        start = time.perf_counter()
        self._mirrors = self._mirrors or [Mirrors(self._collective, source.hosts) for _ in range(2)]
        push = Push(self._config, self._collective, source.hosts, self._buffers, self._mirrors, engines, version)
        note, through_host, holding = "", "", push.held(source)
        try:
            if not self._pulled(push, holding):
                if self._plan is not None:  # engines forget it with the first bucket
                    self._plan.close()
                self._plan = None
                push.stream(CHECK, source)
                push.agree("check")
                if push.num_rounds > 2:
                    push.stream(LOAD, source)
                else:  # the buckets still hold the whole model
                    push.resend()
                note = self._make_plan(push, holding, source.on_device)
                through_host = self._plan.through_host if self._plan is not None else ""
            push.commit()
            push.agree("load")
        finally:
            push.close()
        if self._plan is not None:
            self.close()
        return SyncReport(
            num_bytes=push.num_bytes,
            num_rounds=push.num_rounds,
            seconds=time.perf_counter() - start,
            link_bytes=push.link_bytes,
            note=note,
            through_host=through_host,
        )

    def _pulled(self, push: Push, holding: Holding | None) -> bool:
        """Return whether all engines took the weights by the plan, or one met a problem. Collective: weights stay
        unchanged from here on."""
        if self._collective.any(self._plan is None or self._planned is not holding):
            return False
        assert self._plan is not None
        return push.pull(self._plan)

    def _make_plan(self, push: Push, holding: Holding | None, on_device: SharedCopy | None) -> str:
        """Make a plan of what the engines just loaded, and prove it on that; return why there is none. Collective."""
        none = self._collective.any(bool(push.problem) or holding is None or holding is self._refused)
        for mirrors in self._mirrors[2 if none else 0 :]:  # the plan's take as much as all of them
            mirrors.close()
        if none:
            return ""
        assert holding is not None
        note, self._plan = push.plan(holding, on_device)
        news = note if self._told is not holding else ""
        self._planned, self._told = holding, holding if note else None
        self._refused = holding if note and not push.lacks_room else None  # room may be there at the next push
        return news

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()
        for mirrors in self._mirrors:
            mirrors.close()
