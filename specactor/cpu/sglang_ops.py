"""Arithmetic of SGLang's decoding on a CPU. Invariant: a request has the same bits whatever is computed beside it.

Shape legend: B requests, T tokens, V vocabulary, S pool slots, L keys (padded), H query heads, N key-value heads, D
head size, R rows, E experts, K experts per token, M hidden size, F expert width.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

MIN_ROWS = 4  # a matrix product with fewer rows takes other kernels (dot products), which round differently
KEYS_AT_ONCE = 4096
"""Keys that are gathered together. More leave the cache, and their memory is allocated anew at every layer: 576 rows of
64 keys took 16.5 ms in one piece and 3.2 ms in pieces."""
FEW_KEYS = 512  # so few are gathered again for each row: one product takes less time than several

_Words = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
_U32_MAX = float(2**32 - 1)


def _scramble(block: _Words) -> _Words:
    # the part of a MurmurHash3 round that does not depend on the state
    k = block * np.uint32(0xCC9E2D51)
    return ((k << np.uint32(15)) | (k >> np.uint32(17))) * np.uint32(0x1B873593)


def _absorb(state: _Words, scrambled: _Words) -> _Words:
    h = state ^ scrambled
    return ((h << np.uint32(13)) | (h >> np.uint32(19))) * np.uint32(5) + np.uint32(0xE6546B64)


@functools.lru_cache(maxsize=4)
def _scrambled_columns(num_columns: int) -> _Words:
    return _scramble(np.arange(num_columns, dtype=np.uint32))


def _hash_words(seed: Tensor, positions: Tensor, scrambled_columns: _Words) -> _Words:
    seed_B = seed.to(torch.int64).numpy()
    state_B = _absorb(np.zeros(len(seed_B), np.uint32), _scramble(seed_B.astype(np.uint32)))
    state_B = _absorb(state_B, _scramble((seed_B >> 32).astype(np.uint32)))
    state_B = _absorb(state_B, _scramble(positions.numpy().astype(np.uint32)))
    h_BV = _absorb(state_B[:, None], np.atleast_2d(scrambled_columns)) ^ np.uint32(16)
    h_BV = (h_BV ^ (h_BV >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h_BV = (h_BV ^ (h_BV >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h_BV ^ (h_BV >> np.uint32(16))


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Return noise bits, uint32 [B, V], per (request seed, position, column): MurmurHash3_x86_32 with the four blocks
    and length 16 of SGLang's Triton kernel."""
    return torch.from_numpy(_hash_words(seed, positions, _scramble(col_indices.numpy().astype(np.uint32))))


