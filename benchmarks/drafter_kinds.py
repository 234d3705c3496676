"""Kinds and sizes of drafters for one target: what a draft token costs, how many are right, what learning them takes.

    python -m benchmarks.drafter_kinds [--quick]

The target is the quickstart's policy after its warm-up. Draft models are cut out of it, or begin at random, and are
distilled from it here (`drafter_kinds_learning`), so that accept_length is known by seconds of distillation; drafters
over text need none. Then each drafts for a real engine that samples at temperature 1, which verifies by its noise: the
tokens are the same in all rows, which is checked. Writes docs/results/drafter_kinds.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import msgspec

from benchmarks.drafter_kinds_learning import Beginning, Job, Learned, reach_s
from benchmarks.results import RESULTS, Result, publish
from benchmarks.trained_models import ROOT, task_recipe, task_target
from specactor.config import Config, DraftTrainingConfig, EngineConfig, SpeculationConfig
from specactor.cpu import sglang as cpu
from specactor.data.dataset import build_dataset
from specactor.data.stream import request_seed
from specactor.data.tokenizer import load_tokenizer
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.sglang.speculation_calls import CONFIGURE, REPORT
from specactor.rollout.speculation.counters import Counts
from specactor.types import Problem, RolloutRequest, SamplingParams

NAME = "drafter_kinds"
PLAIN = "no drafter"
TEXT = {"suffix": "suffix"}  # row -> drafter
MODELS = {
    "1 layer": Beginning(num_layers=1),
    "2 layers": Beginning(num_layers=2),
    "quarter width": Beginning(num_layers=1, hidden_size=32),
}
SHORT_MATCHES = (
    "`ngram` (n-grams of 1 to 4 tokens) was removed after a comparison on 2026-11-23: 24 prompts x 8 responses "
    "together and 24 alone, nine repetitions in turns. Tokens/s over `suffix` in the same repetition, median (95 % "
    "bootstrap interval), 64 requests / 1 request: `ngram` 1.05 (0.71-1.09) / 0.95 (0.87-1.08); `suffix` with "
    "one-token matches of the corpus 0.88 (0.62-1.05) / 0.87 (0.82-1.08); with n-grams of 1 to 4 tokens of all texts "
    "0.93 (0.76-1.13) / 0.92 (0.72-1.06); accept_length 1.47-1.48 / 4.68-4.69 in all."
)
"""Measured once; goes with the page."""
WINDOW = 4
RUNNING, GROUP_SIZE = 64, 8
NEAR = 0.95  # of the last accept_length: where it counts as reached
SETTINGS = DraftTrainingConfig(
    buffer_tokens=10_000_000,
    half_life_steps=1e9,
    tokens_per_update=2048,
    tokens_per_microbatch=2048,
    learning_rate=3e-3,
)
COLUMNS = (
    "drafter",
    "parameters",
    f"us per draft token, {RUNNING} requests",
    "1 request",
    f"accept_length, {RUNNING} requests",
    "1 request",
    f"accept_rate, {RUNNING} requests",
    f"rollout tokens/s, {RUNNING} requests",
    "1 request",
    f"s of distillation to {100 * NEAR:g} %",
    "accept_length by seconds",
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a trial."""

    seconds: tuple[float, ...]  # of distillation, at which draft models are measured
    responses: int  # to learn from and to measure with, of the target
    prompts: int  # of the rollout, GROUP_SIZE responses to each
    alone: int  # requests that run one after the other; at most as many as prompts


FULL = Size(seconds=(1, 2, 4, 8, 16, 32, 48), responses=2048, prompts=48, alone=24)
QUICK = Size(seconds=(1, 3), responses=384, prompts=8, alone=4)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What one drafter did, with many requests running together or with one at a time."""

    counts: Counts
    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def accept_length(self) -> float:
        return self.counts.emitted / max(1, self.counts.verifies)

    @property
    def draft_us(self) -> float:
        """Per draft token."""
        return 1e6 * self.counts.draft_s / max(1, self.counts.drafted)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Of the table."""

    name: str
    together: Rollout
    alone: Rollout
    learned: Learned | None = None

    def cells(self) -> list[str]:
        drafts, counts = self.name != PLAIN, self.together.counts
        learned = self.learned
        return [
            self.name,
            f"{learned.parameters / 1e3:.0f} k" if learned else "-",
            f"{self.together.draft_us:.0f}" if drafts else "-",
            f"{self.alone.draft_us:.0f}" if drafts else "-",
            *(f"{of.accept_length:.2f}" if drafts else "1.00" for of in (self.together, self.alone)),
            f"{counts.accepted / counts.drafted:.2f}" if drafts else "-",
            f"{self.together.speed:.0f}",
            f"{self.alone.speed:.0f}",
            ("0" if drafts else "-") if learned is None else f"{reach_s(learned.points, NEAR):.1f}",
            "-" if learned is None else ", ".join(f"{s:.0f}: {length:.2f}" for s, length in learned.points),
        ]


