"""How many rows are filtered by top-p and top-k together, which decides the bits of their sums on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specactor.rollout.sglang import sampling
from specactor.rollout.sglang.sampling import NOISE_ROWS, Kind, at_once


def threads(rows: int, vocabulary: int) -> int:
    """Which scan PyTorch's `cumsum` takes of rows on a GPU (ATen/native/cuda/ScanUtils.cuh): CUB's for one row, and for
    more the threads that share a row, which decide in which order it is added."""
    if rows == 1:
        return 0
    shared = (9 + (vocabulary - 1).bit_length() - (rows - 1).bit_length()) // 2
    return 1 << min(9, max(4, shared))


def draw(_: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool) -> tuple[torch.Tensor, None]:
    """As SGLang's sampler is called. A filtered row's token says by which scan it came, and whose it is."""
    assert len(probs) == len(positions) == len(info.top_ps) <= NOISE_ROWS
    scan = 0 if simple else threads(*probs.shape)
    return 1000 * positions + scan, None


def tokens_of(kinds: list[Kind], vocabulary: int) -> torch.Tensor:
    rows = len(kinds)
    per_row = {name: torch.ones(rows) for name in sampling._PER_ROW}
    info = SimpleNamespace(**per_row, sampling_mask_batch_indices=None)
    sampling.know_kinds(info, kinds)
    probs = torch.zeros(1, 1).expand(rows, vocabulary)
    return sampling.sample_by_kind(draw, None, probs, info, torch.arange(rows), False)[0]


BATCHES: list[list[Kind]] = [["filtered"] * rows for rows in (1, 2, 3, 33, 64, 65, 129, 257)]
BATCHES += [["simple", "filtered"], ["simple", *["filtered"] * 65, "greedy", "simple"]]


@pytest.mark.parametrize("vocabulary", [96, 700, 1536, 16_384, 32_000, 50_257, 151_936])
def test_a_filtered_row_has_one_scan_in_any_company(vocabulary: int) -> None:
    scan = threads(2, vocabulary)
    for kinds in BATCHES:
        filtered = torch.tensor([kind == "filtered" for kind in kinds])
        wanted = 1000 * torch.arange(len(kinds)) + scan
        assert torch.equal(tokens_of(kinds, vocabulary)[filtered].long(), wanted[filtered])
    assert at_once("simple", vocabulary) == range(1, NOISE_ROWS + 1), "noise has no sum"


@pytest.mark.parametrize(("sizes", "rows"), [(range(1, 65), 1), (range(2, 129), 65)])
def test_a_row_alone_and_too_many_rows_are_seen(sizes: range, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong versions: one row is left alone; 128 rows of a vocabulary of 32,000 are filtered together."""
    monkeypatch.setattr(sampling, "at_once", lambda *_: sizes)
    wanted = 1000 * torch.arange(rows) + threads(2, 32_000)
    assert not torch.equal(tokens_of(["filtered"] * rows, 32_000).long(), wanted)
