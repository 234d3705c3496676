"""Triton kernels: attention that reads a request's keys once for up to eight of its rows, sampling in one pass, and
sums with their norms.

Invariant: a row's bits depend neither on its place nor on other rows, where the GPU's products do not.

Shape legend: R rows, H query heads, N key heads, D head size or hidden size, M queries of a tile, S parts of keys, V
vocabulary, C chunks of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specactor.config.rollout import SPLIT

TILE = 8  # rows of a tile: a request's last token and seven drafts; always computed all, so bits do not vary
BLOCK = 64  # keys that are loaded at once


@triton.jit  # type: ignore[untyped-decorator]
def _smaller(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.minimum(a, b)


@triton.jit  # type: ignore[untyped-decorator]
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


@triton.jit  # type: ignore[untyped-decorator]
def _size_tiles(
    readers: tl.tensor, sizes: tl.tensor, num_rows: tl.tensor, TILE: tl.constexpr, BLOCK_R: tl.constexpr
) -> None:
    row = tl.arange(0, BLOCK_R)
    inside = row < num_rows
    reader = tl.load(readers + row, mask=inside, other=-1)
    before = tl.load(readers + row - 1, mask=inside & (row > 0), other=-1)
    after = tl.load(readers + row + 1, mask=row + 1 < num_rows, other=-1)
    first = tl.associative_scan(tl.where(reader != before, row, 0), 0, _larger)
    stop = tl.associative_scan(tl.where(reader != after, row + 1, BLOCK_R), 0, _smaller, reverse=True)
    size = tl.where((row - first) % TILE == 0, tl.minimum(stop - row, TILE), 0)
    tl.store(sizes + row, size, mask=inside)


def size_tiles(readers_R: Tensor, sizes_R: Tensor) -> None:
    """Write the size of the tile that begins at each row, or 0, int32. `readers_R`: page-table rows, from 0."""
    rows = len(readers_R)
    _size_tiles[(1,)](readers_R, sizes_R, rows, TILE=TILE, BLOCK_R=triton.next_power_of_2(rows), num_warps=8)


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
        score = tl.dot(q_MD, tl.trans(k), input_precision="ieee") * scale  # float32, not TF32
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
def _combine_parts(
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
    """Attend from R rows to their own keys, into `out`.

    Args:
        q, out: [R, H, D], in one piece.
        keys, values: [slots, N, D].
        kv_indptr: [R + 1]: where each row's slots begin in kv_indices.
        sizes: [R], from `size_tiles`.
        parts, log_totals: float32 [>= R, H, S, D] and [>= R, H, S], S * SPLIT >= a row's keys.
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
    _combine_parts[rows, heads](
        *(parts, log_totals, out, kv_indptr, value_scale, heads, max_parts),
        D=dim,
        BLOCK_D=block_d,
        SPLIT=SPLIT,
        num_warps=1,
    )


CHUNK = 2048  # tokens of the vocabulary per program


class Drawn(NamedTuple):
    """A token of every row, and what its log-probability is made of."""

    tokens: Tensor  # [R] int64
    tops: Tensor  # [R] float32: the largest of logits / temperature
    log_totals: Tensor  # [R] float32: log-sum-exp of them, less `tops`


