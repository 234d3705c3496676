"""Sampling on a GPU in one pass over the vocabulary: noise, argmax, and what log-probabilities are made of.

SGLang's own path makes float64 noise of [rows, vocabulary] and three float32 tensors of that size; here both stay in
registers. The hash is SGLang's, and so is the noise (`_noise`): MurmurHash3 of (seed, position, token), as in
`cpu/sglang_ops`. What is added to it is logits / temperature, and not the float32 logarithm of a float32 softmax, which
rounds once more: tokens differ from SGLang's path where two scores are nearer than that rounding, which is 1e-6.

A row is cut into chunks of fixed size, which are combined in one order. So its bits depend on itself alone, provided
that a kernel's program does not feel the others, as on GPUs: plain rounds and verifications run the same programs.

Shape legend: R rows, V vocabulary, C chunks of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
"""Tokens of the vocabulary per program."""


class Drawn(NamedTuple):
    """Of every row."""

    tokens: Tensor
    """[R] int64."""
    tops: Tensor
    """[R] float32: the largest of logits / temperature."""
    log_totals: Tensor
    """[R] float32: log-sum-exp of them, less `tops`."""


@triton.jit  # type: ignore[untyped-decorator]
def _absorb(state: tl.tensor, block: tl.tensor) -> tl.tensor:
    """A block of MurmurHash3 (32 bit)."""
    k = block * 0xCC9E2D51
    k = ((k << 15) | (k >> 17)) * 0x1B873593
    state = state ^ k
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@triton.jit  # type: ignore[untyped-decorator]
def _hash(seed: tl.tensor, position: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """32 bits per token. Args: seed and position of a row, tokens: a block of them."""
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
    """Gumbel(0, 1) in float64."""
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
def _combine(
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
    """Return a token of every row: argmax of logits / temperature + noise, or without noise.

    Args:
        logits: [R, V], whose tokens follow each other in memory.
        temperatures: [R, 1] or [R], float32.
        seeds: [R] int64.
        positions: [R]: of the tokens before those that are drawn, as SGLang's sampler has them.
        greedy: [R] bool.
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
    _combine[(rows,)](*parts, *drawn, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1)
    return drawn


def logprobs_of(tokens: Tensor, logits: Tensor, temperatures: Tensor, drawn: Drawn) -> Tensor:
    """Return log_softmax(logits / temperature) of a token per row, which another rule may have chosen. [R] float32."""
    x_R = logits.gather(1, tokens.long()[:, None])[:, 0].float() / temperatures.view(-1)
    return (x_R - drawn.tops) - drawn.log_totals