def learned_models(target: Path, folder: Path, size: Size) -> list[Learned]:
    """Made in a process of its own, whose progress is printed. Raises RuntimeError when that fails."""
    recipe = task_recipe("A")
    job = Job(
        target=str(target),
        folder=str(folder),
        beginnings=MODELS,
        source=recipe.data.train_source,
        responses=size.responses,
        max_new_tokens=recipe.rollout.max_new_tokens,
        seconds=size.seconds,
        window=WINDOW,
        settings=SETTINGS,
    )
    environment = os.environ | cpu.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment["PYTHONPATH"]])
    command = [sys.executable, "-m", "benchmarks.drafter_kinds_learning", msgspec.json.encode(job).decode()]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT "):
                return msgspec.json.decode(line.removeprefix("RESULT "), type=list[Learned])
            print(line, end="", flush=True)
    raise RuntimeError("benchmarks.drafter_kinds_learning gave no result. Its error is above.")


@dataclass(frozen=True, kw_only=True)
class Work:
    """Requests, none of which is generated twice by one drafter: a text drafter would know the response."""

    first: list[RolloutRequest]  # of other problems; not measured
    together: list[RolloutRequest]  # groups of responses, as in a rollout
    alone: list[RolloutRequest]  # one more response to some of these problems, as at the end of a rollout

    @classmethod
    def of(cls, config: Config, problems: Sequence[Problem], size: Size) -> Work:
        """Args: held out, `size.prompts` of them and RUNNING more."""
        measured = problems[: size.prompts]

        def requests(of: Sequence[Problem], samples: range) -> list[RolloutRequest]:
            return [_request(config, problem, sample) for problem in of for sample in samples]

        return cls(
            first=requests(problems[size.prompts : size.prompts + RUNNING], range(1)),
            together=requests(measured, range(GROUP_SIZE)),
            alone=requests(measured[: size.alone], range(GROUP_SIZE, GROUP_SIZE + 1)),
        )


def _request(config: Config, problem: Problem, sample: int) -> RolloutRequest:
    return RolloutRequest(
        request_id=f"{problem.index}-{sample}",
        prompt_ids=problem.prompt_ids,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=config.rollout.max_new_tokens),
        seed=request_seed(config.seed, 0, problem.index, sample),
        group_id=problem.index,
    )


def speculation(drafter: str, draft: Path) -> SpeculationConfig:
    """Args: empty: plain decoding; what the engine was started with."""
    return SpeculationConfig(
        mode="coupled" if drafter else "off",
        drafters=(drafter or "model",),
        window=WINDOW,
        max_window=WINDOW,
        draft_model=(str(draft),),
    )


def engine_spec(target: Path, draft: Path, config: Config, folder: Path) -> EngineSpec:
    return EngineSpec(
        index=0,
        model_dir=str(target),
        dtype="float32",
        devices=(0,),
        config=EngineConfig(max_running_requests=RUNNING, max_total_tokens=16_384),
        speculation=speculation("model", draft),
        context_length=512,
        log_file=str(folder / "engine.log"),
        random_seed=config.seed,
    )


