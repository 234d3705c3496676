"""Two engines and a drafter process on two cores, of which every mode uses its own part.

Invariants: engine i stays on core i, and the drafter process of the first on core 1; every response is what
was decoded before for that request, in whatever mode.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from benchmarks.decoupled_speed_table import AUTO_APART, AUTO_TOGETHER
from benchmarks.dialled import SCRIPT
from benchmarks.trained_models import Models, task_recipe
from specactor.config import EngineConfig, SpeculationConfig
from specactor.data.dataset import build_dataset
from specactor.data.tokenizer import load_tokenizer
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.decoupled.transport import Address, DrafterAccess, local_endpoint
from specactor.rollout.sglang.engine_client import Engine, EngineSpec
from specactor.rollout.sglang.speculation_calls import CONFIGURE, REPORT, ROUNDS, Rounds
from specactor.rollout.speculation.counters import Counts
from specactor.types import RolloutRequest, SamplingParams

NEW_TOKENS = 96
MAX_WINDOW = 8
GROUPS = 4
"""That a cell decodes one after the other, each of a batch of requests: one alone takes too short a time."""
CONTEXT = 256


@dataclass(frozen=True, kw_only=True)
class Way:
    """A drafter to be compared in all modes."""

    name: str
    in_engine: str  # drafter of mode coupled
    continuer: str  # of the drafter process
    model_dir: str  # of the draft model, or the path of the script
    acceptance: float | None = None  # none: measured
    share: float | None = None


@dataclass(kw_only=True)
class Bench:
    """Two engines, one drafter address, and what was measured."""

    engines: tuple[Engine, Engine]
    endpoint: str  # of the first engine's drafter process
    folder: Path
    requests: dict[int, list[RolloutRequest]]  # by batch: GROUPS times as many
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)
    off: frozenset[int] = frozenset()  # indices of the engines that were told to decode plainly

    def of(self, mode: str) -> Sequence[Engine]:
        """The engines that decode in this mode."""
        return self.engines[:1] if mode in ("decoupled", AUTO_APART) else self.engines

    def groups(self, batch: int) -> list[list[RolloutRequest]]:
        """Decoded one after the other."""
        requests = self.requests[batch]
        return [requests[first : first + batch] for first in range(0, len(requests), batch)]

    def configure(self, config: SpeculationConfig, engines: Sequence[Engine]) -> None:
        """These; all others have nothing to do, and nobody to talk to."""
        for index, engine in enumerate(self.engines):
            wanted = config if engine in engines else speculation("off")
            if wanted.mode != "off" or index not in self.off:
                engine.rank_call(CONFIGURE, msgspec.json.encode(wanted), timeout_s=60)
            self.off = self.off | {index} if wanted.mode == "off" else self.off - {index}

    def decode(self, requests: Sequence[RolloutRequest], engines: Sequence[Engine]) -> float:
        """Seconds. SystemExit for a response that is not what was decoded before."""
        parts = [requests[k :: len(engines)] for k in range(len(engines))]
        work = [(engine, part) for engine, part in zip(engines, parts, strict=True) if part]
        for engine, _ in work:
            engine.flush()
        with ThreadPoolExecutor(len(work)) as threads:
            began = time.perf_counter()
            futures = [threads.submit(engine.generate, part) for engine, part in work]
            done = [response for future in futures for response in future.result()]
            seconds = time.perf_counter() - began
        for response in done:
            expected = self.expected.setdefault(response.request_id, tuple(response.token_ids))
            if response.token_ids != expected:
                raise SystemExit(f"response {response.request_id} is {response.token_ids}, expected {expected}")
        return seconds

    def counts(self) -> Counts:
        """Of all drafters and engines since the last call."""
        total = Counts()
        for engine in self.engines:
            for counts in msgspec.json.decode(
                engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts]
            ).values():
                total += counts
        return total

    def rounds(self) -> Rounds:
        """Of the first engine since it was configured."""
        return msgspec.json.decode(self.engines[0].rank_call(ROUNDS, b"", timeout_s=60)[0], type=Rounds)


def shortened(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    """To a single token, which prefills give."""
    return [
        replace(r, request_id=f"{r.request_id}.short", sampling=replace(r.sampling, max_new_tokens=1)) for r in requests
    ]


def speculation(mode: str, drafter: str = "suffix", window: int | None = None) -> SpeculationConfig:
    """Args: a contestant, or a mode."""
    drafters = {"decoupled": ("decoupled",), AUTO_APART: (drafter, "decoupled")}
    modes = {AUTO_APART: "auto", AUTO_TOGETHER: "auto"}
    return SpeculationConfig(
        mode=modes.get(mode, mode),  # type: ignore[arg-type]
        drafters=drafters.get(mode, (drafter,)),
        window=window,
        max_window=MAX_WINDOW,
        draft_model=("there",),
    )


@contextmanager
def bench(models: Models, batches: Sequence[int], folder: Path) -> Iterator[Bench]:
    endpoint = local_endpoint()
    access = DrafterAccess(drafters=(Address(endpoint=endpoint),))
    script = str(folder / "script.json")
    largest = max(batches)
    engines: list[Engine] = []
    try:
        for index in range(2):
            spec = EngineSpec(
                index=index,
                model_dir=str(models.target),
                dtype="float32",
                devices=(index,),
                config=EngineConfig(
                    max_running_requests=largest, max_total_tokens=largest * (CONTEXT + 3 * (MAX_WINDOW + 1)) + 1024
                ),
                speculation=replace(speculation("coupled", "model"), mode="auto", draft_model=(str(models.draft),)),
                context_length=CONTEXT,
                log_file=str(folder / f"engine-{index}.log"),
                drafters=access if index == 0 else DrafterAccess(engine="second"),
            )
            engines.append(Engine(spec, **{SCRIPT: script}))
        for index, engine in enumerate(engines):
            engine.wait_ready(engine.spec.config.start_timeout_s)
            _pin(engine, index)
        one, two = engines
        yield Bench(
            engines=(one, two), endpoint=endpoint, folder=folder, requests={b: requests(models, b) for b in batches}
        )
    finally:
        for engine in engines:
            engine.stop()


def _pin(engine: Engine, core: int) -> None:
    """All threads of its schedulers."""
    assert engine.ready is not None
    for pid in engine.ready.scheduler_pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def requests(models: Models, batch: int) -> list[RolloutRequest]:
    """GROUPS times as many, each of a prompt of its own, and of NEW_TOKENS tokens."""
    source = replace(task_recipe("B").data.train_source, size=200)
    problems = build_dataset(source, load_tokenizer(models.target), max_prompt_tokens=80)
    return [
        RolloutRequest(
            request_id=f"{batch}.{i}",
            prompt_ids=problems[i].prompt_ids,
            sampling=SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS, ignore_eos=True),
            seed=1 + (batch * 64 + i) * 7919,
            group_id=i,
        )
        for i in range(GROUPS * batch)
    ]


@contextmanager
def drafter(bench: Bench, way: Way) -> Iterator[DrafterProcess]:
    """The first engine's, on the other engine's core."""
    process = DrafterProcess(
        DrafterSpec(
            index=0,
            endpoint=bench.endpoint,
            model_dir=way.model_dir,
            dtype="float32",
            device=1,
            context_length=CONTEXT,
            kv_tokens=max(bench.requests) * (CONTEXT + 128),
            max_requests=max(bench.requests),
            continuer=way.continuer,
            log_file=str(bench.folder / "drafter.log"),
        )
    )
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()
