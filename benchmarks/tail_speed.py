"""The tail of a rollout on one core: single drafters, the best of them in hindsight, and Fastest-of-N.

    python -m benchmarks.tail_speed [--quick] [--models B heavy] [--repetitions N] [--contestants ...]

Invariants: all contestants emit the same tokens for each request, which is checked; they share one engine and take
turns, each with its own history; nobody has seen a repetition's prompts before. The tail is defined in
`tail_speed_table`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks import speculation_speed_server as server
from benchmarks.results import RESULTS, publish
from benchmarks.speculation_speed import models_of
from benchmarks.tail_speed_table import (
    FASTEST,
    OFF,
    REQUESTS,
    WITHOUT,
    Law,
    Run,
    Setting,
    Tally,
    Timeline,
    result,
    tail_of,
)
from benchmarks.trained_models import Models, task_recipe
from specactor.config import EngineConfig, SpeculationConfig
from specactor.data.dataset import build_dataset
from specactor.data.tokenizer import load_tokenizer
from specactor.parallel.layout import ENGINE_RESERVED_TOKENS
from specactor.rollout.sglang.engine_client import Engine, EngineSpec
from specactor.types import RolloutRequest, SamplingParams, Trajectory

LAW = Law(shortest=4, longest=64)
"""The models end long sums after 30 to 50 tokens. What they write beyond their end is no text that anyone samples: a
few tokens over and over, which every drafter can draft."""
SETTINGS = {"B": Setting(law=LAW, rollouts=8), "heavy": Setting(law=LAW, rollouts=3)}  # by model
QUICK_ROLLOUTS = 2
REPETITIONS = 3
MIN_TERMS = 5
GROUP_SIZE = 8
MAX_PROMPT = 80
MAX_WINDOW = 8
WINDOW = 4
REPORT_TOKENS = 4
DRAFTERS = ("suffix", "examples.custom_drafter:LastFollower", "model")  # of `auto`

SINGLES = {
    f"{drafter}, {kind}": SpeculationConfig(
        mode="coupled", drafters=(drafter,), window=window, max_window=MAX_WINDOW, draft_model=("made later",)
    )
    for drafter in DRAFTERS
    for kind, window in ((f"window {WINDOW}", WINDOW), ("chosen", None))
}
ONE_EACH = SpeculationConfig(mode="auto", drafters=DRAFTERS, max_window=MAX_WINDOW, draft_model=("made later",))
CONTESTANTS = {
    OFF: SpeculationConfig(),
    **SINGLES,
    WITHOUT: ONE_EACH,
    **{name: replace(ONE_EACH, fastest_of=n) for name, n in FASTEST.items()},
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one repetition is for every contestant."""

    repetition: int  # -1 is a warm-up, in which contestants measure what rounds cost
    rollouts: list[list[RolloutRequest]]


def long_sums(models: Models) -> list[tuple[int, ...]]:
    """Prompts of sums of many terms, all different, each with the first token of its working."""
    source = replace(task_recipe("B").data.train_source, size=6000)
    tokenizer = load_tokenizer(models.target)
    problems = build_dataset(source, tokenizer, max_prompt_tokens=MAX_PROMPT - 1)
    digits = {digit: tuple(tokenizer.encode(digit, add_special_tokens=False)) for digit in "0123456789"}
    return list(
        dict.fromkeys(
            problem.prompt_ids + digits[first_digit(problem.prompt)]
            for problem in problems
            if problem.prompt.count("+") >= MIN_TERMS - 1
        )
    )


def works(models: Models, setting: Setting, repetitions: int) -> list[Work]:
    """Of all repetitions; no two rollouts share a prompt."""
    prompts = long_sums(models)
    return [
        Work(
            repetition=k - 1,
            rollouts=[
                _rollout(number, setting.law, prompts)
                for number in range(k * setting.rollouts, (k + 1) * setting.rollouts)
            ],
        )
        for k in range(repetitions + 1)
    ]


def first_digit(prompt: str) -> str:
    """What the working of a sum begins with: 17+4= is worked out as 710+40=120#21.

    Prompts end with it, because without it the model often guesses (#21), which is a response of two or three tokens.
    """
    return prompt.partition("+")[0][-1]


