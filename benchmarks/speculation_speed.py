"""Speed of rollouts: plain SGLang, SGLang's own speculation, and ours with every drafter, on the same requests.

    python -m benchmarks.speculation_speed [--quick] [--models A B heavy] [--batches 1 4 ...]

Invariants: all contestants emit as many tokens for each request, and ours and plain SGLang the same tokens, which is
checked; one engine computes at a time, the others sleep; contestants take turns, and what is compared was measured
within one repetition.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import speculation_speed_models as grown
from benchmarks import speculation_speed_server as server
from benchmarks.results import publish
from benchmarks.speculation_speed_models import Shape
from benchmarks.speculation_speed_table import Cell, result
from benchmarks.trained_models import Models, cached, head, task_models, task_recipe
from specactor.config import EngineConfig, SpeculationConfig
from specactor.data.dataset import build_dataset
from specactor.data.tokenizer import load_tokenizer
from specactor.rollout.sglang.engine_client import Engine, EngineSpec
from specactor.rollout.sglang.speculation_calls import REPORT
from specactor.rollout.speculation.counters import Counts
from specactor.types import RolloutRequest, SamplingParams

GROUP_SIZE = 8
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FULL = {model: (BATCHES, 6) for model in ("B", "A", "heavy")}  # model -> batches, repetitions
QUICK = {"B": (BATCHES, 6), "heavy": ((1, 4, 16), 6)}
MAX_NEW_TOKENS = 64
MAX_WINDOW = 8
CONTEXT = 160

BOTH = ("a dense layer", "an EAGLE-3 head")  # made later


def ours(mode: str, *drafters: str) -> SpeculationConfig:
    return SpeculationConfig(mode=mode, drafters=drafters, draft_model=BOTH, max_window=MAX_WINDOW)  # type: ignore[arg-type]


OURS = {
    "off": SpeculationConfig(),
    "suffix": ours("coupled", "suffix"),
    "model": ours("coupled", "model"),
    "head": ours("coupled", "model:2"),
    "auto": ours("auto", "suffix", "model", "model:2"),
}
"""Contestants that share one engine; off: it is able to speculate, and does not."""
BUILTINS: dict[str, dict[str, str | int | float | bool]] = {
    "SGLang NGRAM": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8},
    "SGLang STANDALONE": {
        "speculative_algorithm": "STANDALONE",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    },
}
PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every contestant does in one cell and repetition: calls of `batch` requests, one after the other."""

    batch: int
    repetition: int
    phases: dict[str, list[RolloutRequest]]
    """cold: prompts that were never seen; warm: further responses to them."""

    def calls(self, phase: str) -> Iterator[list[RolloutRequest]]:
        requests = self.phases[phase]
        for start in range(0, len(requests), self.batch):
            yield requests[start : start + self.batch]


