"""The page of what GPUs gave: python -m benchmarks.gpu_page writes docs/results/gpu.md from what is stored beside it.

Its words are of the runs that are stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results import RESULTS, Result, markdown, publish

COLUMNS = ("requests", "plain tokens/s", "window 4", "window 8", "tokens that differ")
OF_TILES = (
    "requests",
    "plain tokens/s",
    "window 4",
    "window 8",
    "plain round",
    "+ 4 of a draft model",
    "+ 4 of a head",
)
OF_PRODUCTS = ("rows", "SGLang's tiles", "ours")
OF_SMALL = ("requests", "plain tokens/s", "window 2", "window 4", "window 8")
SGLANGS = ("64-64-32-8", "128-128-64-8-3")
"""Tiles of experts and of dense products in SGLang's batch-invariant mode, as the stored file names them."""
OURS = {
    1: ("16-64-128-8-4-4", "16-64-128-4-4"),
    64: ("16-64-128-8-4-4", "64-64-128-4-4"),
    320: ("64-128-64-8-4-4", "64-128-64-4-4"),
    2304: ("64-128-64-8-4-4", "128-128-64-8-3"),
}
"""By rows; `products.py` chooses them."""
LAYER = ("qkv", "o", "gate")


def gains(of: Mapping[str, Sequence[float]], plain: str, ways: Sequence[str]) -> list[str]:
    """Return the ways' speeds over plain."""
    return [f"{median(of[way]) / median(of[plain]):.2f}" if way in of else "-" for way in ways]


def result(folder: Path) -> Result:
    read: dict[str, Any] = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    large: Mapping[str, Mapping[str, Sequence[float]]] = read["large"]["rates"]
    rows = [
        (n, f"{median(of['plain']):.0f}", *gains(of, "plain", ("window 4", "window 8")), str(read["large"]["differ"]))
        for n, of in large.items()
    ]
    small = [
        (n, f"{median(of['0']):.0f}", *gains(of, "0", ("2", "4", "8"))) for n, of in read["speed"]["rates"].items()
    ]
    cases, kernels, job = read["exact"], read["kernels"], read["job"]["bfloat16"]
    wrong = sum(case["differ"] + case["bits"] for case in cases.values())
    of_kernels = sum(case["differ"] + case["bits"] for case in kernels.values())
    tokens = sum(case["tokens"] for case in cases.values())
    best = {n: max(map(float, gains(of, "plain", ("window 4", "window 8")))) for n, of in large.items()}
    return Result(
        title="On a GPU",
        verdict="At the shape of Qwen3-30B-A3B on one H200, no token and no log-probability of speculation differs "
        f"from plain decoding's ({read['large']['differ']} of some 900,000). Drafts that are right four times of five "
        "and cost nothing give "
        + ", ".join(f"{gain:.2f}" for gain in best.values())
        + f" times plain speed at {', '.join(best)} requests: at 64 the device alone would give 2.43, and the host's "
        "part of a round takes it.",
        intro="30.5 billion random weights in bfloat16, 151,936 tokens in the vocabulary, prompts of 16 to 20 tokens, "
        "responses of 256, sampled at temperature 1; SGLang's Triton attention in CUDA graphs, one device. In turns, "
        "medians of two runs after one that warmed up (one at 1 and 256).",
        columns=COLUMNS,
        rows=rows,
        notes=_NOTES.format(
            tiles=markdown(OF_TILES, list(of_tiles(read["large_sglangs_tiles"]["rates"]))),
            products=markdown(OF_PRODUCTS, list(of_products(read["products"]))),
            small=markdown(OF_SMALL, small),
            wrong=wrong,
            tokens=f"{tokens:,}",
            cases=len(cases),
            steps=f"{job['differ']} of {job['steps']}",
            kernels=len(kernels),
            of_kernels=of_kernels,
        ),
        source=f"Measured: {read['large']['machine']}; the small mixture: {read['probe']['machine']}.",
    )


