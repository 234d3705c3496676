"""Attention of a verification on a CPU: keys gathered for each row, or once per request, over contexts and windows.

python -m benchmarks.keys_once
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.results import Result, interval, likely, publish
from specactor.cpu import sglang_ops as ops

CONTEXTS = (64, 256, 1024, 4096, 8192)
ROWS = (1, 2, 3, 5, 9)
"""Of a request: its last token and drafts."""
TURNS = 15
REQUESTS, HEADS, KV_HEADS, HEAD_DIM = 2, 16, 8, 128
"""The heads are Qwen3-0.6B's."""
LEAST_S = 0.02
"""What is timed at once is repeated until it takes this long."""
COLUMNS = ("context", "rows", "for each, ms", "once, ms", "each / once")
Pair = tuple[float, float]
"""Milliseconds with keys for each row and once, of one turn."""


def lists(context: int, rows: int, requests: int = REQUESTS) -> tuple[list[ops.SharedKeys], list[ops.SharedKeys]]:
    """Keys of a batch of `rows` rows per request, for each row and once. An engine makes such lists once per round."""
    torch.manual_seed(0)
    length = context + rows
    table = (torch.randperm(requests * length) + 1).view(requests, length).int()
    readers = torch.arange(requests).repeat_interleave(rows)
    seen = (torch.arange(rows) + context - rows + 1).repeat(requests)
    group = HEADS // KV_HEADS
    # With a page-table row of its own each row is taken for a request of its own.
    each = ops.shared_keys(table[readers], torch.arange(len(readers)), seen, queries=group)
    return each, ops.shared_keys(table, readers, seen, queries=group)


def attentions(context: int, rows: int, requests: int = REQUESTS) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """One layer's attention of `rows` rows per request, with keys for each row and once."""
    each, once = lists(context, rows, requests)
    k, v = torch.randn(2, requests * (context + rows) + 1, KV_HEADS, HEAD_DIM)
    q, scale = torch.randn(requests * rows, HEADS, HEAD_DIM), HEAD_DIM**-0.5
    return (
        lambda: ops.decode_attention(q, k, v, each, scale),
        lambda: ops.decode_attention(q, k, v, once, scale),
    )


def pairs(context: int, rows: int, turns: int) -> list[Pair]:
    """Both in turns, so that a busy moment of the machine is in both."""
    both = attentions(context, rows)
    repeats = [1 + int(LEAST_S / _seconds(work, 1)) for work in both for _ in range(2)][::2]
    made: list[Pair] = []
    for turn in range(turns):
        taken = [0.0, 0.0]
        for at in (0, 1) if turn % 2 else (1, 0):
            taken[at] = _seconds(both[at], repeats[at]) / repeats[at] * 1e3
        made.append((taken[0], taken[1]))
    return made


def _seconds(work: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        work()
    return time.perf_counter() - began


def row_of(context: int, rows: int, measured: Sequence[Pair]) -> list[str]:
    one, other = zip(*measured, strict=True)
    ratios = [a / b for a, b in measured]
    return [str(context), str(rows), likely(one), likely(other), likely(ratios)]


def verdict(found: dict[tuple[int, int], list[Pair]]) -> str:
    """From which rows on once is faster, by the whole interval, and what the ratio is where both are the same code: a
    plain round. `found`: by context and rows."""
    ratios = {at: [each / once for each, once in measured] for at, measured in found.items()}
    contexts, counts = sorted({c for c, _ in found}), sorted({r for _, r in found})
    wins = []
    for context in contexts:
        better = [n for n in counts if n > 1 and all(interval(ratios[context, r])[0] > 1 for r in counts if r >= n)]
        wins.append(f"{context}: {better[0] if better else 'never'}")
    best = max(ratios, key=lambda at: median(ratios[at]))
    same = [median(ratios[context, 1]) for context in contexts]
    return (
        "Attention whose keys are gathered once per request, not for each row, is faster from these rows per request "
        f"on, by context: {'; '.join(wins)}. At best it is {median(ratios[best]):.2f} times as fast ({best[1]} rows of "
        f"{best[0]} tokens). A plain round (1 row) is the same code either way: {min(same):.2f} to {max(same):.2f}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--out", type=Path, help="another folder than docs/results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {(context, rows): pairs(context, rows, options.turns) for context in options.contexts for rows in ROWS}
    publish(
        "keys_once",
        Result(
            title="Keys read once for the rows of a verification",
            verdict=verdict(found),
            intro=(
                f"Milliseconds of one layer's attention on one core, for {REQUESTS} requests of so many rows each "
                f"({HEADS} heads, {KV_HEADS} key heads of {HEAD_DIM} channels, float32), in turns: median of "
                f"{options.turns} (95 % interval), and of the ratio within a turn. Bits are the same. Engines gather "
                f"keys once; where all rows together have at most {ops.FEW_KEYS} keys, for each row, since one product "
                "then takes less time than several."
            ),
            columns=COLUMNS,
            rows=[row_of(*at, measured) for at, measured in found.items()],
        ),
        options.out,
    )


if __name__ == "__main__":
    main()
