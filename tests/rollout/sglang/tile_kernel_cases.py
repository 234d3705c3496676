"""Script for Triton's interpreter: attention in tiles, a row in many tiles beside the row alone. Prints JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from specactor.rollout.sglang import kernels

LENGTHS = [1, 17, 63, 64, 65, 190, 255, 256, 257, 513, 700]
BEYOND = 40
"""Keys after those of a request's row, which later rows of its tile see."""
SCALE = 0.3


class Pool:
    """Keys and values of requests, in slots that are scattered over it."""

    def __init__(self, group: int, dim: int, kv_heads: int, dtype: torch.dtype) -> None:
        torch.manual_seed(group)
        width = max(LENGTHS) + BEYOND
        self.slots = (torch.randperm(len(LENGTHS) * width) + 1).view(len(LENGTHS), width)
        self.k, self.v = torch.randn(2, len(LENGTHS) * width + 1, kv_heads, dim).to(dtype)
        self.q = torch.randn(len(LENGTHS), group * kv_heads, dim).to(dtype)
        self.alone = self.attend(self.q, torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def attend(self, q: torch.Tensor, readers: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Rows as SGLang's backend has them: each has a list of its own keys."""
        indices = torch.cat([self.slots[r, :n] for r, n in zip(readers.tolist(), lengths.tolist(), strict=True)])
        indptr = pad(lengths.cumsum(0), (1, 0)).int()
        num_parts = -(-(max(LENGTHS) + BEYOND) // kernels.SPLIT)
        parts = torch.full((*q.shape[:2], num_parts, q.shape[2]), torch.nan)
        out = torch.empty_like(q)
        sizes = torch.empty(len(readers), dtype=torch.int32)
        kernels.size_tiles(readers, sizes)
        kernels.tile_attention(q, self.k, self.v, out, indptr, indices, sizes, parts, parts[..., 0].clone(), SCALE)
        return out

    def exact(self) -> torch.Tensor:
        group = self.q.shape[1] // self.k.shape[1]
        rows = []
        for b, n in enumerate(LENGTHS):
            k, v = (x[self.slots[b, :n]].double().repeat_interleave(group, 1) for x in (self.k, self.v))
            rows.append(
                torch.einsum("hn,nhd->hd", (SCALE * torch.einsum("hd,nhd->hn", self.q[b].double(), k)).softmax(1), v)
            )
        return torch.stack(rows)


def differing(pool: Pool, counts: Sequence[int], requests: Sequence[int]) -> tuple[int, int]:
    """(rows whose bits are not those of the row alone, rows): anywhere in tiles, beside any others."""
    q, readers, lengths, wanted = [], [], [], []
    for count in counts:
        for share in (0, 0.5, 1):
            for b in requests:  # the next tile has another request's rows
                n = LENGTHS[b]
                at = int(share * (min(count, n) - 1))
                others = torch.randn(count, *pool.q.shape[1:]).to(pool.q.dtype)
                others[at] = pool.q[b]
                wanted.append((len(readers) + at, b))
                q.append(others)
                readers += [b] * count
                lengths += [min(n - at + i, n + BEYOND) for i in range(count)]
    found = pool.attend(torch.cat(q), torch.tensor(readers), torch.tensor(lengths))
    return sum(not torch.equal(found[row], pool.alone[b]) for row, b in wanted), len(wanted)


def main(groups: Sequence[int]) -> None:
    found: dict[str, Any] = {"cases": {}}
    every, some = range(len(LENGTHS)), [LENGTHS.index(n) for n in (1, 65, 256, 700)]
    for group in groups:
        for dtype in (torch.float32, torch.float16):  # the interpreter cannot multiply bfloat16
            pool = Pool(group, dim=24, kv_heads=2 if group == 2 else 1, dtype=dtype)
            error = float((pool.alone.double() - pool.exact()).abs().max())
            wide = group == 2 and dtype is torch.float32
            bad, rows = differing(pool, (3,) if wide else (8,), every if wide else some)
            if wide:  # nine rows are a full tile and one with a single row
                more = differing(pool, (9,), some if len(groups) == 1 else every)
                bad, rows = bad + more[0], rows + more[1]
            found["cases"][f"{group} queries per key head, {dtype}"] = [bad, rows, error]
    kernels.SPLIT = 192  # wrong versions: parts of another size than alone, tiles that mix requests
    found["other parts"] = differing(pool, (8,), some)
    kernels.SPLIT, right = 256, kernels.size_tiles
    kernels.size_tiles = lambda readers, sizes: right(torch.zeros_like(readers), sizes)
    found["mixed tiles"] = differing(pool, (3,), some)
    sizes = torch.full((13,), -1, dtype=torch.int32)
    right(torch.tensor([5] * 9 + [2, 3, 3, 2]), sizes)
    found["sizes"] = sizes.tolist()
    print(json.dumps(found))


if __name__ == "__main__":
    main([int(group) for group in sys.argv[1:]])
