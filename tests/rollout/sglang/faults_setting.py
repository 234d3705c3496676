"""An engine and the drafter process that recites for it, as the tests disturb them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specactor.config import SpeculationConfig
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.transport import Address, Keys, make_keys
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.pool import EnginePool
from specactor.rollout.process_guard import descendants
from specactor.rollout.sglang.engine_client import Engine
from specactor.rollout.speculation.counters import Counts
from specactor.types import RolloutRequest, Trajectory
from tests.rollout.conftest import request
from tests.rollout.sglang import recital
from tests.rollout.sglang.asking import assert_same, probe
from tests.rollout.sglang.decoupled_setting import (
    LIMIT_S,
    aim,
    assert_engine_holds_nothing,
    assert_holds_nothing,
)
from tests.rollout.sglang.sampling_cases import EOS
from tests.rollout.sglang.test_verify_worker import configure, report

ENGINE_KEYS, DRAFTER_KEYS = make_keys()


def titled(prefix: str, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    return [replace(r, request_id=f"{prefix}-{r.request_id}") for r in requests]


BATCH = titled("batch", [request(i, new=24 + 5 * i % 29, temperature=(1.0, 1.0, 0.7, 1.2)[i % 4]) for i in range(14)])
LONG = titled("long", [request(20 + i, new=100) for i in range(6)])
ENDLESS = titled("endless", [request(40 + i, new=100, ignore_eos=False, logit_bias=((EOS, -50.0),)) for i in range(16)])
"""SGLang does not keep room for all of a request that may end by itself."""


@dataclass(frozen=True)
class Setting:
    engines: EnginePool
    drafters: DrafterPool
    folder: Path
    plain: dict[str, Trajectory]
    """What plain decoding emits, by request."""

    @property
    def engine(self) -> Engine:
        return self.engines.engines[0]

    def aim_at(self, specs: Sequence[DrafterSpec], keys: Sequence[Keys | None]) -> None:
        """The engine, at these drafters with their keys."""
        there = [Address(endpoint=spec.endpoint, keys=own) for spec, own in zip(specs, keys, strict=True)]
        aim(self.engine, there, self.folder)

    def drafted_there(self) -> list[bool]:
        """Of each drafter that the engine is aimed at, whether it lives and has drafted."""
        self.run_until_drafted()
        state = probe(self.engine, "remote")
        return [drafted > 0 and drafter in state["live"] for drafter, drafted in enumerate(state["drafted"])]

    @property
    def endpoint(self) -> str:
        return self.drafters.drafters[0].spec.endpoint

    @property
    def pid(self) -> int:
        """Of the drafter."""
        drafter = self.drafters.drafters[0]
        drafter.wait_ready()
        return descendants(drafter.pid)[0]

    def wanted(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        return [self.plain[r.request_id] for r in requests]

    def aim(self, *endpoints: str, keys: Keys | None = ENGINE_KEYS) -> None:
        aim(self.engine, [Address(endpoint=endpoint, keys=keys) for endpoint in endpoints], self.folder)

    def start(self, config: SpeculationConfig, manner: str = "half") -> None:
        """From empty caches, with drafters that are there."""
        recital.behave(self.folder, manner)
        self.engine.flush()
        configure(self.engine, config)
        report(self.engine)

    def run(self, requests: Sequence[RolloutRequest], **named: object) -> list[Trajectory]:
        return self.engine.generate(requests, **named)  # type: ignore[arg-type]

    def run_until_drafted(self) -> Counts:
        """Rollouts, all equal to plain decoding, until a draft was right."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            self.engine.flush()
            assert_same(self.run(BATCH), self.wanted(BATCH))
            if (counts := report(self.engine)).accepted > 0:
                assert counts.failures == 0
                return counts
            assert time.monotonic() < deadline, "no draft was accepted"

    def assert_clean(self) -> None:
        """Nobody holds anything of a request that is over."""
        assert_engine_holds_nothing(self.engine)
        assert_holds_nothing(self.endpoint, ENGINE_KEYS)
