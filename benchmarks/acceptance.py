"""How often a draft model is right, fresh and stale, by the temperature at which it drafts.

    python -m benchmarks.acceptance [--group-size N]

A real engine samples at temperature 1 on held-out prompts and drafts as the package does. The laws of both models at
the same contexts, and what other temperatures would have drafted there, are computed by transformers. Models are made
at first use, which takes several minutes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.acceptance_laws import Hits, Laws, laws
from benchmarks.results import Result, Table, markdown, publish, write_rows
from benchmarks.trained_models import Task, task_models, task_recipe
from specactor.config import Config, EngineConfig, SpeculationConfig
from specactor.data.dataset import Dataset, build_dataset
from specactor.data.stream import request_seed
from specactor.data.tokenizer import load_tokenizer
from specactor.rollout.sglang.draft_runner import DRAFT_TEMPERATURE
from specactor.rollout.sglang.engine_client import EngineSpec, running
from specactor.rollout.sglang.speculation_calls import REPORT
from specactor.rollout.speculation.counters import Counts
from specactor.types import RolloutRequest, SamplingParams, Trajectory

Floats = NDArray[np.float64]
PAIRS: tuple[tuple[Task, Task], ...] = (
    ("A", "A"),
    ("B", "B"),
    ("B-early", "B-early"),
    ("B", "B-early"),
    ("B-early", "B"),
)
"""Target, and the target that the draft model learned from."""
BETAS = (1.0, 0.5, 0.7, 0.85, 1.2, 1.5, 2.0, 3.0, 5.0, float("inf"))
"""1 / draft temperature. The first of equally good ones is fitted."""
CONSTANT = BETAS.index(1 / DRAFT_TEMPERATURE)
WINDOW = 4
PROBLEMS, GROUP_SIZE = 256, 3
RUNNING = 64
MEMORY = 2000.0  # positions after which the fitted temperature has forgotten an observation to 1/e
RESAMPLES = 2000
COLUMNS = (
    "policy, draft model of",
    "draft temperature",
    "accepted per token",
    "of the constant's",
    "accept_length, window 4",
    "of the constant's",
)


DETAILS = (
    "policy, draft model of",
    "entropy",
    "overlap",
    "first draft tokens accepted by the engine",
    "computed",
    *(f"accepted at 1/{beta:g}" for beta in sorted(BETAS)),
)
SHOWN = 5


def requests_of(config: Config, problems: Dataset, *, group_size: int) -> list[RolloutRequest]:
    """A group of responses to every problem."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=config.rollout.max_new_tokens)
    return [
        RolloutRequest(
            request_id=f"{problem.index}-{sample}",
            prompt_ids=problem.prompt_ids,
            sampling=sampling,
            seed=request_seed(config.seed, 0, problem.index, sample),
            group_id=problem.index,
        )
        for problem in problems
        for sample in range(group_size)
    ]


