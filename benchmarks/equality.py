"""Speculation on and off, token for token: every drafter, window and sampling, dense and MoE, engine TP 1 and 2.

    python -m benchmarks.equality

The reference is SGLang's plain decoding of the same requests, in an engine that never heard of speculation.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.progress import track

from benchmarks.results import Result, Table, publish
from benchmarks.trained_models import task_models, task_recipe
from specactor.config import EngineConfig, SpeculationConfig
from specactor.data.dataset import build_dataset
from specactor.data.stream import request_seed
from specactor.data.tokenizer import load_tokenizer
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.sglang.speculation_calls import CONFIGURE, REPORT
from specactor.rollout.speculation.counters import Counts
from specactor.types import RolloutRequest, SamplingParams, Trajectory

PROMPTS, GROUP_SIZE = 25, 8
RUNNING = 64
MAX_NEW_TOKENS = 48
MAX_WINDOW = 16
WINDOWS = (1, 2, 4, 8, 16)
TEMPERATURES = (0.0, 0.6, 1.0, 1.3)
FILTERS: tuple[dict[str, float | int], ...] = ({}, {"top_k": 7, "top_p": 0.9})
DRAFTERS = ("suffix", "previous", "model")
COLUMNS = (
    "Target",
    "TP",
    "drafter",
    "windows",
    "responses",
    "tokens",
    "drafted",
    "accepted",
    "flips",
    "other differences",
    "largest log-prob difference",
)
INTRO = (
    "A case is a drafter with a fixed window of 1, 2, 4, 8 or 16, or one `chosen` by predicted speed: "
    f"{PROMPTS * GROUP_SIZE} requests (groups of {GROUP_SIZE}, {RUNNING} at once, sums of 2-6 terms) at each "
    f"temperature of {', '.join(map(str, TEMPERATURES))}, without and with top-k 7 and top-p .9, and once all "
    "side by side in one batch; text drafters twice, since the second time they know the responses. The reference is "
    "plain decoding by an engine that was started without speculation. A flip: another token. The MoE's draft model "
    "was distilled from it; the dense target drafts for itself, greedily where top-k or top-p make its noise useless."
)


@dataclass(kw_only=True)
class Tally:
    """What was compared, and what was not the same."""

    responses: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    flips: int = 0  # responses with another token
    others: int = 0  # responses with the same tokens and another length or finish reason
    logprob: float = 0.0

    def compare(self, responses: Sequence[Trajectory], plain: Sequence[Trajectory]) -> None:
        for a, b in zip(responses, plain, strict=True):
            self.responses += 1
            self.tokens += len(a.token_ids)
            self.flips += any(x != y for x, y in zip(a.token_ids, b.token_ids, strict=False))
            self.others += len(a.token_ids) != len(b.token_ids) or a.finish_reason != b.finish_reason
            if a.token_ids == b.token_ids:
                pairs = zip(a.logprobs, b.logprobs, strict=True)
                self.logprob = max(self.logprob, max((abs(x - y) for x, y in pairs), default=0.0))

    def count(self, counts: Counts) -> None:
        self.drafted += counts.drafted
        self.accepted += counts.accepted


def requests(model_dir: Path, temperature: float, **filters: float | int) -> list[RolloutRequest]:
    """Groups of responses to the same prompts; responses end by themselves, or at one of several lengths."""
    source = replace(task_recipe("B").data.train_source, size=PROMPTS)
    problems = build_dataset(source, load_tokenizer(model_dir), max_prompt_tokens=64)
    return [
        RolloutRequest(
            request_id=f"{problem.index}.{sample}",
            prompt_ids=problem.prompt_ids,
            sampling=SamplingParams(
                temperature=temperature,
                max_new_tokens=MAX_NEW_TOKENS - 5 * sample,
                ignore_eos=sample % 4 == 3,
                **filters,  # type: ignore[arg-type]
            ),
            seed=request_seed(0, 1, problem.index, sample),
            group_id=problem.index,
        )
        for problem in problems
        for sample in range(GROUP_SIZE)
    ]


def configure(engine: Engine, config: SpeculationConfig) -> None:
    engine.rank_call(CONFIGURE, msgspec.json.encode(config), timeout_s=60)


def counts(engine: Engine) -> Counts:
    """Of all drafters since the last call."""
    found = msgspec.json.decode(engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
    total = Counts()
    for one in found.values():
        total.drafted += one.drafted
        total.accepted += one.accepted
    return total


def cases(draft: Path) -> dict[tuple[str, str], SpeculationConfig]:
    """(drafter, windows) -> how to speculate."""
    base = SpeculationConfig(mode="coupled", max_window=MAX_WINDOW, draft_model=(str(draft),))
    found = {
        (name, str(window)): replace(base, drafters=(name,), window=window) for name in DRAFTERS for window in WINDOWS
    }
    found |= {(name, "chosen"): replace(base, drafters=(name,)) for name in DRAFTERS}
    found["auto", "chosen"] = replace(base, mode="auto", drafters=DRAFTERS)
    return found


def rows(target: str, model_dir: Path, draft: Path, ranks: int, logs: Path) -> list[tuple[str, ...]]:
    """All cases of one target on one engine layout."""
    spec = EngineSpec(
        index=0,
        model_dir=str(model_dir),
        dtype="float32",
        tensor_parallel=ranks,
        devices=tuple(range(ranks)),
        config=EngineConfig(max_running_requests=RUNNING, max_total_tokens=16_384),
        context_length=160,
        log_file=str(logs / f"{target}-{ranks}.log"),
    )
    batches = [requests(model_dir, t, **filters) for t in TEMPERATURES for filters in FILTERS]
    batches.append([batches[i % len(batches)][i] for i in range(PROMPTS * GROUP_SIZE)])  # all kinds side by side
    with running(spec) as engine:
        plain = [engine.generate(batch) for batch in batches]
    found = []
    all_cases = cases(draft)
    with running(replace(spec, speculation=all_cases["auto", "chosen"])) as engine:
        for (drafter, windows), config in track(all_cases.items(), description=f"{target}, TP {ranks}"):
            tally = Tally()
            configure(engine, config)
            for batch, expected in zip(batches, plain, strict=True):
                for _ in range(1 if drafter == "model" else 2):  # text drafters know the responses the second time
                    engine.flush()
                    tally.compare(engine.generate(batch), expected)
            tally.count(counts(engine))
            found.append(
                (
                    target,
                    str(ranks),
                    drafter,
                    windows,
                    *(f"{n:,}" for n in (tally.responses, tally.tokens, tally.drafted, tally.accepted)),
                    *(str(n) for n in (tally.flips, tally.others)),
                    f"{tally.logprob:.1e}",
                )
            )
    return found


def total(table: Sequence[Sequence[str]], name: str) -> int:
    """Sum of a column."""
    return sum(int(row[COLUMNS.index(name)].replace(",", "")) for row in table)


def verdict(table: Sequence[Sequence[str]]) -> str:
    """How many were compared, and how many differ."""
    largest = max(table, key=lambda row: float(row[-1]))[-1]
    return (
        f"{total(table, 'responses'):,} responses with {total(table, 'tokens'):,} tokens were compared with those of "
        f"plain decoding: {total(table, 'flips')} have another token, {total(table, 'other differences')} differ in "
        f"anything else. Log-probabilities differ by {largest} at most."
    )


def summary(table: Sequence[Sequence[str]]) -> Table:
    """By target and engine layout."""
    names = COLUMNS[4:-1]
    parts = {tuple(row[:2]): [other for other in table if other[:2] == row[:2]] for row in table}
    rows = [
        [*part, str(len(of)), *(f"{total(of, name):,}" for name in names), max(of, key=lambda row: float(row[-1]))[-1]]
        for part, of in parts.items()
    ]
    return (*COLUMNS[:2], "cases", *names, COLUMNS[-1]), rows


def main() -> int:
    """Exit code: 0 when everything was equal."""
    models = task_models("B")
    table: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as logs:
        for target, model_dir in (("MoE", models.target), ("dense", models.draft)):
            for ranks in (1, 2):
                table += rows(target, model_dir, models.draft, ranks, Path(logs))
    publish(
        "equality",
        Result(
            title="Speculation on and off: the same responses",
            verdict=verdict(table),
            intro=INTRO,
            columns=COLUMNS,
            rows=table,
            summary=summary(table),
        ),
    )
    return 1 if total(table, "flips") + total(table, "other differences") else 0


if __name__ == "__main__":
    sys.exit(main())
