"""How often a draft model is right: greedy, with the target's noise, and with that noise and a fitted sharpness.

    python -m benchmarks.acceptance [--group-size N]

A real engine samples at temperature 1 on held-out prompts of two tasks; the draft model writes down what it drafts. The
laws of both models at the same contexts are computed by transformers, and with them what could be reached. Models are
made at first use, which takes several minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.acceptance_drafters import LOG
from benchmarks.acceptance_laws import Laws, laws
from benchmarks.results import Result, publish
from benchmarks.trained_models import Models, Task, task_models, task_recipe
from specactor.config import Config, EngineConfig, SpeculationConfig
from specactor.data.dataset import Dataset, build_dataset
from specactor.data.stream import request_seed
from specactor.data.tokenizer import load_tokenizer
from specactor.rollout.draft.counts import Counts
from specactor.rollout.planning.sharpening import GRID
from specactor.rollout.sglang.engine import Engine, EngineSpec
from specactor.rollout.sglang.running import running
from specactor.rollout.sglang.speculation_calls import CONFIGURE, REPORT
from specactor.types import RolloutRequest, SamplingParams, Trajectory

TASKS: tuple[Task, ...] = ("A", "B", "B-early")
WAYS = ("Greedy", "Shared", "Fitted")
WINDOWS = (4, 1)
PROBLEMS, GROUP_SIZE = 512, 3
AIM = 0.95
"""Of 1 - TV, for the fitted draft model."""
COLUMNS = (
    "task, window",
    "drafts",
    "accepted at 1st",
    "1 - TV there",
    "accepted where reached",
    "1 - TV there",
    "of 1 - TV",
    "2nd half",
    "of 1 - TV",
    "accept_length",
    "betas",
)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """One draft, as it was written down, and the target's tokens at its place."""

    request_id: str
    start: int
    """Tokens emitted before."""
    tokens: list[int]
    emitted: tuple[int, ...]
    """By the target from there on, to the end of the response; never empty."""
    beta: float

    @property
    def accepted(self) -> int:
        """Draft tokens that are the target's; what follows the end of a response is not counted."""
        pairs = zip(self.tokens, self.emitted, strict=False)
        return next((j for j, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(self.emitted)))

    @property
    def reached(self) -> int:
        """Draft tokens that follow right ones, hence contexts of the target: the accepted ones, and the one after."""
        return min(self.accepted + 1, len(self.tokens), len(self.emitted))


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one way of sampling did in one half of a run."""

    drafts: list[Draft]
    counts: Counts


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Draft tokens that were accepted, of some positions, and what the laws say there."""

    rate: float
    error: float
    """Standard error of it."""
    overlap: float

    @property
    def of_overlap(self) -> float:
        return self.rate / self.overlap


def rate(drafts: Sequence[Draft], found: Mapping[str, Laws], *, first_only: bool = False) -> Rate:
    """Over the positions that were reached, or over the first of every draft."""
    num_reached = num_accepted = 0
    overlaps: list[float] = []
    for draft in drafts:
        reached = 1 if first_only else draft.reached
        num_reached += reached
        num_accepted += min(draft.accepted, reached)
        overlaps += found[draft.request_id].overlap[draft.start : draft.start + reached]
    share = num_accepted / num_reached
    return Rate(rate=share, error=(share * (1 - share) / num_reached) ** 0.5, overlap=float(np.mean(overlaps)))


def requests_of(config: Config, problems: Dataset, half: int, *, group_size: int) -> list[RolloutRequest]:
    """A group of responses to every problem of a half."""
    size = len(problems) // 2
    sampling = SamplingParams(temperature=1.0, max_new_tokens=config.rollout.max_new_tokens)
    return [
        RolloutRequest(
            request_id=f"{half}-{problem.index}-{sample}",
            prompt_ids=problem.prompt_ids,
            sampling=sampling,
            seed=request_seed(config.seed, half, problem.index, sample),
            group_id=problem.index,
        )
        for problem in problems[half * size : (half + 1) * size]
        for sample in range(group_size)
    ]


