"""Core attention for Megatron's local layer spec with packed sequences and context parallelism, unlike Megatron's.

Shapes: T packed tokens on this rank, H query heads, G key-value heads, D head size, B sequences of a bucket, L and K
padded query and key lengths.
"""

# ruff: noqa: N815 - tensor fields carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

MAX_WASTE = 0.3  # most padding of a bucket; one call per bucket takes 0.4 of a loop over 64 sequences of 30-60 tokens


@dataclass(frozen=True)
class Bucket:
    """Sequences attended together; indices are rows of this rank's queries and of all ranks' keys."""

    query_rows_BL: Tensor
    key_rows_BK: Tensor
    mask_B1LK: Tensor | None  # true where a query may look; None: plain causal


@dataclass(frozen=True)
class PackedPlan:
    buckets: list[Bucket]
    output_rows_T: Tensor  # each packed token's row in the buckets' padded outputs, one after the other


def bucket_lengths(lengths: list[int]) -> list[list[int]]:
    """Return the sequences of each bucket, longest first; every non-empty sequence is in exactly one. PURE."""
    buckets: list[list[int]] = []
    real = 0
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i)):
        if buckets:
            longest = lengths[buckets[-1][0]]
            room = longest * (len(buckets[-1]) + 1)
            if real + lengths[index] >= (1 - MAX_WASTE) * room:
                buckets[-1].append(index)
                real += lengths[index]
                continue
        buckets.append([index])
        real = lengths[index]
    return buckets


def plan_packed(boundaries: list[int], ranks: int, rank: int, device: torch.device | str = "cpu") -> PackedPlan:
    """The plan of a packed micro-batch. `boundaries` are the cumulative padded lengths over all ranks."""
    starts = torch.tensor(boundaries[:-1]) // ranks
    lengths = torch.tensor(boundaries).diff() // ranks
    rows_per_rank = boundaries[-1] // ranks
    output_rows_T = torch.empty(rows_per_rank, dtype=torch.int64)
    buckets, base = [], 0
    for members in bucket_lengths(lengths.tolist()):
        starts_B1, lengths_B1 = starts[members][:, None], lengths[members][:, None]
        offset_L = torch.arange(int(lengths_B1.max()))
        real_BL = offset_L < lengths_B1
        rows_BL = torch.where(real_BL, starts_B1 + offset_L, starts_B1)
        output_rows_T[rows_BL[real_BL]] = base + real_BL.flatten().nonzero()[:, 0]
        base += rows_BL.numel()
        if ranks == 1:  # padding follows the real keys, where the causal mask hides it from real queries
            buckets.append(Bucket(rows_BL.to(device), rows_BL.to(device), None))
        else:
            key_rows_BK = torch.cat([rows_BL + r * rows_per_rank for r in range(ranks)], dim=1)
            mask_B1LK = _context_mask(offset_L, lengths_B1, ranks, rank)
            buckets.append(Bucket(rows_BL.to(device), key_rows_BK.to(device), mask_B1LK.to(device)))
    return PackedPlan(buckets, output_rows_T.to(device))


def _context_mask(offset_L: Tensor, lengths_B1: Tensor, ranks: int, rank: int) -> Tensor:
    """(B, 1, L, K): whether a query of `rank` may look at a key of any rank."""
    after_all = int(lengths_B1.max()) * ranks  # the position of padding: no real query looks at it
    position_RBL = torch.stack([positions(offset_L, lengths_B1, ranks, r) for r in range(ranks)])
    position_RBL = position_RBL.masked_fill(offset_L >= lengths_B1, after_all)
    key_position_BK = position_RBL.permute(1, 0, 2).flatten(1)
    return (key_position_BK[:, None, :] <= position_RBL[rank][:, :, None])[:, None]


def positions(offset: Tensor, length: Tensor, ranks: int, rank: int) -> Tensor:
    """Position in its sequence of the token at `offset` among the `length` tokens that `rank` holds of it. The rank
    holds the 2 * ranks chunks' number `rank` and number 2 * ranks - 1 - rank. The arguments broadcast."""
    if ranks == 1:
        return offset + torch.zeros_like(length)
    chunk = length // 2
    return offset + torch.where(offset >= chunk, (2 * ranks - 2 - rank) * chunk, rank * chunk)


