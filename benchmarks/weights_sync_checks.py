"""What each check of a weight sync costs, on one core: digests and read-backs of as many bytes as a model of 100 M
parameters has, by the functions that a push calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from benchmarks.results import machine
from specactor.weights_sync.digest import copy_and_digest, copy_with_digest, digest_of, digest_spans
from specactor.weights_sync.plan import PIECE_BYTES, Block, Span
from specactor.weights_sync.receiver import _same_bits

PIECES = 400
TURNS = 7
COLUMNS = ("Check", "when", "where", "s per GB", "of memcpy's", "measured")


def measured() -> list[tuple[str, ...]]:
    """Seconds per GB of each check beside those of memcpy; in turns, medians."""
    size = PIECES * PIECE_BYTES
    source = torch.from_numpy(np.random.default_rng(0).integers(256, size=size, dtype=np.uint8))
    target = torch.ones_like(source)
    memory, parameter = source.numpy(), target.numpy()
    pieces = [(Block(Span(0, at, 0, PIECE_BYTES, 1), at, 0),) for at in range(0, size, PIECE_BYTES)]
    digests = list[int]()

    def copied() -> None:
        for (block,) in pieces:
            parameter[block.to :][:PIECE_BYTES] = memory[block.to :][:PIECE_BYTES]

    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: target.copy_(source),
        "pieces": copied,
        "by plan": lambda: [copy_and_digest([parameter], each, [memory]) for each in pieces],
        "of spans": lambda: [digest_spans({0: memory}, [block.span]) for (block,) in pieces],
        "packed": lambda: digests.append(copy_with_digest(target, source)),
        "arrived": lambda: digests.append(digest_of(memory.data)),
        "read back": lambda: _same_bits(target, source),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:
                seconds[name].append((time.perf_counter() - start) / size * 1e9)
    assert len(set(digests)) == 1, "what is measured finds nothing wrong"
    cost = {name: median(each) for name, each in seconds.items()}
    each = (
        ("digest of what arrived, in the cache", "every push", "engine rank", cost["by plan"] - cost["pieces"]),
        ("digest of the same bytes", "every push", "trainer rank, meanwhile", cost["of spans"]),
        ("digest, while a bucket is packed", "first push", "trainer rank", cost["packed"] - cost["memcpy"]),
        ("digest of a bucket, before it is loaded", "first push", "engine rank", cost["arrived"]),
        ("bits of what was loaded, read back", "first push", "engine rank", cost["read back"]),
    )
    rows = [(*names, f"{of:.3f}", f"{of / cost['memcpy']:.0%}", machine()) for *names, of in each]
    return [("memcpy alone", "", "", f"{cost['memcpy']:.3f}", "100%", machine()), *rows]