def speculation(way: str, window: int, models: Models) -> SpeculationConfig:
    return SpeculationConfig(
        mode="coupled",
        drafters=(f"benchmarks.acceptance_drafters:{way}",),
        window=window,
        max_window=max(WINDOWS),
        draft_model=str(models.draft),
    )


def engine_spec(models: Models, config: Config, folder: Path) -> EngineSpec:
    return EngineSpec(
        index=0,
        model_dir=str(models.target),
        dtype="float32",
        devices=(0,),
        config=EngineConfig(max_running_requests=64, max_total_tokens=16_384),
        speculation=speculation("Fitted", max(WINDOWS), models),
        context_length=512,
        log_file=str(folder / "engine.log"),
        random_seed=config.seed,
    )


def part(started: Engine, requests: Sequence[RolloutRequest], log: Path) -> tuple[Part, list[Trajectory]]:
    """Generate, and collect what was drafted for it."""
    log.write_text("")
    started.rank_call(REPORT, b"", timeout_s=60)
    done = started.generate(requests)
    told = msgspec.json.decode(started.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
    drafts = []
    for engine_id, start, draft, beta in map(json.loads, log.read_text().splitlines()):
        t = done[int(engine_id.rpartition(".")[2])]  # engines number the requests of a call
        drafts.append(Draft(request_id=t.request_id, start=start, tokens=draft, emitted=t.token_ids[start:], beta=beta))
    counts = told["model"]
    assert counts.failures == 0
    assert (counts.drafted_at[0], counts.accepted_at[0]) == (len(drafts), sum(draft.accepted > 0 for draft in drafts))
    return Part(drafts=drafts, counts=counts), done


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way of sampling with one window on one task."""

    task: str
    window: int
    way: str
    parts: tuple[Part, Part]


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    cells: list[Cell]
    laws: dict[str, Laws]


def measure(task: Task, group_size: int) -> TaskResult:
    models, config = task_models(task), task_recipe(task)
    source = replace(config.data.eval, size=PROBLEMS)
    problems = build_dataset(source, load_tokenizer(models.target), max_prompt_tokens=256)
    halves = [requests_of(config, problems, half, group_size=group_size) for half in range(2)]
    cells, texts = [], []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "drafts"
        os.environ[LOG] = str(log)
        with running(engine_spec(models, config, Path(folder))) as started:
            for window in WINDOWS:
                for way in WAYS:
                    began = time.monotonic()
                    started.rank_call(CONFIGURE, msgspec.json.encode(speculation(way, window, models)), timeout_s=60)
                    (first, done), (second, more) = (part(started, requests, log) for requests in halves)
                    cells.append(Cell(task=task, window=window, way=way, parts=(first, second)))
                    texts.append([t.token_ids for t in [*done, *more]])
                    print(f"{task}, window {window}, {way}: {time.monotonic() - began:.0f} s", flush=True)
    assert all(text == texts[0] for text in texts), "what is drafted changes no token"
    requests = [*halves[0], *halves[1]]
    found = laws(models.target, models.draft, requests, [*done, *more], GRID)
    return TaskResult(cells=cells, laws=found)


def row(cell: Cell, found: Mapping[str, Laws]) -> tuple[str, ...]:
    drafts = [draft for part in cell.parts for draft in part.drafts]
    counts = cell.parts[0].counts + cell.parts[1].counts
    first, whole, second = rate(drafts, found, first_only=True), rate(drafts, found), rate(cell.parts[1].drafts, found)
    return (
        f"{cell.task}, {cell.window}",
        cell.way.lower(),
        f"{first.rate:.4f}",
        f"{first.overlap:.4f}",
        f"{whole.rate:.4f} ± {whole.error:.4f}",
        f"{whole.overlap:.4f}",
        f"{whole.of_overlap:.3f}",
        f"{second.rate:.4f}",
        f"{second.of_overlap:.3f}",
        f"{counts.emitted / counts.verifies:.3f}",
        betas(drafts) if cell.way == "Fitted" else "",
    )


def betas(drafts: Sequence[Draft]) -> str:
    """Those used in at least 5 % of drafts."""
    used, times = np.unique([draft.beta for draft in drafts], return_counts=True)
    return ", ".join(
        f"{beta:g} ({count / len(drafts):.0%})"
        for beta, count in zip(used, times, strict=True)
        if count >= 0.05 * len(drafts)
    )


def verdicts(result: TaskResult) -> list[str]:
    """Whether the aims are met, per window."""
    lines = []
    for window in WINDOWS:
        rates = {
            cell.way: rate([draft for part in cell.parts for draft in part.drafts], result.laws)
            for cell in result.cells
            if cell.window == window
        }
        fitted, better = rates["Fitted"], max(rates["Greedy"].rate, rates["Shared"].rate)
        lines.append(
            f"- Task {result.cells[0].task}, window {window}: fitted {fitted.rate:.4f} ± {fitted.error:.4f}, the "
            f"better of the other two {better:.4f}: {'met' if fitted.rate >= better else 'missed'}; "
            f"{fitted.of_overlap:.3f} of 1 - TV: {'met' if fitted.of_overlap >= AIM else 'missed'}."
        )
    return lines


def hindsight(task: str, found: Mapping[str, Laws]) -> str:
    """What fixed betas reach over all emitted tokens but the first of each response, which no draft model sees."""
    after_first = slice(1, None)
    entropy = np.mean([h for law in found.values() for h in law.entropy[after_first]])
    overlap = np.mean([o for law in found.values() for o in law.overlap[after_first]])
    shares = {
        beta: np.mean([hit for law in found.values() for hit in law.agrees[beta][after_first]]) for beta in sorted(GRID)
    }
    listed = ", ".join(f"{beta:g}: {share:.4f}" for beta, share in shares.items())
    return (
        f"Task {task}, all emitted tokens after the first: entropy of the target {entropy:.3f} nats per token, 1 - TV "
        f"{overlap:.4f}; accepted per fixed beta: {listed}."
    )


def page(results: Mapping[Task, TaskResult], group_size: int) -> None:
    """Print and store."""
    publish(
        "acceptance",
        Result(
            title="Acceptance of a draft model at temperature 1",
            intro=INTRO.format(problems=PROBLEMS, group_size=group_size),
            columns=COLUMNS,
            rows=[row(cell, result.laws) for result in results.values() for cell in result.cells],
            notes="\n\n".join(
                [
                    *(hindsight(task, result.laws) for task, result in results.items()),
                    "Aims, over whole runs: fitted at least the better of the other two (less than a standard error "
                    f"apart is a tie), and at least {AIM} of 1 - TV.",
                    "\n".join(line for result in results.values() for line in verdicts(result)),
                ]
            ),
        ),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acceptance", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE, help="responses per prompt (%(default)s)")
    group_size = parser.parse_args(arguments).group_size
    page({task: measure(task, group_size) for task in TASKS}, group_size)


INTRO = """\
Target: the quickstart's mixture of experts (1.8 M parameters) after a supervised warm-up; task A counts bits (low \
entropy), task B adds, B-early does so after a short warm-up (high entropy). Draft model: one dense layer (273 k), \
distilled from the target. A real engine samples responses to {problems} held-out prompts, {group_size} each, at \
temperature 1, 64 requests at a time, and drafts with a fixed window: `greedy` the likeliest token, `shared` argmax \
of log q + G with the target's own noise G, `fitted` argmax of beta log q + G. beta is fitted while drafting, from \
the past alone; every row starts without any. The emitted tokens are the same in all rows of a task, which is \
checked. `accepted at 1st`: of first draft tokens; `accepted where reached`: of draft tokens that follow right \
ones, ± standard error; `1 - TV there`: mean of sum min(p, q) over just these contexts, by transformers (float32 \
logits). Start-up is part of a run; `2nd half` is the second half of the prompts alone."""


if __name__ == "__main__":
    main()
