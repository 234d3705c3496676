"""Coupled and decoupled drafting on the same two cores, and whether the planner knew which would win.

    python -m benchmarks.decoupled_speed [--batches 1 4 ...] [--repetitions 3]

Plain and coupled decoding use two engines of one core each, with half of the requests each; decoupled, one engine with
all requests and one drafter process. Drafters are a trained draft model, and `dialled` ones of known cost and
acceptance. What is predicted comes from rounds that were timed before, on other requests.

Invariants: every response is what plain decoding emits, which is checked; contestants take turns; prefills are left out
of all times (each run is timed again with a single token, and that is subtracted).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.dialled import SCRIPT, Script
from benchmarks.results import Result, publish
from benchmarks.trained_models import Models, task_models, task_recipe
from specactor.config import EngineConfig, SpeculationConfig
from specactor.data.dataset import build_dataset
from specactor.data.tokenizer import load_tokenizer
from specactor.rollout.decoupled.access import DrafterAccess
from specactor.rollout.decoupled.host import DrafterProcess
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.transport import local_endpoint
from specactor.rollout.draft.counts import Counts
from specactor.rollout.planning.costs import CostTable, Grid, Point
from specactor.rollout.planning.plans import Cluster, DrafterEngine, DrafterOption, VerifierOption
from specactor.rollout.planning.rounds import survival_of
from specactor.rollout.planning.search import search
from specactor.rollout.sglang.engine import Engine, EngineSpec
from specactor.rollout.sglang.speculation_calls import CONFIGURE, REPORT, ROUNDS, Rounds
from specactor.types import RolloutRequest, SamplingParams

BATCHES = (1, 4, 8, 16)
NEW_TOKENS = 96
MAX_WINDOW = 8
CONTEXT = 256
LIMIT_S = 300.0
ACCEPTANCES = (0.6, 0.8, 0.9)
SHARES = (0.1, 0.3)
"""Of a plain step, what a dialled drafter's step takes."""
MODES = ("off", "coupled", "decoupled")
FILLER = "specactor.rollout.draft.filler:Filler"
COLUMNS = (
    "drafter",
    "acceptance",
    "batch",
    *(f"{mode} tok/s" for mode in MODES),
    *(f"{mode} predicted" for mode in MODES),
    "fastest",
    "planned",
    "planned / fastest",
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A drafter to be compared in all modes."""

    name: str
    in_engine: str
    """Drafter of mode coupled."""
    continuer: str
    """Of the drafter process."""
    model_dir: str
    """Of the draft model, or the path of the script."""
    acceptance: float | None = None
    """None: measured."""
    share: float | None = None


@dataclass(kw_only=True)
class Bench:
    """Two engines, one drafter address, and what was measured."""

    engines: tuple[Engine, Engine]
    endpoint: str
    folder: Path
    requests: dict[int, list[RolloutRequest]]
    """By batch."""
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def configure(self, config: SpeculationConfig) -> None:
        for engine in self.engines:
            engine.rank_call(CONFIGURE, msgspec.json.encode(config), timeout_s=60)

    def seconds(self, requests: Sequence[RolloutRequest], *, engines: int) -> float:
        """Of decoding, without prefills."""
        return self._seconds(requests, engines) - self._seconds([_short(r) for r in requests], engines)

    def _seconds(self, requests: Sequence[RolloutRequest], engines: int) -> float:
        parts = [requests[k::engines] for k in range(engines)]
        work = [(engine, part) for engine, part in zip(self.engines, parts, strict=False) if part]
        for engine, _ in work:
            engine.flush()
        with ThreadPoolExecutor(len(work)) as threads:
            began = time.perf_counter()
            futures = [threads.submit(engine.generate, part, timeout_s=LIMIT_S) for engine, part in work]
            done = [response for future in futures for response in future.result()]
            seconds = time.perf_counter() - began
        for response in done:
            expected = self.expected.setdefault(response.request_id, response.token_ids)
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


def _short(request: RolloutRequest) -> RolloutRequest:
    return replace(
        request, request_id=f"{request.request_id}.short", sampling=replace(request.sampling, max_new_tokens=1)
    )


def speculation(mode: str, drafter: str = "suffix", window: int | None = None) -> SpeculationConfig:
    return SpeculationConfig(
        mode=mode,  # type: ignore[arg-type]
        drafters=("decoupled",) if mode == "decoupled" else (drafter,),
        window=window,
        max_window=MAX_WINDOW,
        draft_model="there",
    )


# ------------------------------------------------------------------------------------------------------------ engines


@contextmanager
def bench(models: Models, batches: Sequence[int], folder: Path) -> Iterator[Bench]:
    endpoint = local_endpoint()
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
                speculation=replace(speculation("auto", "model"), draft_model=str(models.draft)),
                context_length=CONTEXT,
                log_file=str(folder / f"engine-{index}.log"),
                drafters=DrafterAccess(endpoints=(endpoint,), engine=f"engine-{index}"),
            )
            engines.append(Engine.start(spec, **{SCRIPT: script}))
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
    """As many, each of a prompt of its own, and of NEW_TOKENS tokens."""
    source = replace(task_recipe("B").data.train, size=200)
    problems = build_dataset(source, load_tokenizer(models.target), max_prompt_tokens=80)
    return [
        RolloutRequest(
            request_id=f"{batch}.{i}",
            prompt_ids=problems[i].prompt_ids,
            sampling=SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS, ignore_eos=True),
            seed=1 + (batch * 64 + i) * 7919,
            group_id=i,
        )
        for i in range(batch)
    ]


@contextmanager
def drafter(bench: Bench, way: Way) -> Iterator[None]:
    """A drafter process on the second core, at the engines' address."""
    process = DrafterProcess(
        DrafterSpec(
            index=0,
            endpoint=bench.endpoint,
            model_dir=way.model_dir,
            dtype="float32",
            device=1,
            context_length=CONTEXT,
            kv_tokens=max(bench.requests) * (CONTEXT + 32),
            max_requests=max(bench.requests),
            continuer=way.continuer,
            log_file=str(bench.folder / "drafter.log"),
        )
    )
    try:
        process.wait_ready()
        yield
    finally:
        process.stop()


# ------------------------------------------------------------------------------------------------------------- profile


def profile(bench: Bench) -> CostTable:
    """Rounds of every batch and window on one core, with drafts that are wrong; and the trained model's drafting."""
    plain: list[Point] = []
    verifies: list[Point] = []
    drafts: list[Point] = []
    sizes = sorted({size for batch in bench.requests for size in (batch, -(-batch // 2))})
    for size in sizes:
        batch = min(b for b in bench.requests if b >= size)
        some = [replace(r, request_id=f"{r.request_id}.profile", seed=r.seed + 1) for r in bench.requests[batch][:size]]
        for window in range(MAX_WINDOW + 1):
            bench.configure(speculation("coupled", FILLER, window))
            bench.expected.clear()
            bench.seconds(some, engines=1)
            found = [point for point in bench.rounds().verifies if point[0] == size]
            verifies += found
            plain += found if window == 0 else []
        for window in (1, 2, 4, 8):
            bench.configure(speculation("coupled", "model", window))
            bench.seconds(some, engines=1)
            drafts += [p for p in bench.rounds().drafts.get("model", []) if p[0] == size]
    bench.expected.clear()
    return CostTable.fit(verifies, plain=plain, drafters={"model": drafts})


def predicted(table: CostTable, way: Way, survival: tuple[float, ...], batch: int) -> dict[str, float]:
    """Tokens per second of the best plan of every mode, by the planner's search; 0 where there is none."""
    if way.share is None:
        grid = table.drafters["model"]
    else:
        axis = table.plain.requests
        each = [way.share * table.plain_s(round(n)) for n in axis]
        windows = tuple(float(w) for w in range(1, MAX_WINDOW + 2))
        grid = Grid(requests=axis, per_request=windows, seconds=tuple(tuple(w * s for w in windows) for s in each))
    plans = search(
        Cluster(devices=2, requests=batch),
        [VerifierOption(devices=1, costs=replace(table, drafters={way.name: grid}))],
        [DrafterOption(name=way.name, survival=survival, engines=(DrafterEngine(devices=1, seconds=grid),))],
        max_window=MAX_WINDOW,
    )
    return {mode: max((p.tokens_per_s for p in plans if p.mode == mode), default=0.0) for mode in MODES}


# ------------------------------------------------------------------------------------------------------------- measure


def measure(bench: Bench, way: Way, batch: int, repetitions: int) -> tuple[dict[str, float], tuple[float, ...]]:
    """(tokens per second by mode, survivals as they were seen)."""
    tokens = bench.requests[batch]
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    seen = Counts()
    with drafter(bench, way):
        for repetition in range(-1, repetitions):
            for mode in MODES if repetition % 2 else MODES[::-1]:
                bench.configure(speculation(mode, way.in_engine))
                bench.counts()
                taken = bench.seconds(tokens, engines=1 if mode == "decoupled" else 2)
                if repetition >= 0:
                    seconds[mode].append(taken)
                    seen += bench.counts() if mode == "coupled" else Counts()
    emitted = batch * (NEW_TOKENS - 1)
    rates = [a / d if d else 0.0 for a, d in zip(seen.accepted_at, seen.drafted_at, strict=True)]
    survival, alive = [], 1.0
    for rate in rates[:MAX_WINDOW]:
        alive = min(alive, rate)
        survival.append(alive)
    return {mode: emitted / median(values) for mode, values in seconds.items()}, tuple(survival)


def ways(bench: Bench, models: Models, table: CostTable, batch: int) -> Iterator[Way]:
    """The trained model, then dialled drafters; the script is there when a dialled one is given out."""
    yield Way(name="trained model", in_engine="model", continuer="model", model_dir=str(models.draft))
    for share in SHARES:
        for acceptance in ACCEPTANCES:
            path = bench.folder / "script.json"
            script = Script(
                acceptance=acceptance,
                step_s=[share * table.plain_s(n) for n in range(1, batch + 1)],
                outputs={str(r.seed): list(bench.expected[r.request_id]) for r in bench.requests[batch]},
            )
            path.write_bytes(msgspec.json.encode(script))
            yield Way(
                name=f"dialled, {share:g} of a plain step",
                in_engine="benchmarks.dialled:InEngine",
                continuer="benchmarks.dialled:Elsewhere",
                model_dir=str(path),
                acceptance=acceptance,
                share=share,
            )


def row(way: Way, batch: int, measured: dict[str, float], foreseen: dict[str, float], p: float) -> list[str]:
    fastest, planned = max(measured, key=lambda m: measured[m]), max(foreseen, key=lambda m: foreseen[m])
    return [
        way.name,
        f"{p:.2f}",
        str(batch),
        *(f"{measured[mode]:.0f}" for mode in MODES),
        *(f"{foreseen[mode]:.0f}" for mode in MODES),
        fastest,
        planned,
        f"{measured[planned] / measured[fastest]:.2f}",
    ]


def run(batches: Sequence[int], repetitions: int, note: Callable[[str], None]) -> Result:
    models = task_models("B")
    rows, errors, shares = [], [], []
    with (
        tempfile.TemporaryDirectory(prefix="decoupled-speed-") as folder,
        bench(models, batches, Path(folder)) as found,
    ):
        table = profile(found)
        note("rounds are profiled")
        for batch in batches:
            for way in ways(found, models, table, batch):
                measured, seen = measure(found, way, batch, repetitions)
                survival = seen if way.acceptance is None else survival_of(way.acceptance, MAX_WINDOW)
                foreseen = predicted(table, way, survival, batch)
                rows.append(row(way, batch, measured, foreseen, survival[0]))
                errors += [abs(foreseen[mode] / measured[mode] - 1) for mode in MODES if foreseen[mode]]
                shares.append(float(rows[-1][-1]))
                note(" ".join(rows[-1]))
    return Result(
        title="Coupled and decoupled drafting on two cores",
        intro=(
            f"Task B's model of 1.8 M parameters, {NEW_TOKENS} tokens per request at temperature 1, median of "
            f"{repetitions} repetitions in turns. `off` and `coupled`: two engines on a core each, with half of the "
            "requests each; `decoupled`: one engine and one drafter process on a core each. Windows are chosen while "
            "it runs. `dialled` drafters compute nothing: they take a given share of a plain step per token, and are "
            "right as often as told. Acceptance is that of the first draft token. `predicted` is the planner's best "
            "plan of a mode, from rounds that were profiled before; `planned` is its first plan."
        ),
        columns=COLUMNS,
        rows=rows,
        notes=(
            f"Predicted against measured: median error {median(errors):.0%}, largest {max(errors):.0%} (aim: median "
            "10 %). "
            f"The planned mode reaches {min(shares):.2f} of the fastest or more (aim: 0.97 in every cell), "
            f"{sum(share >= 0.97 for share in shares)} of {len(shares)} cells meet that."
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that engines are stopped
    publish("decoupled_speed", run(options.batches, options.repetitions, lambda text: print(text, flush=True)))


if __name__ == "__main__":
    main()