@triton.jit  # type: ignore[untyped-decorator]
def _absorb(state: tl.tensor, block: tl.tensor) -> tl.tensor:
    # a block of MurmurHash3 (32 bit)
    k = block * 0xCC9E2D51
    k = ((k << 15) | (k >> 17)) * 0x1B873593
    state = state ^ k
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@triton.jit  # type: ignore[untyped-decorator]
def _hash(seed: tl.tensor, position: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    # MurmurHash3 of (seed, position, token), as in `cpu/sglang_ops` and SGLang
    seed = seed.to(tl.uint64)
    state = _absorb(0, seed.to(tl.uint32))
    state = _absorb(state, (seed >> 32).to(tl.uint32))
    state = _absorb(state, position.to(tl.uint32))
    h = _absorb(state, tokens.to(tl.uint32)) ^ 16  # the length of four blocks
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def _noise(bits: tl.tensor) -> tl.tensor:
    """Return Gumbel(0, 1) noise in float64."""
    log_u = tl.log(bits.to(tl.float64) / 4294967295.0)
    # No bits would be minus infinity, and all of them infinity: those are as their neighbour.
    log_u = tl.maximum(tl.minimum(log_u, -2.3283064365386963e-10), -1.7976931348623157e308)
    return -tl.log(-log_u)


@triton.jit  # type: ignore[untyped-decorator]
def _draw_chunk(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    greedy: tl.tensor,
    best_scores: tl.tensor,
    best_tokens: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=-float("inf")).to(tl.float32)
    x = tl.div_rn(x, tl.load(temperatures + row))
    top = tl.max(x, axis=0)
    # A chunk in which no token is allowed has no weight; minus infinity less itself is not a number.
    total = tl.sum(tl.exp(x - tl.where(top == -float("inf"), 0.0, top)), axis=0)
    noise = _noise(_hash(tl.load(seeds + row), tl.load(positions + row), tokens))
    noise = tl.where(tl.load(greedy + row) != 0, 0.0, noise)
    score, best = tl.max(x.to(tl.float64) + noise, axis=0, return_indices=True)  # the first of equals
    place = row * num_chunks + chunk
    tl.store(best_scores + place, score)
    tl.store(best_tokens + place, chunk * CHUNK + best)
    tl.store(tops + place, top)
    tl.store(totals + place, total)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_chunks(
    best_scores: tl.tensor,
    best_tokens: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    token: tl.tensor,
    row_top: tl.tensor,
    row_log_total: tl.tensor,
    num_chunks: tl.tensor,
    CHUNKS: tl.constexpr,
) -> None:
    row, chunks = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    places, real = row * num_chunks + chunks, chunks < num_chunks
    _, first = tl.max(tl.load(best_scores + places, mask=real, other=-float("inf")), axis=0, return_indices=True)
    tl.store(token + row, tl.load(best_tokens + row * num_chunks + first))
    part = tl.load(tops + places, mask=real, other=-float("inf"))
    top = tl.max(part, axis=0)
    total = tl.sum(tl.load(totals + places, mask=real, other=0.0) * tl.exp(part - top), axis=0)
    tl.store(row_top + row, top)
    tl.store(row_log_total + row, tl.log(total.to(tl.float64)).to(tl.float32))


def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Drawn:
    """Return each row's argmax of logits / temperature + noise, without noise where `greedy`. Tokens differ from
    SGLang's where two scores are nearer than 1e-6, the rounding of its float32 log-softmax.

    Args:
        logits: [R, V], each row in one piece.
        temperatures: float32 [R, 1] or [R].
        positions: [R], of the tokens before those drawn.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    scores_RC = logits.new_empty(rows, chunks, dtype=torch.float64)
    tokens_RC = logits.new_empty(rows, chunks, dtype=torch.int64)
    tops_RC, totals_RC = logits.new_empty(2, rows, chunks, dtype=torch.float32)
    parts = (scores_RC, tokens_RC, tops_RC, totals_RC)
    drawn = Drawn(logits.new_empty(rows, dtype=torch.int64), *logits.new_empty(2, rows, dtype=torch.float32))
    given = (logits, temperatures, seeds, positions, greedy)
    _draw_chunk[rows, chunks](*given, *parts, logits.stride(0), vocab, chunks, CHUNK=CHUNK, num_warps=8)
    _combine_chunks[(rows,)](*parts, *drawn, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1)
    return drawn


def logprobs_of(tokens: Tensor, logits: Tensor, temperatures: Tensor, drawn: Drawn) -> Tensor:
    """Return log_softmax(logits / temperature) of given tokens, [R] float32."""
    x_R = logits.gather(1, tokens.long()[:, None])[:, 0].float() / temperatures.view(-1)
    return (x_R - drawn.tops) - drawn.log_totals


@triton.jit  # type: ignore[untyped-decorator]
def _add_and_normalize(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    at, inside = row * D + d, d < D
    sum_D = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    sum_D += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, sum_D, mask=inside)
    normed_D = sum_D * tl.rsqrt(tl.sum(sum_D * sum_D, axis=0) / D + eps)
    if ROUNDS:
        normed_D = normed_D.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, normed_D * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32), mask=inside)


def add_and_normalize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounds: bool = False
) -> tuple[Tensor, Tensor]:
    """Return RMSNorm(x + residual) and the sum, [R, D] each, of x's type.

    Args:
        x, residual: [R, D], in one piece.
        weight: [D].
        rounds: to x's type before the product with the weight.
    """
    rows, depth = x.shape
    out, total = torch.empty_like(x), torch.empty_like(x)
    _add_and_normalize[(rows,)](
        *(x, residual, weight, out, total, eps),
        D=depth,
        BLOCK_D=triton.next_power_of_2(depth),
        ROUNDS=rounds,
        num_warps=8,
    )
    return out, total