def of_tiles(rates: Mapping[str, Mapping[str, Sequence[float]]]) -> list[tuple[str, ...]]:
    """Return speeds with SGLang's tiles, and milliseconds of a round, whose drafts are nearly all wrong."""
    return [
        (
            n,
            f"{median(of['plain']):.0f}",
            *gains(of, "plain", ("window 4", "window 8")),
            *(f"{1e3 * int(n) / median(of[way]):.1f}" for way in ("plain", "draft model", "head")),
        )
        for n, of in rates.items()
    ]


def of_products(read: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return microseconds of a layer's products."""

    def layer(rows: int, experts: str, dense: str) -> int:
        of_dense = sum(int(read["dense"][name][dense]["us"][str(rows)]) for name in LAYER)
        return of_dense + int(read["experts"][experts]["us"][str(rows)])

    return [(str(rows), str(layer(rows, *SGLANGS)), str(layer(rows, *ours))) for rows, ours in OURS.items()]


_NOTES = """**Where the time goes** (a profile at 64 requests): the device computes 17.7 ms in a plain round and 24.5
in one that verifies four draft tokens each, so alone it would give 2.43 (`specactor plan` predicts 15.1 and 17.2: rows
cost more than the bytes they read). A round took 40 ms: the rest is the host's, between one verification's tokens and
the next one's start. With 256 requests a round took 91 ms, a plain one 27.

**Tiles.** In its batch-invariant mode SGLang multiplies any number of rows in tiles of one size. On this device eleven
sizes for dense products and sixteen for experts gave all rows the same bits, so [ours](../gpu.md) follow the number of
rows. Microseconds of one layer's products:

{products}

Before, with SGLang's tiles, everything was slower and plain decoding most of all, which flattered speculation. Then a
draft model (0.6 billion weights, 28 layers) and an EAGLE-3 head (32,000 tokens) drafted, too, of random weights, nearly
always wrong: milliseconds of their rounds.

{tiles}

The head had no CUDA graph then; it has now, not measured yet.

**Right in graphs.** A head that knows a toy policy had 691 of 1,252 drafts accepted in graphs as in eager mode, and 692
of 1,251 on a CPU. In a job (227 million weights, bfloat16, the quickstart's task) whose head drafted, all metrics of 4
of 4 steps were those of the job without; the fifth was cut. That head was right at 3 %: 60 s of learning are too few
for its size, and it cost time. Weights of 454 MB went over in 0.1 s of a sync of 1.1.

## A small mixture, on an H100

32 experts, 8 layers, hidden size 2,048, random weights. {wrong} of {tokens} tokens and log-probabilities differ in
{cases} cases of requests alone, in batches, in graphs and without, with drafts that are right at 0.9, 0.5 and 0, a
quarter each sampled from all tokens, with top-p, with top-k, and greedily. So do the metrics of {steps} steps of a job.
In {kernels} cases {of_kernels} rows of our kernels differ alone and in company, or from the CPU's. Speeds of one run
each, with SGLang's tiles:

{small}

**What was wrong, and is mended:** no engine started (Megatron's module for inference, which SGLang's dumper imports,
turns torch-memory-saver to a mode without CUDA graphs); a verification of more rows than requests had no graph (18 ms
for 2); in a round the host waited six times for the device; scoring waited seconds for processes that nobody needed.

**What else was seen.** In float32 log-probabilities of trainer and engine differ by 0.0012 on average and 0.32 at most:
Triton multiplies float32 as TF32, so `train.max_logprob_gap` 1e-4 would end a run; correct for the mismatch instead. In
bfloat16 it was 0.0002 to 0.001 on average, 0.36 at most, with 227 million weights. An engine starts in 45 to 53 s, at
30 billion weights in 93.

**Not run:** several GPUs, NCCL, TransformerEngine, DeepGEMM and other attention than Triton's (`tiles` as a kernel
alone), long contexts, the stage `sync` to its end. [What each stage gave](gpu/); figures without a file there were read
from logs.
"""


if __name__ == "__main__":
    publish("gpu", result(RESULTS / "gpu"))