def sampled(
    target: Path, draft: Path, config: Config, requests: Sequence[RolloutRequest]
) -> tuple[list[Trajectory], Counts]:
    """By a real engine that drafts with the model, at a fixed window; with what it counted."""
    with tempfile.TemporaryDirectory() as folder:
        spec = EngineSpec(
            index=0,
            model_dir=str(target),
            dtype="float32",
            devices=(0,),
            config=EngineConfig(max_running_requests=RUNNING, max_total_tokens=16_384),
            speculation=SpeculationConfig(
                mode="coupled", drafters=("model",), window=WINDOW, max_window=WINDOW, draft_model=(str(draft),)
            ),
            context_length=512,
            log_file=str(Path(folder) / "engine.log"),
            random_seed=config.seed,
        )
        with running(spec) as engine:
            done = engine.generate(requests)
            told = msgspec.json.decode(engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
    assert told["model"].failures == 0
    return done, told["model"]


def fitted(found: Sequence[Laws]) -> list[Hits]:
    """Per response, the hits [T] of the temperature that was best before. `RUNNING` responses go on together, and what
    became of all earlier tokens is known when a token is drafted."""
    hits: list[Hits] = [np.zeros(len(law.hits), np.bool_) for law in found]
    past_K = np.zeros(len(BETAS))
    for first in range(0, len(found), RUNNING):
        together = range(first, min(first + RUNNING, len(found)))
        for t in range(1, max(len(found[i].hits) for i in together)):
            here = [i for i in together if t < len(found[i].hits)]
            best = int(past_K.argmax())
            for i in here:
                hits[i][t] = found[i].hits[t, best]
            kept = np.exp(-len(here) / MEMORY)
            past_K = kept * past_K + sum(found[i].hits[t].astype(np.float64) for i in here)
    return hits


def rounds(hits_T: Hits, window: int) -> list[int]:
    """The tokens with which the rounds of a response begin. Its first token comes from the prompt alone; each round
    emits the accepted draft tokens and the target's own."""
    at, starts = 1, []
    while at < len(hits_T):
        starts.append(at)
        ahead = hits_T[at : at + window]
        at += 1 + (len(ahead) if ahead.all() else int(ahead.argmin()))
    return starts


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What one way of drafting reached: one entry per prompt."""

    accepted: Floats
    tokens: Floats  # emitted after the first of each response, which no draft model sees
    rounds: Floats
    begun: Floats  # rounds whose first draft token was right

    @classmethod
    def of(cls, hits: Sequence[Hits], group_size: int) -> Sums:
        def per_prompt(values: list[int]) -> Floats:
            sums: Floats = np.array(values, np.float64).reshape(-1, group_size).sum(1)
            return sums

        starts = [rounds(hits_T, WINDOW) for hits_T in hits]
        return cls(
            accepted=per_prompt([int(hits_T[1:].sum()) for hits_T in hits]),
            tokens=per_prompt([len(hits_T) - 1 for hits_T in hits]),
            rounds=per_prompt([len(starts_T) for starts_T in starts]),
            begun=per_prompt([int(hits_T[at].sum()) for hits_T, at in zip(hits, starts, strict=True)]),
        )

    def figures(self, picked: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Accepted per token, and accept_length, of these prompts: [samples]. Args: [samples, prompts]"""
        tokens = self.tokens[picked].sum(1)
        return self.accepted[picked].sum(1) / tokens, tokens / self.rounds[picked].sum(1)


def interval(values: Floats) -> str:
    """median (95 %)"""
    low, median, high = np.percentile(values, [2.5, 50, 97.5])
    return f"{median:.3f} ({low:.3f}-{high:.3f})"


def measure(target: Task, draft: Task, group_size: int) -> tuple[list[tuple[str, ...]], list[str]]:
    """Rows of a pair, and its row of DETAILS."""
    began = time.monotonic()
    models, config = task_models(target), task_recipe(target)
    draft_dir = task_models(draft).draft
    source = config.data.eval_sources(PROBLEMS)["eval"]
    problems = build_dataset(source, load_tokenizer(models.target), max_prompt_tokens=256)
    requests = requests_of(config, problems, group_size=group_size)
    done, counts = sampled(models.target, draft_dir, config, requests)
    found = laws(models.target, draft_dir, requests, done, [1 / beta for beta in BETAS])
    of_beta = [Sums.of([law.hits[:, k] for law in found], group_size) for k in range(len(BETAS))]
    ways = {
        "0: the likeliest": of_beta[-1],
        "1: shared noise": of_beta[0],
        "1/1.5, constant": of_beta[CONSTANT],
        "fitted to the past": Sums.of(fitted(found), group_size),
    }
    picked = np.random.default_rng(0).integers(len(problems), size=(RESAMPLES, len(problems)))
    constant = of_beta[CONSTANT].figures(picked)
    pair = f"{target}, {draft}"
    rows: list[tuple[str, ...]] = []
    for name, sums in ways.items():
        share, length = sums.figures(picked)
        rows.append(
            (
                pair,
                name,
                interval(share),
                interval(share / constant[0]),
                interval(length),
                interval(length / constant[1]),
            )
        )
    everything = np.arange(len(problems))[None]
    shares = {beta: float(of_beta[BETAS.index(beta)].figures(everything)[0][0]) for beta in sorted(BETAS)}
    entropy, overlap = (
        float(np.mean([value for law in found for value in values(law)[1:]]))
        for values in (attrgetter("entropy"), attrgetter("overlap"))
    )
    here = of_beta[CONSTANT].begun.sum() / of_beta[CONSTANT].rounds.sum()
    print(f"{pair}: {time.monotonic() - began:.0f} s", flush=True)
    engine = counts.accepted_at[0] / counts.drafted_at[0]
    return rows, [pair, *(f"{value:.3f}" for value in (entropy, overlap, engine, here, *shares.values()))]


def summary(rows: Sequence[Sequence[str]]) -> Table:
    """Every way beside the constant."""
    return ("policy, draft model of", "draft temperature", "accepted, of the constant's", "accept_length, the same"), [
        [row[0], row[1], row[3], row[5]] for row in rows if "constant" not in row[1]
    ]


def details(rows: Sequence[Sequence[str]], folder: Path | None = None) -> str:
    """What is known of every pair; all of it goes into a file, the first columns to the page."""
    write_rows("acceptance_temperatures", DETAILS, rows, folder)
    return (
        f"{markdown(DETAILS[:SHOWN], [row[:SHOWN] for row in rows])}\n\n[Tokens accepted at other draft "
        "temperatures](acceptance_temperatures.csv). Entropy is in nats per token of the policy, overlap the sum of "
        "min(p, q)."
    )


def page(measured: Sequence[tuple[list[tuple[str, ...]], list[str]]], group_size: int) -> None:
    """Print and store."""
    rows = [row for rows, _ in measured for row in rows]
    publish(
        "acceptance",
        Result(
            title="Acceptance of a draft model at temperature 1, fresh and stale",
            verdict=VERDICT,
            intro=INTRO.format(problems=PROBLEMS, group_size=group_size, running=RUNNING),
            columns=COLUMNS,
            rows=rows,
            summary=summary(rows),
            notes=details([row for _, row in measured]),
        ),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acceptance", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE, help="responses per prompt (%(default)s)")
    group_size = parser.parse_args(arguments).group_size
    page([measure(target, draft, group_size) for target, draft in PAIRS], group_size)


VERDICT = """\
With a fresh draft model, and behind a policy that was trained on, one constant draft temperature of 1/1.5 is as \
good as one fitted to the past, and accepts more than 1 does. Where the policy became less certain than its draft \
model, 1 and fitting are better, by 1.5 % of tokens and 3 % of accept_length: what it costs to have no fitting."""
INTRO = """\
Policy: the quickstart's mixture of experts (1.8 M parameters) after a supervised warm-up; A counts bits (low \
entropy), B adds, B-early does so after a short warm-up (high entropy). Draft model: one dense layer (273 k), \
distilled from the policy or from another one: B with the draft model of B-early is a policy that was trained on, \
B-early with that of B one that has become less certain. A real engine samples {group_size} responses to each of \
{problems} held-out prompts at temperature 1. A draft token is argmax of log q / draft temperature + G, G the noise \
that the policy's own token was sampled with. `fitted`: of ten temperatures the one that was right most often so \
far, with {running} responses at once. Intervals are of resampled prompts (95 %), in pairs. The constant is 1/1.5, the \
window 4."""


if __name__ == "__main__":
    main()