def rollout(engine: Engine, drafter: str, calls: Sequence[Sequence[RolloutRequest]]) -> tuple[Rollout, list[list[int]]]:
    """(what was measured, tokens of every response). Args: requests that are generated together, call by call."""
    engine.rank_call(REPORT, b"", timeout_s=60)
    began_s = time.perf_counter()
    done = [engine.generate(requests) for requests in calls]
    seconds = time.perf_counter() - began_s
    told = msgspec.json.decode(engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
    texts = [list(t.token_ids) for of_call in done for t in of_call]
    counts = told[drafter] if drafter else Counts()
    assert not counts.failures, "drafters do not fail"
    return Rollout(counts=counts, tokens=sum(map(len, texts)), seconds=seconds), texts


def measured(engine: Engine, name: str, drafter: str, draft: Path, work: Work) -> tuple[Row, list[list[int]]]:
    """(what was measured, tokens of every response), by a drafter that begins without any text."""
    engine.rank_call(CONFIGURE, msgspec.json.encode(speculation(drafter, draft)), timeout_s=60)
    rollout(engine, drafter, [work.first])
    together, texts = rollout(engine, drafter, [work.together])
    alone, more = rollout(engine, drafter, [[request] for request in work.alone])
    print(f"{name}: {together.speed:.0f} tokens/s together, {alone.speed:.0f} alone", flush=True)
    return Row(name=name, together=together, alone=alone), [*texts, *more]


def table(target: Path, size: Size) -> list[Row]:
    """Learn, then draft."""
    config = task_recipe("A")
    rows, all_texts = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        learned = learned_models(target, folder, size)
        source = config.data.eval_source(size.prompts + RUNNING)
        problems = build_dataset(source, load_tokenizer(target), max_prompt_tokens=256)
        work = Work.of(config, list(problems), size)
        for number, model in enumerate(learned):
            draft = folder / model.name
            kinds = {PLAIN: "", **TEXT} if number == 0 else {}
            with running(engine_spec(target, draft, config, folder)) as engine:
                for row, drafter in {**kinds, model.name: "model"}.items():
                    found, texts = measured(engine, row, drafter, draft, work)
                    rows.append(replace(found, learned=model if drafter == "model" else None))
                    all_texts.append(texts)
    assert all(texts == all_texts[0] for texts in all_texts), "what is drafted changes no token"
    return rows


SHOWN = (0, 1, 2, 3, 4, 5, 7, 8)  # columns on the page; the file has the rest


def page(rows: Sequence[Row], size: Size) -> Result:
    return Result(
        title="Kinds and sizes of drafters",
        verdict=verdict(rows),
        intro=(
            "Target: the quickstart's mixture of experts after its warm-up. One engine on one core samples "
            f"{GROUP_SIZE} responses to each of {size.prompts} held-out prompts at temperature 1, {RUNNING} requests "
            f"at a time, then one more to {size.alone} of them, one after the other; mode coupled, a fixed window of "
            f"{WINDOW}. Drafters over text begin with responses to other prompts; a single request's group is known to "
            "them. All rows have the same tokens, which is checked. *us per draft token*: all time of drafting, "
            "with the drafter's reading of what was emitted. Draft models: the first layers of the target (`specactor "
            "drafter init`), or for *quarter width* one random layer of a quarter of its width, distilled on one core "
            f"with {SETTINGS.tokens_per_update} tokens per update on responses of the target. The "
            "file also has accept_length by seconds of distillation."
        ),
        columns=COLUMNS,
        rows=[row.cells() for row in rows],
        summary=([COLUMNS[at] for at in SHOWN], [[row.cells()[at] for at in SHOWN] for row in rows]),
        notes=SHORT_MATCHES,
    )


def verdict(rows: Sequence[Row]) -> str:
    """Which is fastest, and which are slower than no drafter."""
    sentences = []
    for what, of in (
        (f"{RUNNING} requests", attrgetter("together.speed")),
        ("1 request", attrgetter("alone.speed")),
    ):
        plain = next(of(row) for row in rows if row.name == PLAIN)
        best = max(rows, key=of)
        losers = [row.name for row in rows if of(row) < plain]
        slower = f"slower than without a drafter: {', '.join(losers)}" if losers else "none is slower than without"
        sentences.append(f"With {what}: fastest {best.name} ({of(best) / plain:.2f} of no drafter); {slower}.")
    return " ".join(sentences)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafter_kinds", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="a trial of little meaning, which writes no page")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the page")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    result = page(table(task_target("A"), size), size)
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            publish(NAME, result, Path(folder))
    else:
        publish(NAME, result, options.results)


if __name__ == "__main__":
    main()
