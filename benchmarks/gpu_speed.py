"""The stage `speed` of `benchmarks.gpu`, and the page of what a GPU gave.

python -m benchmarks.gpu_speed [FOLDER] writes docs/results/gpu.md from what the stages left in a folder; by default
from what is stored beside the page.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks import dialled
from benchmarks.results import RESULTS, Result, markdown, publish
from specactor.config import SpeculationConfig
from specactor.types import RolloutRequest

if TYPE_CHECKING:
    from benchmarks.gpu import Bench

REPETITIONS = 3
RIGHT = 0.8
"""Of the dialled drafter."""
COLUMNS = ("requests", "plain tokens/s", "window 2", "window 4", "window 8", "tokens that differ")
OF_ROUNDS = ("requests", "plain ms", "window 1", "window 2", "window 4", "window 8")


def as_in_training(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    """Return the requests sampled at temperature 1, from all tokens."""
    return [replace(r, sampling=replace(r.sampling, temperature=1.0, top_p=1.0, top_k=-1)) for r in requests]


def speed(bench: Bench) -> dict[str, Any]:
    """Return tokens/s by requests and window (0: plain), in turns, with drafts that are right at RIGHT, and how many
    tokens differ from plain ones."""
    from benchmarks import gpu  # which imports this module

    engine, size = bench.speculating, bench.size
    requests = as_in_training(bench.requests(max(size.batches)))
    off = SpeculationConfig(mode="off", max_window=max(size.windows))
    gpu.configure(engine, off)
    plain = engine.generate(requests)
    outputs = {str(r.seed): list(t.token_ids) for r, t in zip(requests, plain, strict=True)}
    script = dialled.Script(acceptance=RIGHT, step_s=[0.0], outputs=outputs)
    (bench.folder / "script.json").write_bytes(msgspec.json.encode(script))
    ways = {0: off} | {window: gpu.drafting(window, max(size.windows)) for window in size.windows if window > 1}
    found: dict[str, Any] = {"differ": 0, "rates": {}}
    for count in size.batches:
        rates: dict[int, list[float]] = {window: [] for window in ways}
        for repetition in range(REPETITIONS + 1):
            for window, config in ways.items():
                gpu.configure(engine, config)
                engine.flush()
                start = time.perf_counter()
                got = engine.generate(requests[:count])
                if repetition:  # the first warms up
                    rates[window].append(sum(len(t.token_ids) for t in got) / (time.perf_counter() - start))
                assert len(got) == count
                one = gpu.differences(got, plain)
                found["differ"] += one["differ"] + one["bits"]
        found["rates"][str(count)] = {str(window): values for window, values in rates.items()}
    return found


def told(rates: Mapping[str, Mapping[str, Sequence[float]]], plain: str) -> str:
    """Return the stage's line of the table."""
    medians = {count: {way: median(of) for way, of in ways.items()} for count, ways in rates.items()}
    return "; ".join(
        f"{count} requests: {ways[plain]:.0f} tokens/s, "
        + ", ".join(f"{way} {rate / ways[plain]:.2f}" for way, rate in ways.items() if way != plain)
        for count, ways in medians.items()
    )


def result(folder: Path) -> Result:
    """Return the page of what is there; its words are of the run that is stored."""
    read: dict[str, Any] = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    rates: Mapping[str, Mapping[str, Sequence[float]]] = read["speed"]["rates"]
    rows = [
        (
            count,
            f"{median(of['0']):.0f}",
            *(f"{median(of[w]) / median(of['0']):.2f}" if w in of else "-" for w in ("2", "4", "8")),
            str(read["speed"]["differ"]),
        )
        for count, of in rates.items()
    ]
    rounds: Mapping[str, float] = read["rows"]
    counts = list(dict.fromkeys(case.partition(" x ")[0] for case in rounds))
    table = [(n, *(f"{rounds[f'{n} x {w}']:.1f}" for w in (0, 1, 2, 4, 8))) for n in counts]
    cases = read["exact"]
    tokens = sum(case["tokens"] for case in cases.values())
    cases, kernels, job = read["exact"], read["kernels"], read["job"]["bfloat16"]
    wrong = sum(case["differ"] + case["bits"] for case in cases.values())
    of_kernels = sum(case["differ"] + case["bits"] for case in kernels.values())
    tokens = sum(case["tokens"] for case in cases.values())
    best = {count: max(median(of[w]) for w in of if w != "0") / median(of["0"]) for count, of in rates.items()}
    return Result(
        title="On a GPU",
        verdict=f"{wrong} of {tokens:,} tokens and log-probabilities differ in {len(cases)} cases of batches, CUDA "
        f"graphs and drafts; so do the metrics of {job['differ']} of {job['steps']} steps with speculation. With "
        "drafts that are right four times of five and cost nothing, the best window gives "
        + ", ".join(f"{gain:.2f}" for gain in best.values())
        + f" times plain speed at {', '.join(best)} requests.",
        intro="One H100, bfloat16, SGLang's Triton attention; a mixture of 32 experts with random weights, 8 layers, "
        "hidden size 2,048. `exact` compares requests alone, in batches, in graphs and without, with drafts that are "
        "right at 0.9, 0.5 and 0. A quarter each of the requests was sampled from all tokens, with top-p, with top-k, "
        "and greedily. Speeds are of one run each, after one that warmed up; the job is the quickstart's, cut to five "
        f"steps. In {len(kernels)} cases {of_kernels} rows of our own kernels differ alone and in company, or from the "
        "CPU's. [What each stage gave](gpu/); figures without a file there were read from logs.",
        columns=COLUMNS,
        rows=rows,
        notes=_NOTES.format(rounds=markdown(OF_ROUNDS, table)),
        source=f"Measured: {read['probe']['machine']}.",
    )


_NOTES = """Milliseconds of a round by draft tokens of each request, when CUDA graphs ended at 256 rows:

{rounds}

**What was wrong, and is mended:**

- No engine started: Megatron's module for inference, which SGLang's dumper imports, turns torch-memory-saver to a mode
  without CUDA graphs.
- Graphs were captured for as many rows as requests may run, so a verification of more ran without one: 18 ms with 64
  requests and 4 draft tokens, below. They now reach to all rows of a verification. The speeds above are with them; the
  rounds were not measured again.
- In a round the host waited six times for the device (a profile; 16 requests, 2.5 of 5.8 ms the device's): each copy of
  ordinary memory waits for all that was launched. Now our code waits for the samples alone, which simulated devices
  count; **not measured since**.
- The first pass of a draft model ran without a graph. Now it has one, up to 512 rows; **not run since**.
- Scoring took 2.4 s of each of the first steps, waiting for processes that nobody needed; now 2 ms on two cores.

**What else was seen.** In float32 log-probabilities of trainer and engine differ by 0.0012 on average and 0.32 at most
(bfloat16: 0.006 and 0.70): Triton multiplies float32 as TF32, so `train.max_logprob_gap` 1e-4 would end a run; correct
for the mismatch instead. An engine starts in 45 to 53 s, 20 of them imports. A sync of the job's 8 MB takes 0.6 s.

**Not run:** several GPUs, NCCL, TransformerEngine, other attention than Triton's (`tiles` as a kernel alone), draft
models and heads, large vocabularies and contexts; the stage `sync` was cut after 100 s; since
then it pushes a smaller model, for a minute.
"""


if __name__ == "__main__":
    publish("gpu", result(Path(sys.argv[1]) if sys.argv[1:] else RESULTS / "gpu"))
