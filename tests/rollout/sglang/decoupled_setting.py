"""An engine's drafter processes as tests see them: what they recite, whom engines ask, and what they still hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from specactor.config import SpeculationConfig
from specactor.rollout.decoupled.remote_drafter import connect
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.transport import Address, DrafterAccess, Keys, local_endpoint
from specactor.rollout.sglang.engine_client import Engine
from specactor.types import RolloutRequest
from tests.rollout.conftest import CONTEXT
from tests.rollout.sglang import recital
from tests.rollout.sglang.asking import probe
from tests.rollout.sglang.test_verify_worker import configure, facts

MAX_WINDOW = 8
REMOTE = "tests.rollout.sglang.remote"
LIMIT_S = 120.0
"""For one rollout, whatever the drafters do."""
OFF = SpeculationConfig(mode="off", max_window=MAX_WINDOW)


def decoupled(window: int | None = 4, *, mode: str = "decoupled", drafters: tuple[str, ...] = ("decoupled",)) -> Any:
    return SpeculationConfig(
        mode=mode,  # type: ignore[arg-type]
        drafters=drafters,
        window=window,
        max_window=MAX_WINDOW,
        draft_model="with the drafters",
    )


def loaded(name: str, window: int = MAX_WINDOW) -> SpeculationConfig:
    """A drafter of `remote`."""
    return SpeculationConfig(mode="coupled", drafters=(f"{REMOTE}:{name}",), window=window, max_window=MAX_WINDOW)


def plain(engine: Engine, requests: list[RolloutRequest]) -> list[object]:
    configure(engine, OFF)
    engine.flush()
    return list(facts(engine.generate(requests)))


def all_at_once(engines: Sequence[Engine], requests: list[RolloutRequest]) -> list[list[object]]:
    for engine in engines:
        engine.flush()
    with ThreadPoolExecutor(len(engines)) as threads:
        return list(threads.map(lambda engine: facts(engine.generate(requests)), engines))


def recital_folder(folder: Path) -> Path:
    """Of drafters that know nothing yet."""
    recital.write(folder, [], [])
    recital.behave(folder, "nothing")
    return folder


def recital_spec(folder: Path, *, keys: Keys | None, endpoint: str = "", index: int = 0) -> DrafterSpec:
    return DrafterSpec(
        index=index,
        endpoint=endpoint or local_endpoint(),
        keys=keys,
        model_dir=str(folder),
        dtype="float32",
        device=1,
        context_length=CONTEXT,
        max_requests=48,
        continuer="tests.rollout.sglang.recital:Reciter",
        log_file=str(folder / f"drafter-{index}.log"),
        max_restarts=20,
    )


def aim(engine: Engine, drafters: Iterable[Address], folder: Path) -> None:
    """Drafter processes of the next configuration on."""
    access = DrafterAccess(drafters=tuple(drafters), engine=f"engine-{engine.index}")
    probe(engine, "aim", {"access": msgspec.to_builtins(access), "recital": str(folder)})


def wait_until(done: Callable[[], bool], what: str, within_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def assert_holds_nothing(endpoint: str, keys: Keys | None) -> None:
    """As the drafter tells an engine without requests."""
    looker = connect([Address(endpoint=endpoint, keys=keys)], engine="looker", window=1)

    def nothing() -> bool:
        looker.propose([], [])
        return looker.tails.live == [0] and looker.tails._drafters[0].others == 0

    try:
        wait_until(nothing, "the drafter holds requests that are over")
    finally:
        looker.stop()


def assert_engine_holds_nothing(engine: Engine) -> None:
    state = probe(engine, "remote")
    assert (state["requests"], state["tokens"]) == (0, 0)
