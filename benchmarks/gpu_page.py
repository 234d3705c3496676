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
OF_ROUNDS = ("requests", "plain", "4 of a draft model", "4 of a head")
OF_ATTENTION = ("prompts", "attention", "plain tokens/s", "window 4", "window 8")
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
        f"from plain decoding's ({read['large']['differ'] + read['attention']['differ']} of some 1.8 million). Drafts "
        "that are right four times of five and cost nothing give "
        + ", ".join(f"{gain:.2f}" for gain in best.values())
        + f" times plain speed at {', '.join(best)} requests. After prompts of 3,000 tokens 64 requests gain 1.27 with "
        "SGLang's attention, which reads a text's keys once per draft token, and 1.82 with ours.",
        intro="30.5 billion random weights in bfloat16, 151,936 tokens in the vocabulary, prompts of 16 to 20 tokens, "
        "responses of 256, sampled at temperature 1; SGLang's Triton attention in CUDA graphs, one device. In turns, "
        "medians of two runs after one that warmed up.",
        columns=COLUMNS,
        rows=rows,
        notes=_NOTES.format(
            rounds=markdown(OF_ROUNDS, list(of_rounds(read["large"]["rounds"]))),
            attention=markdown(OF_ATTENTION, list(of_attention(read["attention"]["rates"]))),
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


def of_rounds(rates: Mapping[str, Mapping[str, Sequence[float]]]) -> list[tuple[str, ...]]:
    """Return milliseconds of a round whose drafts are nearly all wrong."""
    ways = ("plain", "draft model", "head")
    return [(n, *(f"{1e3 * int(n) / median(of[way]):.1f}" for way in ways)) for n, of in rates.items()]


def of_attention(rates: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> list[tuple[str, ...]]:
    """Return speeds on the machine that ran both after long prompts."""
    found = []
    for case, prompts in (("64", "16 to 20 tokens"), ("long", "3,000 tokens")):
        for attention in ("triton", "tiles"):
            of = rates[f"second machine, {attention}"][case]
            speeds = gains(of, "plain", ("window 4", "window 8"))
            found.append((prompts, attention, f"{median(of['plain']):.0f}", *speeds))
    return found


def of_products(read: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return microseconds of a layer's products."""

    def layer(rows: int, experts: str, dense: str) -> int:
        of_dense = sum(int(read["dense"][name][dense]["us"][str(rows)]) for name in LAYER)
        return of_dense + int(read["experts"][experts]["us"][str(rows)])

    return [(str(rows), str(layer(rows, *SGLANGS)), str(layer(rows, *ours))) for rows, ours in OURS.items()]


_NOTES = """**Keys.** SGLang's Triton attention reads a request's keys once per row; `attention_backend=tiles`
([kernels.py](../gpu.md)) once for up to eight rows. 64 requests, in one engine after the other on one machine, a run
after one that warmed up:

{attention}

At 256 requests after short prompts `tiles` gave 1.18 and 1.09.

**Norms.** In its batch-invariant mode SGLang adds and normalizes in eleven kernels; ours is one, so a pass has 927
kernels and not 1,891. At 64 requests plain decoding gave 3,281 tokens/s before and 3,751 to 3,785 with it (on other
machines of this kind), with four draft tokens 5,409 and 6,084 to 6,189. The first table is of before.

**Where the time goes** (traces): at 64 requests a round that verifies four draft tokens each takes 34 ms, of which the
device computes 27, and 24 with the norms in one kernel; at 256 requests 72, of which 59. The rest is the host's: it
looks at tokens, drafts, arranges the rows and launches. Of 59 ms attention takes 12. `specactor plan` predicts 15.1 and
17.2 for plain rounds and verifications at 64: rows cost more than the bytes they read.

**Drafts of models**, 0.6 billion weights in 28 layers, and an EAGLE-3 head of 32,000 tokens, of random weights and so
nearly always wrong. Both draft in CUDA graphs. Milliseconds of a round:

{rounds}

A head's step takes 1.4 ms, of which the device computes 0.4 (three copies to the device fewer since then).

**Tiles of products.** In that mode SGLang multiplies any number of rows in tiles of one size. On this device eleven
sizes for dense products and sixteen for experts gave all rows the same bits, so [ours](../gpu.md) follow the number of
rows. Microseconds of one layer's products:

{products}

With SGLang's tiles plain decoding gave 86, 767 and 2,378 tokens/s at 1, 16 and 64 requests, and windows of 8 gained
3.14, 2.42 and 2.00: slow plain rounds flatter speculation.

**Right in graphs** (2026-11-26). A head that knows a toy policy had 691 of 1,252 drafts accepted in graphs of the
target as in eager mode, and 692 of 1,251 on a CPU. In a job (227 million weights, bfloat16, the quickstart's task)
whose head drafted, all metrics of 4 of 4 steps were those of the job without; the fifth was cut. That head was right at
3 %: 60 s of learning are too few for its size, and it cost time. Weights of 454 MB went over in 0.1 s of a sync of 1.1.

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
30 billion weights in 93, and in 180 where kernels are compiled first.

**Not run:** several GPUs, NCCL, TransformerEngine, DeepGEMM, attention of FlashAttention or FlashInfer, the stage
`sync` to its end; since 2026-11-26 the small mixture and jobs. [What each stage gave](gpu/); figures without a file
there were read from logs and traces.
"""


if __name__ == "__main__":
    publish("gpu", result(RESULTS / "gpu"))
