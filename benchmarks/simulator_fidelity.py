"""Whether the simulator predicts real rollouts: it is told this machine's costs, then both are timed.

    python -m benchmarks.simulator_fidelity [--quick] [--repetitions 3]

One engine on one core, with task B's model. Its rounds are measured as `specactor profile` does, then the same
requests are run with every setting in turns, and simulated (`simulator_fidelity_prediction`). Writes
docs/results/simulator_fidelity.md.

Invariants: every response is what plain decoding emits, which is checked; all settings of a batch have the same
requests; drafters begin every run without history; prefills are left out (each run is timed again with a single token,
and that is subtracted).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")

import msgspec

from benchmarks.results import RESULTS, Result, publish
from benchmarks.simulator_fidelity_prediction import COLUMNS, Comparison, Seen, Setting, by_batch, predicted_s, summary
from benchmarks.tail_speed import LAW, long_sums
from benchmarks.trained_models import Models, task_models
from specactor.config import EngineConfig, RolloutConfig, SpeculationConfig
from specactor.parallel.layout import ModelShape
from specactor.planning.profile_command import Sizes, measure
from specactor.planning.profile_grid import cells, checks, cost_table
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.sglang.speculation_calls import CONFIGURE
from specactor.rollout.speculation.costs import CostTable
from specactor.rollout.speculation.counters import Counts
from specactor.types import RolloutRequest, SamplingParams

NAME = "simulator_fidelity"
BATCHES, QUICK_BATCHES = {4: 8, 16: 4, 64: 3}, {4: 4, 16: 2}  # batch -> rollouts of a run, one after the other
DRAFTERS = ("suffix", "model")
GROUP_SIZE = 4
MAX_WINDOW = 4
CONTEXT = 256
LIMIT_S = 300.0
PROFILE_S, QUICK_PROFILE_S = 150.0, 60.0
CORE = 0


def settings(batch: int, *, quick: bool) -> list[Setting]:
    """The widest fixed window of each drafter is among them: chosen windows are predicted from its counts."""
    drafters = DRAFTERS
    fixed = [(name, window) for name in drafters for window in (2, MAX_WINDOW)]
    return [
        Setting(batch=batch),
        *(Setting(batch=batch, drafters=(name,), window=window) for name, window in fixed),
        *(Setting(batch=batch, drafters=(name,)) for name in drafters),
        Setting(batch=batch, drafters=("suffix", "model"), auto=True),
    ]


@dataclass(kw_only=True)
class Run:
    """What was measured of a setting."""

    seconds: list[float] = field(default_factory=list)  # per repetition, all its rollouts, without prefills
    counts: Counts = field(default_factory=Counts)  # of all repetitions


@dataclass(kw_only=True)
class Bench:
    """The engine, the requests, and what they emit."""

    engine: Engine
    models: Models
    costs_file: Path
    rollouts: dict[int, list[list[RolloutRequest]]]  # by batch
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def run(self, setting: Setting) -> tuple[float, Counts]:
        """(seconds of its rollouts without prefills, counts of its drafters)"""
        config = speculation(setting, self.models, str(self.costs_file))
        self.engine.rank_call(CONFIGURE, msgspec.json.encode(config), timeout_s=60)
        self.engine.speculation_counts()
        rollouts = self.rollouts[setting.batch]
        seconds = sum(self._seconds(requests) for requests in rollouts)
        counts = sum(self.engine.speculation_counts().values(), start=Counts())
        return seconds - sum(self._seconds([_short(r) for r in requests]) for requests in rollouts), counts

    def lengths(self, requests: Sequence[RolloutRequest]) -> list[int]:
        return [len(self.expected[request.request_id]) for request in requests]

    def _seconds(self, requests: Sequence[RolloutRequest]) -> float:
        """Raises SystemExit where the responses are not those of the first run."""
        self.engine.flush()
        began = time.perf_counter()
        done = self.engine.generate(requests, timeout_s=LIMIT_S)
        seconds = time.perf_counter() - began
        for response in done:
            expected = self.expected.setdefault(response.request_id, tuple(response.token_ids))
            if response.token_ids != expected:
                raise SystemExit(f"response {response.request_id} is {response.token_ids}, expected {expected}")
        return seconds


def _short(request: RolloutRequest) -> RolloutRequest:
    return replace(
        request, request_id=f"{request.request_id}.short", sampling=replace(request.sampling, max_new_tokens=1)
    )


def speculation(setting: Setting | None, models: Models, costs_file: str = "") -> SpeculationConfig:
    """Of a setting; None: what the engine is started with."""
    whole = SpeculationConfig(mode="auto", drafters=DRAFTERS, max_window=MAX_WINDOW, draft_model=(str(models.draft),))
    if setting is None:
        return whole
    if not setting.drafters:
        return replace(whole, mode="off")
    table = costs_file if setting.window is None else ""
    return replace(
        whole,
        mode="auto" if setting.auto else "coupled",
        drafters=setting.drafters,
        window=setting.window,
        cost_table=table,
    )


def requests(models: Models, batches: dict[int, int]) -> dict[int, list[list[RolloutRequest]]]:
    """By batch, so many rollouts; no two share a prompt."""
    prompts = long_sums(models)
    made: dict[int, list[list[RolloutRequest]]] = {}
    number = 0
    for batch, rollouts in batches.items():
        made[batch] = []
        for _ in range(rollouts):
            own = [prompts.pop() for _ in range(batch // GROUP_SIZE)]
            lengths = LAW.lengths(batch, seed=number)
            made[batch].append(
                [
                    RolloutRequest(
                        request_id=f"{number + i}",
                        prompt_ids=own[i // GROUP_SIZE],
                        sampling=SamplingParams(temperature=1.0, max_new_tokens=lengths[i]),
                        seed=1 + (number + i) * 7919,
                        group_id=i // GROUP_SIZE,
                    )
                    for i in range(batch)
                ]
            )
            number += batch
    return made


def rollout_config(models: Models, largest: int) -> RolloutConfig:
    """As a recipe would have it."""
    return RolloutConfig(
        prompts_per_step=largest // GROUP_SIZE,
        group_size=GROUP_SIZE,
        max_new_tokens=LAW.longest,
        engine=EngineConfig(
            max_running_requests=largest, max_total_tokens=largest * (CONTEXT + 3 * (MAX_WINDOW + 1)) + 1024
        ),
        speculation=speculation(None, models),
    )


def pin(engine: Engine, core: int) -> None:
    """All threads of its schedulers."""
    assert engine.ready is not None
    for pid in engine.ready.scheduler_pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def profile(engine: Engine, config: RolloutConfig, models: Models, *, quick: bool) -> tuple[CostTable, float]:
    """(the table of `specactor profile`, median error of its held-out cells)"""
    assert engine.ready is not None
    sizes = Sizes.of(config, vocab=ModelShape.read(models.target).vocab_size, context=CONTEXT - 2)
    most = sizes.most_requests(config, engine.ready.kv_tokens)
    chosen = cells(max_requests=most, max_window=MAX_WINDOW, drafters=DRAFTERS)
    rounds = measure(engine, config, chosen, sizes, limit_s=QUICK_PROFILE_S if quick else PROFILE_S)
    table = cost_table(rounds, model=str(models.target), device="core", date="")
    return table, median(check.error for check in checks(rounds, table))


def measured(
    bench: Bench, todo: Sequence[Setting], repetitions: int, note: Callable[[str], None]
) -> dict[Setting, Run]:
    """All settings in turns, forwards and backwards; a first run of each is not counted."""
    runs = {setting: Run() for setting in todo}
    for repetition in range(-1, repetitions):
        for setting in todo if repetition % 2 else todo[::-1]:
            seconds, counts = bench.run(setting)
            if repetition >= 0:
                runs[setting].seconds.append(seconds)
                runs[setting].counts += counts
        note(f"batch {todo[0].batch}: repetition {repetition + 1} of {repetitions}")
    return runs


def compared(bench: Bench, runs: dict[Setting, Run], table: CostTable, repetitions: int) -> list[Comparison]:
    """Measured beside predicted, of one batch."""
    batch = next(iter(runs)).batch
    rollouts = bench.rollouts[batch]
    tokens = sum(sum(bench.lengths(some)) - len(some) for some in rollouts)

    def seen(name: str, window: int) -> Seen:
        own = runs[Setting(batch=batch, drafters=(name,), window=window)]
        return Seen.of(own.counts, tokens=tokens * repetitions, window=window)

    return [
        Comparison(
            setting=setting,
            measured_s=median(run.seconds),
            predicted_s=sum(
                predicted_s(
                    setting,
                    table,
                    {name: seen(name, setting.window or MAX_WINDOW) for name in setting.drafters},
                    bench.lengths(some),
                    [request.group_id for request in some],
                    max_window=MAX_WINDOW,
                )
                for some in rollouts
            ),
            tokens=tokens,
        )
        for setting, run in runs.items()
    ]


def run(batches: dict[int, int], *, quick: bool, repetitions: int, note: Callable[[str], None]) -> list[Comparison]:
    models = task_models("B")
    config = rollout_config(models, max(batches))
    with tempfile.TemporaryDirectory(prefix="simulator-fidelity-") as temporary:
        folder = Path(temporary)
        spec = EngineSpec(
            index=0,
            model_dir=str(models.target),
            dtype="float32",
            devices=(CORE,),
            config=config.engine,
            speculation=config.speculation,
            context_length=CONTEXT,
            log_file=str(folder / "engine.log"),
        )
        found: list[Comparison] = []
        with running(spec) as engine:
            pin(engine, CORE)
            table, error = profile(engine, config, models, quick=quick)
            note(f"rounds are profiled, held-out ones are predicted with a median error of {error:.1%}")
            (folder / "costs.json").write_text(table.to_json())
            bench = Bench(
                engine=engine, models=models, costs_file=folder / "costs.json", rollouts=requests(models, batches)
            )
            for batch in batches:
                runs = measured(bench, settings(batch, quick=quick), repetitions, note)
                found += compared(bench, runs, table, repetitions)
                for one in found[-len(runs) :]:
                    note(" | ".join(one.row()))
    return found


def result(found: Sequence[Comparison], repetitions: int) -> Result:
    return Result(
        title="Simulated and real rollouts",
        verdict=summary(found),
        intro=(
            "Task B's model of 1.8 M parameters in one engine on one core, temperature 1, long sums that end where the "
            f"model ends them or at heavy-tailed limits of at most {LAW.longest} tokens, "
            f"groups of {GROUP_SIZE}; a row is several rollouts "
            f"({', '.join(f'{n} at batch {batch}' for batch, n in BATCHES.items())}); seconds without prefills, median "
            f"of {repetitions} repetitions in turns, equal tokens checked. Predicted: "
            "`simulate` with the table of `specactor profile`, measured just before; the lengths of the run; and "
            "acceptance by position, as counted in the run of that fixed window, or of window "
            f"{MAX_WINDOW} for chosen windows and `auto`. Text drafters often find nothing, which the simulator does "
            "not know: the table is stretched so that its rounds verify as many rows as were counted."
        ),
        columns=COLUMNS,
        rows=[one.row() for one in found],
        summary=by_batch(found),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="batches 4 and 16, two drafters: about 2 minutes")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the page")
    options = parser.parse_args(arguments)
    if options.repetitions < 1:
        parser.error(f"--repetitions: got {options.repetitions}, expected >= 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the engine is stopped
    found = run(
        QUICK_BATCHES if options.quick else BATCHES,
        quick=options.quick,
        repetitions=options.repetitions,
        note=lambda text: print(text, flush=True),
    )
    publish(NAME, result(found, options.repetitions), options.results)


if __name__ == "__main__":
    main()