@dataclass(kw_only=True)
class Contestant:
    """A way to generate on an engine."""

    name: str
    engine: Engine
    speculation: SpeculationConfig | None = None  # none: the engine's own way
    clock: Callable[[Engine], float] = lambda engine: time.perf_counter()
    seconds: dict[tuple[str, int, int], float] = field(default_factory=dict)  # by (phase, batch, repetition)
    counts: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """[emitted, verifies] by (phase, batch)."""

    def begin(self) -> None:
        if self.speculation is not None:
            message = server.Switch(name=self.name, config=self.speculation)
            self.engine.rank_call(server.SWITCH, msgspec.json.encode(message), timeout_s=60)

    def run(self, work: Work, expected: dict[str, tuple[int, ...]]) -> None:
        """Both phases, timed. Raises SystemExit when a response is not what plain decoding emits."""
        self.begin()
        for phase in work.phases:
            self._accepted()
            seconds = 0.0
            tokens: dict[str, tuple[int, ...]] = {}
            for requests in work.calls(phase):
                started = self.clock(self.engine)
                responses = self.engine.generate(requests)
                seconds += self.clock(self.engine) - started
                tokens |= {response.request_id: tuple(response.token_ids) for response in responses}
            self._check(tokens, expected)
            if work.repetition >= 0:
                self.seconds[phase, work.batch, work.repetition] = seconds
                counts = self.counts.setdefault((phase, work.batch), [0, 0])
                counts[:] = [a + b for a, b in zip(counts, self._accepted(), strict=True)]

    def _check(self, tokens: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
        for name, emitted in tokens.items():
            same = len(emitted) == len(expected[name]) if self.name in BUILTINS else emitted == expected[name]
            if not same:
                raise SystemExit(f"{self.name}: response {name} is {emitted}, expected {expected[name]}")

    def _accepted(self) -> tuple[int, int]:
        """(emitted, verifies) since the last call."""
        if self.name in BUILTINS:
            emitted, verifies = msgspec.json.decode(self.engine.rank_call(server.ACCEPTED, b"", timeout_s=60)[0])
            return emitted, verifies
        if self.speculation is None:
            return 0, 0
        report = msgspec.json.decode(self.engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
        return sum(c.emitted for c in report.values()), sum(c.verifies for c in report.values())


def processor_s(engine: Engine) -> float:
    """Processor time that the engine's schedulers have used, all threads."""
    assert engine.ready is not None
    files = [file for pid in engine.ready.scheduler_pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


# --------------------------------------------------------------------------------------------------------- requests


def works(models: Models, task: str, batches: Sequence[int], repetitions: int) -> list[Work]:
    """Work of all cells; repetition -1 is a warm-up, which nobody times. No two cells share a prompt."""
    source = replace(task_recipe(task).data.train_source, size=4000)
    prompts = [p.prompt_ids for p in build_dataset(source, load_tokenizer(models.target), max_prompt_tokens=80)]
    prompts = list(dict.fromkeys(prompts))
    made: list[Work] = []
    for repetition in range(-1, repetitions):
        for batch in batches:
            groups = [(len(made), g, prompts.pop()) for g in range(max(1, batch // GROUP_SIZE))]
            made.append(
                Work(
                    batch=batch,
                    repetition=repetition,
                    phases={
                        phase: [_request(phase, *group, sample) for group in groups for sample in range(GROUP_SIZE)]
                        for phase in ("cold", "warm")
                    },
                )
            )
    return made


def _request(phase: str, work: int, group: int, prompt: tuple[int, ...], sample: int) -> RolloutRequest:
    seed = ((work * 64 + group) * 2 + (phase == "warm")) * GROUP_SIZE + sample
    return RolloutRequest(
        request_id=f"{work}.{phase}.{group}.{sample}",
        prompt_ids=prompt,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS),
        seed=1 + seed * 7919 % (2**31 - 1),
        group_id=group,
    )


def fixed_lengths(work: Work, expected: dict[str, tuple[int, ...]]) -> Work:
    """The same, each response as long as plain decoding's, and not ended by what another sampler may emit."""

    def fixed(request: RolloutRequest) -> RolloutRequest:
        length = len(expected[request.request_id])
        return replace(request, sampling=replace(request.sampling, max_new_tokens=length, ignore_eos=True))

    return replace(work, phases={phase: [fixed(r) for r in requests] for phase, requests in work.phases.items()})


def reference(engine: Engine, todo: Sequence[Work]) -> dict[str, tuple[int, ...]]:
    """What plain decoding emits, by request."""
    requests = [request for work in todo for phase in work.phases.values() for request in phase]
    return {t.request_id: tuple(t.token_ids) for t in engine.generate(requests)}


# ---------------------------------------------------------------------------------------------------------- engines


def start(index: int, models: Models, batch: int, folder: Path, **overrides: object) -> Engine:
    """An engine in the process of this benchmark; `overrides` are fields of EngineSpec, or `builtin`."""
    builtin = dict(overrides.pop("builtin", {}))  # type: ignore[call-overload]
    if builtin.get("speculative_algorithm") == "STANDALONE":
        builtin["speculative_draft_model_path"] = str(models.draft)
    spec = EngineSpec(
        index=index,
        model_dir=str(models.target),
        dtype="float32",
        devices=(0,),
        config=EngineConfig(
            max_running_requests=batch,
            max_total_tokens=batch * (CONTEXT + 3 * (MAX_WINDOW + 1)) + 1024,
            extra_args={"disable_radix_cache": True},
        ),
        context_length=CONTEXT,
        log_file=str(folder / f"engine-{index}.log"),
        **overrides,  # type: ignore[arg-type]
    )
    environment = {server.BUILTIN: json.dumps(builtin)} if builtin else {}
    return Engine(spec, run=f"{server.__name__}:run", **environment)


@contextmanager
def contestants(models: Models, batch: int, folder: Path, names: Sequence[str]) -> Iterator[list[Contestant]]:
    """Their engines run until the end of the context."""
    drafts = (str(models.draft), str(models.head))
    ways = {name: replace(way, draft_model=drafts if way.draft_model else ()) for name, way in OURS.items()}
    with ExitStack() as stack:

        def started(index: int, **overrides: object) -> Engine:
            engine = start(index, models, batch, folder, **overrides)
            stack.callback(engine.stop)
            engine.wait_ready(engine.spec.config.start_timeout_s)
            return engine

        made = [Contestant(name=PLAIN, engine=started(0))]
        if any(name in OURS for name in names):
            engine = started(1, speculation=ways["auto"])
            made += [Contestant(name=n, engine=engine, speculation=way) for n, way in ways.items() if n in names]
        for index, (name, arguments) in enumerate(BUILTINS.items(), start=2):
            if name in names:
                made.append(Contestant(name=name, engine=started(index, builtin=arguments)))
        yield made


def contest(players: Sequence[Contestant], todo: Sequence[Work], model: str) -> list[Cell]:
    """All work by all contestants, in turns; the first contestant is plain SGLang."""
    expected = reference(players[0].engine, todo)
    began = time.monotonic()
    for number, work in enumerate(todo, start=1):
        fixed = fixed_lengths(work, expected)
        for player in players if number % 2 else players[::-1]:
            player.run(fixed, expected)
        if number % 7 == 0 or number == len(todo):
            print(f"{model}: {number} of {len(todo)} rounds, {time.monotonic() - began:.0f} s", flush=True)
    measured = [work for work in todo if work.repetition >= 0]
    tokens = {
        (phase, work.batch, work.repetition): sum(len(expected[request.request_id]) for request in requests)
        for work in measured
        for phase, requests in work.phases.items()
    }
    keys = dict.fromkeys((phase, work.batch) for work in measured for phase in work.phases)
    return [_cell(model, *key, player, players[0], tokens) for key in keys for player in players]


def _cell(
    model: str, phase: str, batch: int, player: Contestant, plain: Contestant, tokens: dict[tuple[str, int, int], int]
) -> Cell:
    emitted, verifies = player.counts[phase, batch]
    mine = [key for key in tokens if key[:2] == (phase, batch)]
    return Cell(
        model=model,
        phase=phase,
        batch=batch,
        name=player.name,
        tokens_per_s=median(tokens[key] / player.seconds[key] for key in mine),
        ratios=tuple(plain.seconds[key] / player.seconds[key] for key in mine),
        accept_length=emitted / verifies if verifies else 0.0,
    )


# ------------------------------------------------------------------------------------------------------------- main


def models_of(name: str, *, with_head: bool = True) -> Models:
    """The trained models of a task; heavy: task B's target with 100 M parameters, and its head grown with it."""
    models = task_models("A" if name == "A" else "B")
    if with_head:
        models = replace(models, head=head(models.target, "A" if name == "A" else "B"))
    if name != "heavy":
        return models
    parts = (asdict(Shape()), inspect.getsource(grown))
    makers = {"target": grown.grow} | ({"head": grown.grow_head} if with_head else {})
    found = {}
    for kind, make in makers.items():
        small: Path = getattr(models, kind)
        found[kind] = cached(f"grown-{small.name}", parts, lambda folder: make(small, folder, Shape()))  # noqa: B023
    return replace(models, **found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="models B and heavy, few batches of the latter")
    parser.add_argument("--models", nargs="+", choices=list(FULL))
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--contestants", nargs="+", choices=[*OURS, *BUILTINS], default=[*OURS, *BUILTINS])
    parser.add_argument(
        "--processor-time", action="store_true", help="of the scheduler, not of the clock: for a machine that is busy"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that engines are stopped
    load = os.getloadavg()[0]
    plan = {model: FULL[model] for model in options.models} if options.models else QUICK if options.quick else FULL
    measured: list[Cell] = []
    for model, (batches, repetitions) in plan.items():
        batches, repetitions = options.batches or batches, options.repetitions or repetitions
        models, batch = models_of(model), max(*batches, GROUP_SIZE)
        todo = works(models, "A" if model == "A" else "B", batches, repetitions)
        names, processor_time = options.contestants, options.processor_time
        with tempfile.TemporaryDirectory(prefix="speculation-speed-") as temporary:
            folder = Path(temporary)
            with contestants(models, batch, folder, names) as players:
                for player in players if processor_time else ():
                    player.clock = processor_s
                measured += contest(players, todo, model)
        clock = "processor time" if processor_time else "the clock"
        publish("speculation_speed", result(measured, load, clock))  # after each model: a run may be ended


if __name__ == "__main__":
    main()
