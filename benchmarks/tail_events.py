"""What an event of a rollout costs the driver: news of one of many requests, with and without a policy for the tail.

python -m benchmarks.tail_events

Engines are stand-ins that report every request once, and end when all reports were put into the driver's queue. So the
figures hold the driver's work alone, and all reports are taken before any request ends.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.results import Result, publish, spread
from specactor.rollout import continuation
from specactor.rollout.driver import Driver
from specactor.rollout.sglang.engine import Engine
from specactor.rollout.tail_plan import EngineLoad, Lend, Move, Planned, Replica, TailPolicy
from specactor.types import RolloutRequest, SamplingParams, Trajectory

ENGINES = 8
REQUESTS = (256, 2048)
REPETITIONS = 3
TOKENS = tuple(range(64))
"""Of each request when it is heard of."""


@dataclass(frozen=True, kw_only=True)
class AlwaysAsked:
    """The shipped policy, asked at each event, also without news and while all engines have requests."""

    policy: TailPolicy
    needs_dry: bool = False

    def decide(self, loads: Sequence[EngineLoad], finished: Sequence[int]) -> Sequence[Move | Replica | Lend]:
        return self.policy.decide(loads, finished)


@dataclass(kw_only=True)
class Reporting:
    """In place of an engine."""

    news: dict[str, Trajectory]
    all_told: threading.Barrier
    """Of the engines that have requests."""
    index: int = 0
    alive: bool = True
    spec: Any = field(
        default_factory=lambda: SimpleNamespace(config=SimpleNamespace(max_running_requests=64, routed_experts=False))
    )

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        on_finished: Callable[[Trajectory], None],
        on_progress: Callable[[RolloutRequest, Trajectory], None],
        report_tokens: int,
    ) -> None:
        for request in requests:
            on_progress(request, self.news[request.request_id])
        self.all_told.wait()
        for request in requests:
            on_finished(self.news[request.request_id])

    def kill(self) -> None:
        """Nothing to end."""


class FarAway:
    """Drafters that sleep so deeply that waking one never pays, which the policy has to find out."""

    def any_awake(self) -> bool:
        return False

    def free(self, engine: int) -> None:
        """Nothing to start."""

    def wake_s(self, engine: int) -> float | None:
        return 1e6

    def wake(self, engine: int) -> None:
        raise AssertionError("it does not pay")

    def sleep(self, engine: int) -> None:
        """It does."""


class AllTold(Exception):  # noqa: N818  (an event, like StopIteration)
    """The first response came, so all reports were taken."""


def measure(requests: int, policy: TailPolicy | None, *, dry: bool) -> float:
    """Milliseconds per report. Args: requests of all engines together; dry: the last engine has none of them."""
    busy = ENGINES - dry
    batch = [_request(i) for i in range(requests)]
    news = {request.request_id: _response(request) for request in batch}
    told = threading.Barrier(busy)
    engines = [Reporting(news=news, all_told=told) for _ in range(ENGINES)]
    ended = 0.0

    def end(_: Trajectory) -> None:
        nonlocal ended
        ended = time.perf_counter()
        raise AllTold

    driver = Driver(cast("list[Engine]", engines), notify=end, policy=policy, drafters=FarAway())
    parts = [batch[i::busy] if i < busy else [] for i in range(ENGINES)]
    started = time.perf_counter()
    with contextlib.suppress(AllTold):
        driver.run(parts)
    return 1000 * (ended - started) / requests


IDLE = Planned(migrate=False, drafters=True)
CASES: dict[str, tuple[TailPolicy | None, bool]] = {
    "no policy": (None, False),
    "all engines have requests, policy asked at each event": (AlwaysAsked(policy=IDLE), False),
    "all engines have requests": (IDLE, False),
    "one engine is dry, no drafter pays, policy asked at each event": (AlwaysAsked(policy=IDLE), True),
    "one engine is dry, no drafter pays": (IDLE, True),
}
"""Meaning -> (policy, whether an engine is dry)."""


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.tail_events", description="Milliseconds that an event of a rollout costs the driver."
    ).parse_args(arguments)
    rows = []
    for name, (policy, dry) in CASES.items():
        took = [spread([measure(n, policy, dry=dry) for _ in range(REPETITIONS)], "{:.3f}") for n in REQUESTS]
        print(f"{name}: {', '.join(took)} ms", flush=True)
        rows.append([name, *took])
    publish(
        "tail_events",
        Result(
            title="What an event of a rollout costs the driver",
            intro=(
                "Milliseconds of the driver's thread for the news of one request, by the requests of "
                f"{ENGINES} engines together, median (minimum-maximum) of {REPETITIONS} repetitions. Engines are "
                "stand-ins that report each request once. A policy for the tail (`rollout.tail`) is asked only while "
                "an engine is dry, and, if nothing was to be done, again when the requests of an engine or the longest "
                "response have changed by an eighth (`is_news`); `asked at each event` shows what that spares."
            ),
            columns=("engines", *(f"{n} requests" for n in REQUESTS)),
            rows=rows,
        ),
    )


def _request(i: int) -> RolloutRequest:
    return RolloutRequest(
        request_id=f"r{i}",
        prompt_ids=(1,) * 100,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=1000),
        seed=i,
        group_id=i // 8,
    )


def _response(request: RolloutRequest) -> Trajectory:
    return continuation.whole(
        request, token_ids=TOKENS, logprobs=(-1.0,) * len(TOKENS), finish_reason="stop", version=1
    )


if __name__ == "__main__":
    main()