_plans: Any = WeakTensorKeyDictionary()


def _plan(cu_seqlens: Tensor, ranks: int, rank: int) -> PackedPlan:
    """Return the plan of a micro-batch, cached: all its layers share one tensor of boundaries."""
    plan = _plans.get(cu_seqlens)
    if plan is None:
        plan = _plans[cu_seqlens] = plan_packed(cu_seqlens.tolist(), ranks, rank, cu_seqlens.device)
    return plan  # type: ignore[no-any-return]


class PackedAttention(DotProductAttention):  # type: ignore[misc]
    """Causal scaled dot-product attention over packed, or plain, sequences; drop-in for Megatron's."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        size = config.context_parallel_size
        config.context_parallel_size = 1  # refused upstream, supported here
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.context_parallel_size = size
        if config.softmax_type != "vanilla" or config.attention_dropout:
            raise NotImplementedError("packed attention: got attention dropout or a softmax offset, expected neither")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query (T, H, D), key and value (T, G, D) of packed sequences -> (T, H * D)."""
        if packed_seq_params is None or attention_bias is not None:
            raise NotImplementedError("packed attention takes packed sequences without a bias")
        group = parallel_state.get_context_parallel_group()
        ranks, rank = group.size(), group.rank()
        if ranks > 1:
            key, value = (gather_from_sequence_parallel_region(t, group=group) for t in (key, value))
        plan = _plan(packed_seq_params.cu_seqlens_q_padded, ranks, rank)
        padded = [self._attend(bucket, query, key, value) for bucket in plan.buckets]
        return (torch.cat(padded) if len(padded) > 1 else padded[0]).index_select(0, plan.output_rows_T)

    def _attend(self, bucket: Bucket, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return outputs (B * L, H * D), padding included."""

        def rows(tensor: Tensor, index: Tensor) -> Tensor:
            picked = tensor.index_select(0, index.flatten())
            return picked.view(*index.shape, *tensor.shape[1:]).transpose(1, 2)

        out_BHLD = F.scaled_dot_product_attention(
            rows(query, bucket.query_rows_BL),
            rows(key, bucket.key_rows_BK),
            rows(value, bucket.key_rows_BK),
            attn_mask=bucket.mask_B1LK,
            is_causal=bucket.mask_B1LK is None,
            scale=self.softmax_scale,
            enable_gqa=True,
        )
        return out_BHLD.transpose(1, 2).flatten(2).flatten(0, 1)


def rotate_packed(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> Tensor:
    """Rotary embedding of packed tokens t (T, heads, D), freqs (longest, 1, 1, D), without a loop over sequences."""
    if multi_latent_attention or rotary_interleaved or freqs.shape[-1] != t.shape[-1]:
        raise NotImplementedError("packed rotary embedding: only the whole head in two halves")
    cos, sin = _rotation(cu_seqlens, freqs, mscale, cp_group, t.dtype)
    half = t.shape[-1] // 2
    turned = torch.cat((-t[..., half:], t[..., :half]), dim=-1)
    return torch.addcmul(t * cos, turned, sin)


_rotations: Any = WeakTensorKeyDictionary()


def _rotation(
    cu_seqlens: Tensor, freqs: Tensor, mscale: float, cp_group: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin (T, 1, D) at each packed token's position; cached per micro-batch."""
    cached = _rotations.get(cu_seqlens)
    if cached is None:
        ranks, rank = cp_group.size(), cp_group.rank()
        lengths_S = cu_seqlens.diff().long() // ranks
        lengths_T = lengths_S.repeat_interleave(lengths_S)
        offset_T = torch.arange(len(lengths_T), device=cu_seqlens.device) - (
            cu_seqlens[:-1].long() // ranks
        ).repeat_interleave(lengths_S)
        angles = freqs[:, 0].index_select(0, positions(offset_T, lengths_T, ranks, rank))
        cached = _rotations[cu_seqlens] = ((angles.cos() * mscale).to(dtype), (angles.sin() * mscale).to(dtype))
    return cached  # type: ignore[no-any-return]