def sample_with_noise(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Return argmax_v [log p_t(v) + G(seed, t, v)], G Gumbel(0, 1), int64 [B, 1], with the bits of SGLang's
    `multinomial_with_seed`: it depends on seed [B] and positions [B] alone. `logprobs` [B, V] may be unnormalised.
    Noise is float64, whose tail is not cut."""
    words_BV = _hash_words(seed, positions, _scrambled_columns(logprobs.shape[1]))
    return _gumbel(words_BV).add_(logprobs).argmax(dim=1, keepdim=True)


def noise_of(seed: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return `sample_with_noise`'s noise of tokens [B, K], float64, positions being of those before."""
    return _gumbel(_hash_words(seed, positions, _scramble(tokens.numpy().astype(np.uint32))))


def _gumbel(words: _Words) -> Tensor:
    # in float64, so that the tail is not cut
    x = torch.from_numpy(words.astype(np.float64)).div_(_U32_MAX)
    return x.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_().log_().neg_()


def padded_keys(longest: int, queries: int) -> int:
    """Return a number of keys >= `longest` with which a shorter request has its own bits."""
    # Products of two or more rows split a long sum at a place that depends on the number of keys, padding included.
    # So few keys are one sum in every product; more than 192 were split in halves (AVX-512, MKL).
    one_sum = 256 if queries < MIN_ROWS else 128
    # Keys in whole blocks are summed one block after the other: 512 is what PyTorch's kernel attends to at once.
    block = 16 if queries == 1 or longest <= one_sum else 512
    return -(-longest // block) * block


def key_slots(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, longest: int, *, queries: int
) -> tuple[Tensor, Tensor]:
    """Return slots [B * L] of each request's keys, 0 for padding, and bias [B, 1, 1, L], -inf for padding.

    Args: longest = max(seq_lens), queries = H / N.
    """
    num_keys = padded_keys(longest, queries)
    width = min(num_keys, req_to_token.shape[1])
    slots_BL = req_to_token[req_pool_indices, :width].long()
    if width < num_keys:
        slots_BL = functional.pad(slots_BL, (0, num_keys - width))
    bias = _hiding(num_keys, seq_lens)
    return slots_BL.masked_fill_(bias[:, 0, 0] != 0, 0).view(-1), bias


@dataclass(frozen=True)
class SharedKeys:
    """Keys of B requests, gathered once for all neighbouring rows of a page-table row."""

    slots: Tensor  # [B * L] of the KV pool
    places: Sequence[tuple[Tensor | slice, Tensor]]
    """The first row of every request, the second where there is one, and so on: numbers of rows [b] in the batch, and
    bias [b, 1, 1, L], 0 for keys that the row sees. Requests of more rows come first."""


def shared_keys(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, *, queries: int) -> list[SharedKeys]:
    """Return the keys of a batch's rows, in pieces. Args: queries = H / N."""
    count, longest = len(req_pool_indices), int(seq_lens.max())
    begins_R = functional.pad(req_pool_indices[1:] != req_pool_indices[:-1], (1, 0), value=True)
    if count * longest <= FEW_KEYS or (count * longest <= KEYS_AT_ONCE and bool(begins_R.all())):
        slots, bias = key_slots(req_to_token, req_pool_indices, seq_lens, longest, queries=queries)
        return [SharedKeys(slots, [(slice(count), bias)])]
    first_B = begins_R.nonzero().view(-1)
    size_B = functional.pad(first_B, (0, 1), value=count).diff()
    longest_B = seq_lens.new_zeros(len(first_B)).scatter_reduce(0, begins_R.cumsum(0) - 1, seq_lens, "amax")
    parts = []
    for order in torch.split(size_B.argsort(descending=True, stable=True), max(1, KEYS_AT_ONCE // longest)):
        firsts, sizes, lengths = first_B[order], size_B[order], longest_B[order]
        slots, bias = key_slots(req_to_token, req_pool_indices[firsts], lengths, int(lengths.max()), queries=queries)
        first, last, step = int(firsts[0]), int(firsts[-1]), int(sizes[0])
        if step == int(sizes[-1]) and last - first == (len(firsts) - 1) * step:  # as many rows each, side by side
            rows: list[Tensor | slice] = [slice(first + place, last + place + 1, step) for place in range(step)]
        else:
            rows = [firsts[: int((sizes > place).sum())] + place for place in range(step)]
        biases = [bias] if step == 1 else [_hiding(bias.shape[-1], seq_lens[of]) for of in rows]
        parts.append(SharedKeys(slots, list(zip(rows, biases, strict=True))))
    return parts


def _hiding(num_keys: int, seen_B: Tensor) -> Tensor:
    """Return bias [B, 1, 1, L]: 0 for the first keys, as many as are seen, and -inf for others."""
    hidden_BL = torch.arange(num_keys) >= seen_B[:, None]
    return torch.zeros(hidden_BL.shape).masked_fill_(hidden_BL, float("-inf"))[:, None, None]


def decode_attention(
    q_RHD: Tensor, k_SND: Tensor, v_SND: Tensor, parts: Sequence[SharedKeys], scale: float, out: Tensor | None = None
) -> Tensor:
    """Attend from each row to its own keys in the pool, k and v [S, N, D]; return [R, H, Dv], in `out` if given. Each
    row has products of its own, with keys in order."""
    num_heads, num_kv_heads = q_RHD.shape[1], k_SND.shape[1]
    out_RHD = q_RHD.new_empty(len(q_RHD), num_heads, v_SND.shape[2]) if out is None else out
    for part in parts:
        size = len(part.places[0][1])  # B
        k_BNLD = k_SND.index_select(0, part.slots).view(size, -1, num_kv_heads, k_SND.shape[2]).transpose(1, 2)
        v_BNLD = v_SND.index_select(0, part.slots).view(size, -1, num_kv_heads, v_SND.shape[2]).transpose(1, 2)
        for rows, bias in part.places:
            count = len(bias)
            # The query heads that share a key head are that head's queries.
            q_BNGD = q_RHD[rows].view(count, num_kv_heads, num_heads // num_kv_heads, -1)
            out_BNGD = functional.scaled_dot_product_attention(
                q_BNGD, k_BNLD[:count], v_BNLD[:count], attn_mask=bias, scale=scale
            )
            out_RHD[rows] = out_BNGD.reshape(count, num_heads, -1)
    return out_RHD


def min_rows(weight: Tensor) -> int:
    """Return how many rows a product with a weight [out, width] needs for a row to have the same bits in any company.

    Warns where no number will do.
    """
    return _fewest_rows(*weight.shape[-2:], weight.dtype)


@functools.cache
def _fewest_rows(out: int, width: int, dtype: torch.dtype) -> int:
    # Found by trying: MKL's kernels for few rows depend on the width and the processor (4 rows on AMD's, up to 16 on
    # Intel's with AVX-512).
    dice, tried = torch.Generator().manual_seed(0), 64
    x = torch.randn(tried, width, generator=dice).to(dtype)
    weight = torch.randn(min(out, 256), width, generator=dice).to(dtype)
    whole = functional.linear(x, weight)
    for rows in range(tried - 1, MIN_ROWS - 1, -1):
        if not torch.equal(functional.linear(x[:rows], weight), whole[:rows]):
            if rows > tried // 2:
                warnings.warn(f"{dtype}: rows of a product have other bits in other batches on this CPU", stacklevel=2)
            return rows + 1
    return MIN_ROWS


def fill_rows(x_TM: Tensor, rows: int) -> Tensor:
    """Append rows of zeros until there are so many."""
    return functional.pad(x_TM, (0, 0, 0, rows - x_TM.shape[0]))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x times weight [out, M] transposed, with the same bits for a row whatever their number."""
    rows, needed = x.numel() // x.shape[-1], min_rows(weight)
    if rows >= needed or rows == 0:
        return functional.linear(x, weight, bias)
    return functional.linear(fill_rows(x.reshape(rows, -1), needed), weight, bias)[:rows].view(*x.shape[:-1], -1)


def experts(x_TM: Tensor, weights_TK: Tensor, ids_TK: Tensor, w13_EFM: Tensor, w2_EMF: Tensor) -> Tensor:
    """Return the weighted sum [T, M] of SwiGLU experts; ids of -1 are other ranks'. `w13_EFM` is [E, 2F, M],
    gate over up."""
    num_tokens, top_k = ids_TK.shape
    num_experts, width = w13_EFM.shape[0], w2_EMF.shape[2]
    flat = ids_TK.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=num_experts + 1).tolist()
    total, needed = flat.numel(), max(min_rows(w13_EFM), min_rows(w2_EMF))
    sorted_x = functional.pad(x_TM[order // top_k], (0, 0, 0, needed))
    hidden = sorted_x.new_empty(total + needed, 2 * width)
    out = sorted_x.new_empty(total + needed, x_TM.shape[1])
    spans = []
    start = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count:
            # Fewer than `needed` rows run on into the next experts' rows, which those overwrite.
            stop = start + max(count, needed)
            torch.mm(sorted_x[start:stop], w13_EFM[expert].t(), out=hidden[start:stop])
            spans.append((expert, start, stop))
            start += count
    gated = functional.silu(hidden[:, :width]).mul_(hidden[:, width:])
    for expert, first, stop in spans:
        torch.mm(gated[first:stop], w2_EMF[expert].t(), out=out[first:stop])
    out[: counts[0]] = 0.0
    unsorted = torch.empty_like(out[:total])
    unsorted[order] = out[:total]
    return unsorted.view(num_tokens, top_k, -1).mul_(weights_TK.unsqueeze(-1)).sum(dim=1)
