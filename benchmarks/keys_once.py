"""Attention of a verification on a CPU: keys read once per row, or once per tile of rows, over contexts and windows.

python -m benchmarks.keys_once
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.results import Result, likely, publish
from specactor.cpu import sglang_ops as ops

CONTEXTS = (64, 256, 1024, 4096, 8192)
ROWS = (1, 2, 3, 5, 9)
"""Of a request: its last token and drafts."""
TURNS = 15
REQUESTS, HEADS, KV_HEADS, HEAD_DIM = 2, 16, 8, 128
"""The heads are Qwen3-0.6B's."""
LEAST_S = 0.02
"""What is timed at once is repeated until it takes this long."""
COLUMNS = ("context", "rows", "as rows, ms", "in tiles, ms", "rows / tiles")
Pair = tuple[float, float]
"""Milliseconds as rows and in tiles, of one turn."""


def attentions(context: int, rows: int, requests: int = REQUESTS) -> tuple[Callable[[], object], Callable[[], object]]:
    """One layer's attention of `rows` rows per request, as rows and in tiles. Lists of keys are made once per round."""
    torch.manual_seed(0)
    length = context + rows
    table = (torch.randperm(requests * length) + 1).view(requests, length).int()
    k, v = torch.randn(2, requests * length + 1, KV_HEADS, HEAD_DIM)
    q = torch.randn(requests * rows, HEADS, HEAD_DIM)
    readers = torch.arange(requests).repeat_interleave(rows)
    seen = (torch.arange(rows) + context - rows + 1).repeat(requests)
    group = HEADS // KV_HEADS
    runs = ops.runs(table, readers, seen, queries=group)
    tiles = ops.tiles(table, readers, seen, queries=group)
    scale = HEAD_DIM**-0.5
    return (
        lambda: ops.decode_attention(q, k, v, runs, scale),
        lambda: ops.tile_attention(q, k, v, tiles, scale),
    )


def pairs(context: int, rows: int, turns: int) -> list[Pair]:
    """Both in turns, so that a busy moment of the machine is in both."""
    both = attentions(context, rows)
    repeats = [1 + int(LEAST_S / _seconds(work, 1)) for work in both for _ in range(2)][::2]
    return [
        tuple(_seconds(work, count) / count * 1e3 for work, count in zip(both, repeats, strict=True))  # type: ignore[misc]
        for _ in range(turns)
    ]


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
    """What tiles cost a plain round, and from which window on they win. `found`: by context and rows."""
    gains = {at: median(a / b for a, b in measured) for at, measured in found.items()}
    contexts, counts = sorted({c for c, _ in gains}), sorted({r for _, r in gains})
    plain = [1 / gains[c, counts[0]] for c in contexts]
    wins = []
    for context in contexts:
        better = [rows for rows in counts if all(gains[context, r] > 1 for r in counts if r >= rows)]
        wins.append(f"{context}: {f'{better[0]} rows' if better else 'never'}")
    best = max(gains, key=lambda at: gains[at])
    return (
        f"In tiles a plain round's attention takes {min(plain):.2f} to {max(plain):.2f} times as long. Tiles are "
        f"faster from these rows per request on, by context: {'; '.join(wins)}. At best they are "
        f"{gains[best]:.2f} times as fast ({best[1]} rows of {best[0]} tokens)."
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
                f"{options.turns} (95 % interval), and of the ratio within a turn. One row is a plain round. Rows are "
                f"what engines do by default; tiles of {ops.TILE} are `attention_backend=tiles`, in plain rounds and "
                "verifications alike, since the two differ in bits."
            ),
            columns=COLUMNS,
            rows=[row_of(*at, measured) for at, measured in found.items()],
        ),
        options.out,
    )


if __name__ == "__main__":
    main()
