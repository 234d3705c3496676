"""Attention of packed sequences, also under context parallelism, and experts with `SequentialMLP`'s checkpoints, for
Megatron's local layer spec.

Shapes: T packed tokens, H query heads, G key-value heads, D head size, B sequences of a bucket, L and K padded query
and key lengths, I and O widths.
"""
# ruff: noqa: N815 - tensor fields carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class Bucket:
    """Sequences attended together, as rows of this rank's queries and of all ranks' keys."""

    query_rows_BL: Tensor
    key_rows_BK: Tensor
    mask_B1LK: Tensor | None  # true where a query may look; None: plain causal


PackedPlan = tuple[list[Bucket], Tensor]
"""Buckets, and each packed token's row in their padded outputs, one after the other."""


def bucket_lengths(lengths: list[int]) -> list[list[int]]:
    """Return the sequences of each bucket, longest first; every non-empty one is in exactly one. PURE."""
    buckets: list[list[int]] = []
    real = 0
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i)):
        if buckets:
            longest = lengths[buckets[-1][0]]
            room = longest * (len(buckets[-1]) + 1)
            # At most 30 % is padding: one call per bucket takes 0.4 of a loop over 64 sequences of 30-60 tokens.
            if real + lengths[index] >= 0.7 * room:
                buckets[-1].append(index)
                real += lengths[index]
                continue
        buckets.append([index])
        real = lengths[index]
    return buckets


def plan_packed(boundaries: list[int], ranks: int, rank: int, device: torch.device | str = "cpu") -> PackedPlan:
    """Plan a packed micro-batch. `boundaries` are cumulative padded lengths over all ranks."""
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
    return buckets, output_rows_T.to(device)


def _context_mask(offset_L: Tensor, lengths_B1: Tensor, ranks: int, rank: int) -> Tensor:
    # (B, 1, L, K): whether a query of `rank` may look at a key of any rank
    after_all = int(lengths_B1.max()) * ranks  # the position of padding: no real query looks at it
    position_RBL = torch.stack([positions(offset_L, lengths_B1, ranks, r) for r in range(ranks)])
    position_RBL = position_RBL.masked_fill(offset_L >= lengths_B1, after_all)
    key_position_BK = position_RBL.permute(1, 0, 2).flatten(1)
    return (key_position_BK[:, None, :] <= position_RBL[rank][:, :, None])[:, None]


def positions(offset: Tensor, length: Tensor, ranks: int, rank: int) -> Tensor:
    """Return the position in its sequence of the token at `offset` of `rank`'s `length`: chunks number `rank` and 2 *
    ranks - 1 - rank of 2 * ranks."""
    chunk = length // 2
    return offset + torch.where(offset >= chunk, (2 * ranks - 2 - rank) * chunk, rank * chunk)


_plans: Any = WeakTensorKeyDictionary()  # all layers of a micro-batch share one tensor of boundaries


def _plan(cu_seqlens: Tensor, ranks: int, rank: int) -> PackedPlan:
    plan = _plans.get(cu_seqlens)
    if plan is None:
        plan = _plans[cu_seqlens] = plan_packed(cu_seqlens.tolist(), ranks, rank, cu_seqlens.device)
    return plan  # type: ignore[no-any-return]


class PackedAttention(DotProductAttention):  # type: ignore[misc]
    """Causal scaled dot-product attention over packed sequences."""

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
        """Attend with query (T, H, D), key and value (T, G, D). Returns (T, H * D)."""
        if packed_seq_params is None or attention_bias is not None:
            raise NotImplementedError("packed attention takes packed sequences without a bias")
        group = parallel_state.get_context_parallel_group()
        ranks, rank = group.size(), group.rank()
        if ranks > 1:
            key, value = (gather_from_sequence_parallel_region(t, group=group) for t in (key, value))
        buckets, output_rows_T = _plan(packed_seq_params.cu_seqlens_q_padded, ranks, rank)
        padded = [self._attend(bucket, query, key, value) for bucket in buckets]
        return (torch.cat(padded) if len(padded) > 1 else padded[0]).index_select(0, output_rows_T)

    def _attend(self, bucket: Bucket, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
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
    """Rotate packed tokens t (T, heads, D) by freqs (longest, 1, 1, D)."""
    if multi_latent_attention or rotary_interleaved or freqs.shape[-1] != t.shape[-1]:
        raise NotImplementedError("packed rotary embedding: only the whole head in two halves")
    cos, sin = _rotation(cu_seqlens, freqs, mscale, cp_group, t.dtype)
    half = t.shape[-1] // 2
    turned = torch.cat((-t[..., half:], t[..., :half]), dim=-1)
    return torch.addcmul(t * cos, turned, sin)


_rotations: Any = WeakTensorKeyDictionary()  # cos and sin (T, 1, D) of a micro-batch


def _rotation(
    cu_seqlens: Tensor, freqs: Tensor, mscale: float, cp_group: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
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


class GroupedLinear(torch.autograd.Function):
    """y_TO[t] = W[e(t)] x_TI[t]: x sorted by expert, `counts` tokens each (E ints that sum to T); E weights (O, I)."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, counts: list[int], *weights_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, *weights_OI)
        ctx.counts = counts
        y_TO = x_TI.new_empty(x_TI.shape[0], weights_OI[0].shape[0])
        for x, y, weight in zip(torch.split(x_TI, counts), torch.split(y_TO, counts), weights_OI, strict=True):
            torch.mm(x, weight.t(), out=y)
        return y_TO

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, *weights_OI = ctx.saved_tensors
        grad_TO = grad_TO.contiguous()
        grad_TI = torch.empty_like(x_TI)
        grads_OI = []
        tokens = (torch.split(tensor, ctx.counts) for tensor in (x_TI, grad_TI, grad_TO))
        for x, grad_x, grad_y, weight in zip(*tokens, weights_OI, strict=True):
            torch.mm(grad_y, weight, out=grad_x)
            grads_OI.append(grad_y.t() @ x)
        return grad_TI, None, *grads_OI


def grouped_linear(x_TI: Tensor, counts: list[int], weights_OI: list[Tensor]) -> Tensor:
    y_TO: Tensor = GroupedLinear.apply(x_TI, counts, *weights_OI)  # type: ignore[no-untyped-call]
    return y_TO


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Gated experts without biases; anything else is left to `SequentialMLP`."""

    def forward(self, tokens_TI: Tensor, tokens_per_expert: Tensor, probs_T: Tensor) -> tuple[Tensor, None]:
        """Return (outputs_TI, no bias) for tokens_TI sorted by expert, with their router weights probs_T."""
        config = self.config
        if not config.gated_linear_unit or config.add_bias_linear or config.moe_apply_probs_on_input:
            return super().forward(tokens_TI, tokens_per_expert, probs_T)  # type: ignore[no-any-return]
        counts = tokens_per_expert.tolist()
        both = grouped_linear(tokens_TI, counts, [e.linear_fc1.weight for e in self.local_experts])
        gate, up = both.chunk(2, dim=-1)
        hidden = (config.activation_func(gate) * up * probs_T[:, None]).to(tokens_TI.dtype)
        return grouped_linear(hidden, counts, [e.linear_fc2.weight for e in self.local_experts]), None


def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> tuple[Any, Any]:
    """Replace `LocalSpecProvider.grouped_mlp_modules`."""
    return GroupedExperts, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