def _rollout(number: int, law: Law, prompts: list[tuple[int, ...]]) -> list[RolloutRequest]:
    """Takes its prompts from the list."""
    groups = [prompts.pop() for _ in range(REQUESTS // GROUP_SIZE)]
    return [
        RolloutRequest(
            request_id=f"{number}.{i}",
            prompt_ids=groups[i // GROUP_SIZE],
            sampling=SamplingParams(temperature=1.0, max_new_tokens=length),
            seed=1 + (number * REQUESTS + i) * 7919 % (2**31 - 1),
            group_id=i // GROUP_SIZE,
        )
        for i, length in enumerate(law.lengths(REQUESTS, seed=number))
    ]


@contextmanager
def engine_of(models: Models, law: Law) -> Iterator[Engine]:
    """An engine with room for all requests at their full length, ready to speculate in every way."""
    context = MAX_PROMPT + law.longest + 2 * (MAX_WINDOW + 1) + ENGINE_RESERVED_TOKENS
    with tempfile.TemporaryDirectory(prefix="tail-speed-") as folder:
        spec = EngineSpec(
            index=0,
            model_dir=str(models.target),
            dtype="float32",
            devices=(0,),
            config=EngineConfig(
                max_running_requests=REQUESTS,
                max_total_tokens=sum(law.lengths(REQUESTS, 0)) + REQUESTS * (MAX_PROMPT + 3 * (MAX_WINDOW + 1)) + 1024,
                extra_args={"disable_radix_cache": True},
            ),
            speculation=replace(ONE_EACH, draft_model=(str(models.draft),)),
            context_length=context,
            log_file=str(Path(folder) / "engine.log"),
        )
        engine = Engine(spec, run=f"{server.__name__}:run")
        try:
            engine.wait_ready(spec.config.start_timeout_s)
            yield engine
        finally:
            engine.stop()


class Contest:
    """Of all contestants on one engine."""

    def __init__(self, model: str, engine: Engine, models: Models) -> None:
        self.tally = Tally(model=model)
        self._engine = engine
        self._models = models

    def take(self, work: Work, names: Sequence[str]) -> None:
        """All contestants, one after the other. Raises SystemExit when their tokens differ."""
        expected: dict[str, tuple[int, ...]] = {}
        for name in names:
            self._switch(name)
            tokens: dict[str, tuple[int, ...]] = {}
            runs = []
            for requests in work.rollouts:
                emitted, run = self._rollout(requests)
                tokens |= emitted
                runs.append(run)
            expected = expected or tokens
            if differing := [request_id for request_id in tokens if tokens[request_id] != expected[request_id]]:
                raise SystemExit(f"tail_speed: {name}: responses {differing} are not those of {names[0]}")
            counts = self._counts()
            if work.repetition >= 0:
                self.tally.add(name, Run.total(runs), counts)

    def _switch(self, name: str) -> None:
        config = CONTESTANTS[name]
        if config.mode != "off":
            config = replace(config, draft_model=(str(self._models.draft),))
        message = server.Switch(name=name, config=config)
        self._engine.rank_call(server.SWITCH, msgspec.json.encode(message), timeout_s=60)
        self._counts()

    def _counts(self) -> dict[str, tuple[int, int, int]]:
        """(emitted, verifies, drafted) per drafter since the last call."""
        counts = self._engine.speculation_counts()
        return {drafter: (c.emitted, c.verifies, c.drafted) for drafter, c in counts.items()}

    def _rollout(self, requests: Sequence[RolloutRequest]) -> tuple[dict[str, tuple[int, ...]], Run]:
        timeline = Timeline(began=time.perf_counter())

        def progress(request: RolloutRequest, so_far: Trajectory) -> None:
            timeline.report(request.request_id, time.perf_counter(), len(so_far.token_ids))

        def finished(response: Trajectory) -> None:
            timeline.report(response.request_id, time.perf_counter(), len(response.token_ids))

        responses = self._engine.generate(
            requests, on_finished=finished, on_progress=progress, report_tokens=REPORT_TOKENS
        )
        tokens = {response.request_id: tuple(response.token_ids) for response in responses}
        return tokens, timeline.run(tail_of({name: len(emitted) for name, emitted in tokens.items()}))


def measure(model: str, setting: Setting, repetitions: int, names: Sequence[str]) -> Tally:
    """All repetitions of one model."""
    models = models_of(model, with_head=False)
    todo = works(models, setting, repetitions)
    with engine_of(models, setting.law) as engine:
        contest = Contest(model, engine, models)
        began = time.monotonic()
        for number, work in enumerate(todo):
            contest.take(work, [*names[number % len(names) :], *names[: number % len(names)]])
            print(f"{model}: {number + 1} of {len(todo)} rounds, {time.monotonic() - began:.0f} s", flush=True)
    ordered = {name: contest.tally.runs[name] for name in names}
    return Tally(model=model, runs=ordered, counts=contest.tally.counts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rollouts, one repetition, no page")
    parser.add_argument("--models", nargs="+", choices=list(SETTINGS), default=["B"])
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the engine is stopped
    load = os.getloadavg()[0]
    repetitions = options.repetitions or (1 if options.quick else REPETITIONS)
    names = [name for name in CONTESTANTS if name == OFF or name in options.contestants]
    settings = {model: SETTINGS[model] for model in options.models}
    if options.quick:
        settings = {model: replace(setting, rollouts=QUICK_ROLLOUTS) for model, setting in settings.items()}
    tallies = [measure(model, setting, repetitions, names) for model, setting in settings.items()]
    page = result(tallies, settings, load, REPORT_TOKENS)
    print(page.notes, flush=True)
    with tempfile.TemporaryDirectory(prefix="tail-speed-") as nowhere:
        publish("tail_speed", page, Path(nowhere) if options.quick else RESULTS)


if __name__ == "__main__":
    main()
