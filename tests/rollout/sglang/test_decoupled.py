"""An engine with drafter processes emits what plain decoding emits, whatever becomes of the drafters."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specactor.config import EngineConfig, SpeculationConfig
from specactor.errors import EngineError
from specactor.rollout.decoupled.access import DrafterAccess
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.transport import local_endpoint, make_keys
from specactor.rollout.draft.counts import Counts
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine import Engine, EngineSpec
from specactor.rollout.sglang.running import running
from tests.rollout.conftest import CONTEXT, Footprint, request
from tests.rollout.sglang.test_draft_model import make_dense
from tests.rollout.sglang.test_speculation import batch as batch_of_all_kinds
from tests.rollout.sglang.test_speculation import configure, facts, report

MAX_WINDOW = 8
OFF = SpeculationConfig(mode="off", max_window=MAX_WINDOW)
ENGINE_KEYS, DRAFTER_KEYS = make_keys()
BATCH = [request(i, new=40 + i % 23) for i in range(24)]


@dataclass(frozen=True)
class Setting:
    """A draft model with the target's weights in a process of its own, and engines of one and of two ranks."""

    drafters: DrafterPool
    engines: tuple[Engine, Engine]
    draft_dir: str

    def speculation(self, window: int | None = 3, *, mode: str = "decoupled", **fields: object) -> SpeculationConfig:
        return SpeculationConfig(
            mode=mode,  # type: ignore[arg-type]
            drafters=("decoupled",),
            window=window,
            max_window=MAX_WINDOW,
            draft_model=self.draft_dir,
            sharpen="shared",
            **fields,  # type: ignore[arg-type]
        )


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, make_spec: Callable[..., EngineSpec]) -> Iterator[Setting]:
    folder = make_dense(tmp_path_factory.mktemp("dense"))
    log = tmp_path_factory.mktemp("drafter") / "log"
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
        sharpen="shared",
        log_file=str(log),
    )
    start = SpeculationConfig(mode="decoupled", max_window=MAX_WINDOW, window=3, draft_model=folder)
    specs = [
        make_spec(
            60 + ranks,
            model_dir=folder,
            tensor_parallel=ranks,
            devices=tuple(range(ranks)),
            config=EngineConfig(max_running_requests=32, max_total_tokens=6144, start_timeout_s=170),
            speculation=start,
            drafters=DrafterAccess(endpoints=(spec.endpoint,), keys=ENGINE_KEYS, engine=f"engine-{ranks}"),
        )
        for ranks in (1, 2)
    ]
    with DrafterPool([spec]) as drafters, EnginePool(specs) as engines:
        drafters.wait_ready()
        engines.wait_ready()
        one, two = engines.engines
        yield Setting(drafters, (one, two), folder)


@pytest.fixture(params=[0, 1], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, setting: Setting) -> Engine:
    chosen: Engine = setting.engines[request.param]
    chosen.flush()
    return chosen


def plain(engine: Engine, requests: list[object]) -> list[object]:
    configure(engine, OFF)
    engine.flush()
    result: list[object] = facts(engine.generate(requests))  # type: ignore[arg-type]
    return result


def drafted(engine: Engine, config: SpeculationConfig, requests: list[object]) -> tuple[list[object], Counts]:
    configure(engine, config)
    engine.flush()
    report(engine)
    result: list[object] = facts(engine.generate(requests))  # type: ignore[arg-type]
    return result, report(engine)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_the_target_itself_as_drafter_is_always_right(setting: Setting, engine: Engine, window: int) -> None:
    want = plain(engine, BATCH)
    got, counts = drafted(engine, setting.speculation(window), BATCH)
    assert got == want
    assert counts.drafted > 50
    assert counts.accepted >= 0.999 * counts.drafted
    assert counts.failures == 0


def test_requests_of_all_kinds(setting: Setting, engine: Engine) -> None:
    requests = batch_of_all_kinds()
    want = plain(engine, requests)
    got, counts = drafted(engine, setting.speculation(), requests)
    assert got == want
    assert counts.accepted > 0
    assert counts.failures == 0


def test_windows_are_chosen(setting: Setting, engine: Engine) -> None:
    want = plain(engine, BATCH)
    for mode in ("decoupled", "auto"):
        got, counts = drafted(engine, setting.speculation(None, mode=mode), BATCH)
        assert got == want
        assert counts.failures == 0


def test_a_drafter_that_dies_costs_no_token(setting: Setting) -> None:
    """It dies while it drafts; the engine goes on without it, and finds the one that takes its place."""
    engine = setting.engines[0]
    want = plain(engine, BATCH)
    pool = setting.drafters
    configure(engine, setting.speculation())
    engine.flush()
    seen: list[str] = []
    footprint = Footprint.of(pool.drafters[0].pid)
    restarts = pool.restarts

    def kill(trajectory: object) -> None:
        seen.append("")
        if len(seen) == 2:
            started = pool.drafters[0].started
            assert started is not None
            os.kill(started.pid, signal.SIGKILL)

    assert facts(engine.generate(BATCH, on_finished=kill)) == want
    deadline = time.monotonic() + 120
    while pool.restarts == restarts:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pool.drafters[0].wait_ready()
    footprint.assert_gone(within_s=0.1)
    report(engine)
    for _ in range(10):
        engine.flush()
        assert facts(engine.generate(BATCH)) == want
        if report(engine).accepted > 0:
            return
    raise AssertionError("no draft of the new drafter was accepted")


def test_an_engine_without_drafters_refuses_the_mode(
    make_spec: Callable[..., EngineSpec], setting: Setting, tmp_path: Path
) -> None:
    spec = make_spec(63, speculation=setting.speculation(), log_file=str(tmp_path / "log"))
    with pytest.raises(EngineError, match=r"parallel.drafters >= 1"), running(spec):
        pass
