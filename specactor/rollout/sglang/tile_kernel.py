"""Attention of decoding on a GPU that reads a request's keys once for up to eight of its rows.

Plain rounds and verifications run the same program: a tile always has `TILE` places, each with the query heads that
share a key head, keys come in blocks of `BLOCK`, and `SPLIT` keys at a time make a part; a row's parts are combined in
their order. Keys that a row does not see have weight 0, and change none of its sums. So a row's bits depend neither on
its place nor on the others of its tile, provided that a matrix product treats its rows alike, as on tensor cores; only
a GPU can show that. A row of float32 is multiplied in float32, not in TF32.

Shape legend: R rows, H query heads, N key heads, D head size, M queries of a tile (padded), S parts of a row's keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specactor.cpu.sglang_ops import TILE, places

SPLIT = 256
"""Keys of a part: as many as SGLang's Triton backend has room for in its deterministic mode."""
BLOCK = 64
"""Keys that are loaded at once."""


def tile_sizes(readers_R: Tensor) -> Tensor:
    """Return how many rows the tile has that begins at each row, and 0 where none begins. [R] int32.

    The device is asked nothing. Args: readers_R: rows of the page table, see `places`.
    """
    begins_R = places(readers_R) == 0
    tile_R = begins_R.cumsum(0) - 1
    size_T = torch.zeros_like(tile_R).scatter_add_(0, tile_R, torch.ones_like(tile_R))
    return torch.where(begins_R, size_T[tile_R], 0).to(torch.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_part(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    kv_indptr: tl.tensor,
    kv_indices: tl.tensor,
    sizes: tl.tensor,
    parts: tl.tensor,
    log_totals: tl.tensor,
    scale: tl.tensor,
    q_row: tl.tensor,
    key_slot: tl.tensor,
    key_head: tl.tensor,
    value_slot: tl.tensor,
    value_head: tl.tensor,
    heads: tl.tensor,
    max_parts: tl.tensor,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    first, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    size = tl.load(sizes + first)
    if size == 0:  # the row is in the tile of one before it
        return
    query_M, d = tl.arange(0, M), tl.arange(0, BLOCK_D)
    row_M, head_M = first + query_M // GROUP, kv_head * GROUP + query_M % GROUP
    real_M = query_M < tl.minimum(size, PLACES) * GROUP
    start_M = tl.load(kv_indptr + row_M, mask=real_M, other=0)
    length_M = tl.load(kv_indptr + row_M + 1, mask=real_M, other=0) - start_M
    longest = tl.max(length_M, axis=0)
    begin = part * SPLIT
    if begin >= longest:
        return
    # The rows' lists of keys begin alike: the longest holds all.
    list_start = tl.max(tl.where(length_M == longest, start_M, 0), axis=0)
    in_head = d < D
    q_MD = tl.load(
        q + row_M[:, None] * q_row + head_M[:, None] * D + d[None, :],
        mask=real_M[:, None] & in_head[None, :],
        other=0.0,
    )
    top_M = tl.full([M], -float("inf"), tl.float32)
    total_M = tl.zeros([M], tl.float32)
    out_MD = tl.zeros([M, BLOCK_D], tl.float32)
    for start in range(begin, tl.minimum(begin + SPLIT, longest), BLOCK):
        key = start + tl.arange(0, BLOCK)
        there = (key < longest)[:, None] & in_head[None, :]
        slot = tl.load(kv_indices + list_start + key, mask=key < longest, other=0).to(tl.int64)[:, None]
        k = tl.load(keys + slot * key_slot + kv_head * key_head + d[None, :], mask=there, other=0.0)
        v = tl.load(values + slot * value_slot + kv_head * value_head + d[None, :], mask=there, other=0.0)
        score = tl.dot(q_MD, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(key[None, :] < length_M[:, None], score, -float("inf"))
        new_top_M = tl.maximum(top_M, tl.max(score, axis=1))
        shift_M = tl.where(new_top_M == -float("inf"), 0.0, new_top_M)  # a row that sees none of these keys
        old_M = tl.exp(top_M - shift_M)
        weight = tl.exp(score - shift_M[:, None])
        total_M = total_M * old_M + tl.sum(weight, axis=1)
        out_MD = out_MD * old_M[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top_M = new_top_M
    place_M = (row_M * heads + head_M) * max_parts + part
    seen_M = real_M & (begin < length_M)
    tl.store(log_totals + place_M, top_M + tl.log(total_M), mask=seen_M)
    tl.store(
        parts + place_M[:, None] * D + d[None, :], out_MD / total_M[:, None], mask=seen_M[:, None] & in_head[None, :]
    )


@triton.jit  # type: ignore[untyped-decorator]
def _combine(
    parts: tl.tensor,
    log_totals: tl.tensor,
    out: tl.tensor,
    kv_indptr: tl.tensor,
    value_scale: tl.tensor,
    heads: tl.tensor,
    max_parts: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK_D)
    length = tl.load(kv_indptr + row + 1) - tl.load(kv_indptr + row)
    place = row * heads + head
    top = tl.load(log_totals + place * max_parts)
    total = top * 0.0 + 1.0
    out_D = tl.load(parts + place * max_parts * D + d, mask=d < D, other=0.0)
    for part in range(1, tl.cdiv(length, SPLIT)):
        log_total = tl.load(log_totals + place * max_parts + part)
        new_top = tl.maximum(top, log_total)
        old, weight = tl.exp(top - new_top), tl.exp(log_total - new_top)
        out_D = out_D * old + weight * tl.load(parts + (place * max_parts + part) * D + d, mask=d < D, other=0.0)
        total = total * old + weight
        top = new_top
    tl.store(out + place * D + d, (out_D / total * value_scale).to(out.dtype.element_ty), mask=d < D)


def tile_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    sizes: Tensor,
    parts: Tensor,
    log_totals: Tensor,
    scale: float,
    value_scale: float = 1.0,
) -> None:
    """Attention of R rows over their own keys into `out`.

    Args:
        q, out: [R, H, D], in one piece.
        keys, values: [slots, N, D], the pool.
        kv_indptr: [R + 1]: where each row's keys begin in kv_indices, which holds slots.
        sizes: [R], from `tile_sizes`.
        parts, log_totals: float32 [>= R, H, S, D] and [>= R, H, S], room for parts: S * SPLIT >= a row's keys.
    """
    rows, heads, dim = q.shape
    kv_heads, max_parts, block_d = keys.shape[1], parts.shape[2], max(16, triton.next_power_of_2(dim))
    group = heads // kv_heads
    _attend_part[rows, kv_heads, max_parts](
        *(q, keys, values, kv_indptr, kv_indices, sizes, parts, log_totals, scale),
        *(q.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), heads, max_parts),
        GROUP=group,
        PLACES=TILE,
        M=max(16, triton.next_power_of_2(TILE * group)),
        D=dim,
        BLOCK_D=block_d,
        SPLIT=SPLIT,
        BLOCK=BLOCK,
        num_warps=4,
    )
    _combine[rows, heads](
        *(parts, log_totals, out, kv_indptr, value_scale, heads, max_parts),
        D=dim,
        BLOCK_D=block_d,
        SPLIT=SPLIT,
        num_warps=1,
    )
