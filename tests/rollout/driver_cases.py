"""Engines of which nothing is real but the noise, and requests for them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from torch.distributed import HashStore  # type: ignore[attr-defined]

from specactor.rollout import resume
from specactor.rollout.child_process import ChildDied
from specactor.rollout.driver import Driver
from specactor.rollout.requests import assign
from specactor.rollout.sglang.engine_client import Engine
from specactor.types import RolloutRequest, SamplingParams, Trajectory

GROUPS, SIZE = 4, 3


def token(seed: int, position: int) -> int:
    return random.Random(1000 * seed + position).randrange(100)


def make_requests(seed: int) -> list[RolloutRequest]:
    chance = random.Random(seed)
    return [
        RolloutRequest(
            request_id=f"r{i}",
            prompt_ids=(1,) * (1 + i // SIZE),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=chance.randint(1, 30)),
            seed=100 * seed + i,
            group_id=i // SIZE,
        )
        for i in range(GROUPS * SIZE)
    ]


def expected(request: RolloutRequest) -> tuple[int, ...]:
    start = len(request.prompt_ids)
    return tuple(token(request.seed, start + t) for t in range(request.sampling.max_new_tokens))


@dataclass
class FakeEngine:
    """Its noise is keyed as an engine's; it emits one token of every request per round."""

    position_of: Callable[[RolloutRequest, int], int] = lambda request, emitted: len(request.prompt_ids) + emitted
    dies_after: float = float("inf")
    """Rounds."""
    stops_at: Callable[[int], bool] = lambda token: False
    """Tokens that end a response before its length does."""
    alive: bool = True
    spec: Any = field(
        default_factory=lambda: SimpleNamespace(config=SimpleNamespace(max_running_requests=4, routed_experts=False))
    )
    aborted: set[str] = field(default_factory=set)
    num_aborts: int = 0
    num_calls: int = 0
    killed: bool = False
    lock: Any = field(default_factory=threading.Lock)

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        on_finished: Callable[[Trajectory], None],
        on_progress: Callable[[RolloutRequest, Trajectory], None],
        report_tokens: int,
    ) -> None:
        emitted: dict[str, list[int]] = {r.request_id: [] for r in requests}
        left = list(requests)
        with self.lock:
            self.aborted -= set(emitted)
            self.num_calls += 1
        while left:
            time.sleep(0)
            self.dies_after -= 1
            if self.dies_after <= 0:
                self.alive = False
            for request in list(left):
                if not self.alive or self.killed:
                    raise ChildDied("died")
                tokens = emitted[request.request_id]
                with self.lock:
                    aborted = request.request_id in self.aborted
                if not aborted:
                    place = self.position_of(request, resume.num_begun(request) + len(tokens))
                    tokens.append(token(request.seed, place))
                stops = bool(tokens) and self.stops_at(tokens[-1])
                whole = stops or resume.num_begun(request) + len(tokens) == request.sampling.max_new_tokens
                response = resume.whole(
                    request,
                    token_ids=tokens,
                    logprobs=[-1.0] * len(tokens),
                    finish_reason="stop" if stops else "length" if whole else "abort",
                    version=1,
                )
                if aborted or whole:
                    left.remove(request)
                    on_finished(response)
                elif report_tokens and len(tokens) % report_tokens == 0:
                    on_progress(request, response)

    def abort_requests(self, ids: Sequence[str]) -> None:
        with self.lock:
            self.aborted |= set(ids)
            self.num_aborts += 1

    def abort(self) -> None:
        self.killed = True

    def kill(self) -> None:
        self.killed = True


def enough(groups: int) -> Callable[[int], bool]:
    """For a rollout that stops at so many complete groups."""
    store = HashStore()
    return lambda more: bool(store.add("complete", more) >= groups)


def drive(
    engines: Sequence[FakeEngine], requests: Sequence[RolloutRequest], **options: Any
) -> tuple[Driver, list[Trajectory]]:
    seen: list[Trajectory] = []
    options = {"notify": seen.append, "report_tokens": 1} | options
    driver = Driver(cast("list[Engine]", engines), **options)
    driver.run(assign(requests, len(engines)))
    return driver, seen
