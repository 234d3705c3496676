"""Engines with drafter processes, one of which holds a real draft model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from specactor.config import EngineConfig, SpeculationConfig
from specactor.rollout import driver
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.transport import Address, DrafterAccess, local_endpoint, make_keys
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine_client import Engine, EngineSpec
from tests.rollout.conftest import CONTEXT, request
from tests.rollout.sglang.decoupled_setting import MAX_WINDOW, aim, loaded, recital_folder, recital_spec
from tests.rollout.sglang.recital import behave, write
from tests.rollout.sglang.test_model_drafter import make_dense
from tests.rollout.sglang.test_verify_worker import configure

ENGINE_KEYS, DRAFTER_KEYS = make_keys()
BATCH = [request(i, new=40 + i % 23) for i in range(24)]
LONG = [request(100 + i, new=120) for i in range(16)]
WAVES = [replace(request(200 + i, new=120), group_id=0) for i in range(48)]
"""All for one engine, and more than it decodes together: the other has nothing to do."""


def address(endpoint: str) -> Address:
    """Of a drafter of this setting."""
    return Address(endpoint=endpoint, keys=ENGINE_KEYS)


@dataclass(frozen=True)
class Setting:
    """A draft model with the target's weights in a process of its own, two that recite, and engines: of one rank, of
    two, and another one of one."""

    drafters: DrafterPool
    reciters: DrafterPool
    engines: tuple[Engine, ...]
    draft_dir: str
    folder: Path
    """Of the recital."""

    def speculation(self, window: int | None = 3, *, mode: str = "decoupled", **fields: object) -> SpeculationConfig:
        return SpeculationConfig(
            mode=mode,  # type: ignore[arg-type]
            drafters=("decoupled",),
            window=window,
            max_window=MAX_WINDOW,
            draft_model=self.draft_dir,
            **fields,  # type: ignore[arg-type]
        )


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, make_spec: Callable[..., EngineSpec]) -> Iterator[Setting]:
    folder = make_dense(tmp_path_factory.mktemp("dense"))
    recital = recital_folder(tmp_path_factory.mktemp("recital"))
    spec = DrafterSpec(
        index=0,
        endpoint=local_endpoint(),
        keys=DRAFTER_KEYS,
        model_dir=folder,
        dtype="float32",
        device=1,
        context_length=CONTEXT,
        kv_tokens=6144,
        max_requests=48,
        continuer="tests.rollout.sglang.wrong_draft_backends:start_shared",
        log_file=str(tmp_path_factory.mktemp("drafter") / "log"),
    )
    start = SpeculationConfig(mode="decoupled", max_window=MAX_WINDOW, window=3, draft_model=folder)
    specs = [
        make_spec(
            60 + index,
            model_dir=folder,
            tensor_parallel=len(devices),
            devices=devices,
            config=EngineConfig(max_running_requests=32, max_total_tokens=6144),
            speculation=start,
            drafters=DrafterAccess(drafters=(address(spec.endpoint),), engine=f"engine-{60 + index}"),
        )
        for index, devices in enumerate([(0,), (0, 1), (1,)])
    ]
    reciters = [recital_spec(recital, keys=DRAFTER_KEYS, index=1 + i) for i in range(2)]
    with DrafterPool([spec]) as drafters, DrafterPool(reciters) as pair, EnginePool(specs) as engines:
        for each in (drafters, pair, engines):
            each.wait_ready()  # type: ignore[attr-defined]
        for engine in engines.engines:
            configure(engine, loaded("Near"))  # brings the rank calls of tests along
        [first, *_] = engines.engines
        for requests in (BATCH, LONG):
            write(recital, requests, first.generate(requests))
        behave(recital, "half")
        yield Setting(drafters, pair, tuple(engines.engines), folder, recital)


@pytest.fixture(scope="module")
def lending(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """Two engines, and the draft model asleep on the core of the second."""
    busy, dry = setting.engines[0], setting.engines[2]
    spec = replace(
        setting.drafters.drafters[0].spec,
        index=9,
        engine=dry.index,
        endpoint=local_endpoint(),
        log_file=str(tmp_path_factory.mktemp("sleeper") / "log"),
    )
    with DrafterPool([spec]) as sleepers, pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "NOTICE_ROUNDS", 0.0)
        sleepers.wait_ready()
        sleepers.drafters[0].wake_s = 0.0
        pool = EnginePool([], report_tokens=20, drafters=sleepers)
        pool.engines = [busy, dry]
        yield pool


def aim_at_the_model(setting: Setting, engine: Engine) -> None:
    aim(engine, [address(setting.drafters.drafters[0].spec.endpoint)], setting.folder)
