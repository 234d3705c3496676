"""One rank of a rollout on engines that keep a pace; rank 0 writes what all ranks got, and who generated it.

torchrun ... -m tests.rollout.waiting_script FOLDER SETTINGS_AS_JSON

SETTINGS: by name, milliseconds per token of each rank's engine; after how many requests it dies (0: never); whether
groups move; how many requests the last rank's engine must have ended before the first one's begins any.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch.distributed as dist

from specactor import samples
from specactor.data.dataset import Dataset
from specactor.data.tokenizer import load_tokenizer
from specactor.parallel.collective import Collective
from specactor.progress import Progress
from specactor.recipes import load
from specactor.rollout import collector as module
from specactor.rollout.child_process import ChildDied
from specactor.rollout.collector import RolloutCollector
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.grading import Grading
from specactor.rollout.pool import EnginePool
from specactor.rollout.resume import whole
from specactor.rollout.sglang.engine_client import Engine
from specactor.types import Problem, RolloutRequest, Trajectory
from tests.rollout.driver_cases import token

PROMPTS, SIZE, SLOTS, LONGEST = 16, 2, 4, 30


def length_of(request: RolloutRequest) -> int:
    return 1 + request.seed % LONGEST


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(6000):  # looks, and not time: a machine may stand still
        if is_so():
            return
        time.sleep(0.01)


@dataclass
class PacedEngine:
    """It runs as many requests at once as it has slots; others queue, as in an engine."""

    index: int
    token_s: float
    dies_after: int = 0
    begin: Callable[[], None] = lambda: None
    ended: Callable[[], None] = lambda: None
    alive: bool = True
    ready: bool = True
    busy_s: float = 0.0
    """Of its pace, over all slots."""
    num_ended: int = 0
    spec: Any = field(
        default_factory=lambda: SimpleNamespace(config=SimpleNamespace(max_running_requests=SLOTS, max_restarts=1))
    )
    slots: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(SLOTS))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def generate(
        self, requests: Sequence[RolloutRequest], *, on_finished: Callable[[Trajectory], None], **_: object
    ) -> None:
        threads = [threading.Thread(target=self._serve, args=(r, on_finished)) for r in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self.alive:
            raise ChildDied("died")

    def _serve(self, request: RolloutRequest, on_finished: Callable[[Trajectory], None]) -> None:
        with self.slots:
            self.begin()
            if not self.alive:
                return
            count = length_of(request)
            time.sleep(count * self.token_s)
            with self.lock:
                if not self.alive:
                    return
                self.busy_s += count * self.token_s
                self.num_ended += 1
                self.alive = self.num_ended != self.dies_after
                self.ended()
            tokens = [token(request.seed, position) for position in range(count)]
            on_finished(whole(request, token_ids=tokens, logprobs=[-1.0] * count, finish_reason="stop", version=0))

    def abort(self) -> None: ...

    def kill(self) -> None: ...


def main() -> None:
    dist.init_process_group("gloo")
    folder, collective, held_back = Path(sys.argv[1]), Collective(), module.held_back
    found = {}
    for name, options in json.loads(sys.argv[2]).items():
        # Else all are begun at once by the rank that they are meant for.
        module.held_back = held_back if options["move"] else lambda requests, **_: {}
        found[name] = rollout(collective, folder, options)
    if collective.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def rollout(collective: Collective, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What all ranks got, on rank 0."""
    rank, world, store = collective.rank, collective.world, cast("Any", collective.store)
    engine = PacedEngine(rank, options["token_ms"][rank] / 1000, options["dies_after"][rank])
    if options.get("after") and rank == 0:
        engine.begin = lambda: until(lambda: store.add("ended", 0) >= options["after"])
    if options.get("after") and rank == world - 1:
        engine.ended = lambda: store.add("ended", 1)
    pool = EnginePool([])
    pool.engines = cast("list[Engine]", [engine])

    def replace_lost() -> None:
        if not engine.alive:
            pool.engines = cast("list[Engine]", [PacedEngine(rank, engine.token_s)])

    words = f"--rollout.prompts-per-step {PROMPTS} --rollout.group-size {SIZE} --parallel.engines {world}"
    words += f" --rollout.engine.max-running-requests {SLOTS} --algorithm.dynamic-sampling off"
    verifier = "tests.rollout.verifiers:even"
    problems = [
        Problem(index=i, prompt="", prompt_ids=(1 + i,), answer="", verifier=verifier, metadata={})
        for i in range(PROMPTS)
    ]
    rollouts = RolloutCollector(
        load(["dapo", *words.split()]),
        pool=pool,
        drafters=DrafterPool([]),
        grading=Grading(timeout_s=60),
        collective=collective,
        tokenizer=load_tokenizer(folder / "tokenizer"),
        train_data=Dataset(problems),
        eval_data={},
        progress=Progress(3),
        host="",
        max_prompt_tokens=50,
        replace_lost=replace_lost,
    )
    keys = store.num_keys()
    collective.barrier()
    began_s = time.monotonic()
    groups = rollouts.collect(0)
    seconds = time.monotonic() - began_s
    own = [t.request_id for group in groups for t in group.trajectories if samples.is_here(t)]
    collective.barrier()
    return {
        "seconds": max(collective.gather(seconds, float)),
        "busy_s": collective.gather(engine.busy_s / SLOTS, float),
        "owned": collective.gather(own, list[str]),
        "moved": rollouts.take_stats().groups_moved,
        "keys": store.num_keys() - keys - bool(options.get("after")),
        "responses": [
            [t.request_id, t.seed, list(t.token_ids)]
            for group in samples.whole(groups, wanted=rank == 0)
            for t in group.trajectories
            if rank == 0
        ],
    }


if __name__ == "__main__":
    main()
