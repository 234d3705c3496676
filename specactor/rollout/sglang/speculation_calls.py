"""Rank calls about speculation."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import msgspec

from specactor.config import SpeculationConfig
from specactor.errors import EngineError
from specactor.rollout.decoupled.transport import DrafterAccess
from specactor.rollout.sglang import overlap
from specactor.rollout.sglang.engine_protocol import EngineSpec
from specactor.rollout.speculation.costs import OnlineCosts, Point
from specactor.rollout.speculation.drafter import Drafter
from specactor.rollout.speculation.registry import make_drafters
from specactor.rollout.speculation.speculator import Speculator

CONFIGURE = f"{__name__}:configure"
"""Rank call: speculate like this `SpeculationConfig` (JSON) from the next round on. For `specactor profile`, tests and
benchmarks; a run's setting comes by `SPECULATION`."""
REPORT = f"{__name__}:report"  # rank call: `Counts` per drafter since the last one, of rank 0
TRACE = f"{__name__}:trace"
"""Rank call: the spans recorded since the last one, of rank 0, as MessagePack. Payload: "on" or "off", from now on."""
ROUNDS = f"{__name__}:rounds"  # rank call: `Rounds` since `CONFIGURE`, of rank 0
SPECULATION = "SPECACTOR_SPECULATION"
"""Environment variable by which an engine's processes get the configuration that they start with."""
DRAFTERS = "SPECACTOR_DRAFTERS"
"""Environment variable by which they know where drafter processes are: a `DrafterAccess` as JSON."""


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of rounds, the latest of them if there were many."""

    plain: list[Point]  # on the engine's plain path
    verifies: list[Point]  # all others, also those that had no drafts
    drafts: dict[str, list[Point]]  # per drafter


def start_environment(spec: EngineSpec) -> dict[str, str]:
    """Return the environment of an engine's processes."""
    extra = {name.replace("-", "_"): value for name, value in spec.config.extra_args.items()}
    return {
        SPECULATION: msgspec.json.encode(spec.speculation).decode(),
        DRAFTERS: msgspec.json.encode(spec.drafters).decode(),
        overlap.VARIABLE: str(int(not extra.get("disable_overlap_schedule", False))),
        "SGLANG_EAGER_INPUT_NO_COPY": "1",  # the buffers are made for one row per request
    }


def starting() -> SpeculationConfig:
    text = os.environ.get(SPECULATION)
    return msgspec.json.decode(text, type=SpeculationConfig) if text else SpeculationConfig()


def make_speculator(config: SpeculationConfig) -> Speculator | None:
    from sglang.srt.runtime_context import get_parallel

    if config.mode == "off":
        return None
    drafters = make_drafters(config, connect=partial(_connect, config))
    return Speculator(config, drafters, clock=time.perf_counter, decides=get_parallel().tp_rank == 0)


def _connect(config: SpeculationConfig, name: str) -> Drafter:
    """Connect one rank of an engine with drafter processes."""
    from sglang.srt.runtime_context import get_parallel

    from specactor.rollout.decoupled.remote_drafter import connect

    access = msgspec.json.decode(os.environ.get(DRAFTERS, "{}"), type=DrafterAccess)
    drafters = [address for address in access.drafters if address.drafter == name]
    if not (drafters or access.may_be_none):
        raise EngineError(
            f"rollout.speculation.drafters: got {config.draft_methods}, but this engine was started without drafter "
            f"processes for {name}. Start it with more parallel.drafters."
        )
    if get_parallel().tp_rank:
        drafters = []
    return connect(drafters, engine=access.engine, window=config.largest_window, name=name)


def configure(rank: Any, payload: bytes) -> bytes:
    """Answer `CONFIGURE`. Running requests are drafted for as if new."""
    worker = _worker(rank)
    config = msgspec.json.decode(payload, type=SpeculationConfig)
    if config.max_window > worker.max_window:
        raise EngineError(
            f"rollout.speculation.max_window: got {config.max_window}, but this engine was started with "
            f"{worker.max_window}. Start it with the larger one."
        )
    worker.use(make_speculator(config))
    return b""


def report(rank: Any, payload: bytes) -> bytes:
    speculator = _worker(rank).speculator
    return msgspec.json.encode(speculator.report() if speculator is not None else {})


def trace(rank: Any, payload: bytes) -> bytes:
    return msgspec.msgpack.encode(_worker(rank).rounds.take(on=payload == b"on"))


def rounds(rank: Any, payload: bytes) -> bytes:
    speculator = _worker(rank).speculator
    costs = speculator.costs if speculator is not None else OnlineCosts()
    return msgspec.json.encode(
        Rounds(
            plain=[*costs.plain],
            verifies=[*costs.verifies],
            drafts={name: [*points] for name, points in costs.drafts.items()},
        )
    )


def _worker(rank: Any) -> Any:
    worker = rank.draft_worker
    if worker is None:
        raise EngineError("speculation: this engine was started with rollout.speculation.mode off. Start it with auto.")
    return worker
