"""One packed micro-batch as tensors: sequences, one after the other, each padded to what the layout divides.

Shapes: T packed tokens on this rank (with context parallelism chunks r and 2C-1-r of each sequence's 2C), R of them
whose next token is learned from.

Invariant: over a context-parallel group each such token is in exactly one R.
"""

# ruff: noqa: N815 - tensor fields carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from specactor.samples import experts_of
from specactor.trainer.packing import padded_len
from specactor.types import TrainSequence


@dataclass(frozen=True)
class Shape:
    context: int
    context_rank: int
    tensor: int

    @property
    def sequence_multiple(self) -> int:
        """Divides every sequence's padded length."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def total_multiple(self) -> int:
        """Divides the micro-batch's length, for sequence parallelism."""
        return max(self.sequence_multiple, self.context * self.tensor * (2 if self.context > 1 else 1))


@dataclass(frozen=True, eq=False)
class Estimate:
    """A critic's figures, (response_len) each."""

    values: Tensor
    """Expected reward before the token."""
    advantages: Tensor
    returns: Tensor
    """Targets of the values."""


@dataclass(frozen=True)
class Item:
    """A sequence; `first` numbers its first response token in the update."""

    sequence: TrainSequence
    first: int
    weight: float
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    estimate: Estimate | None = None
    first_token: int = 0
    """Number of its first token in the update."""
    is_compared: bool = True
    """Whether tokens are compared with their noise: not once an update has changed the weights."""


@dataclass(frozen=True)
class MicroBatch:
    tokens_1T: Tensor
    positions_1T: Tensor
    packed: PackedSeqParams
    text_T: Tensor
    """Number of each position's token in the update, on the CPU; -1 in padding."""
    rows_R: Tensor
    """Which of the T positions predict a response token."""
    targets_R: Tensor
    sequence_R: Tensor
    """Number of the sequence in this micro-batch."""
    source_R: Tensor
    """Number of the response token in the update."""
    weights_R: Tensor
    advantages_R: Tensor
    rollout_R: Tensor | None
    stale_R: Tensor | None
    """1 where an older policy sampled the token; None: nowhere."""
    old_R: Tensor | None
    ref_R: Tensor | None
    seeds_R: Tensor | None
    """Of the sampling noise, on the CPU; -1 where the token is not compared; None: nowhere."""
    values_R: Tensor | None
    returns_R: Tensor | None
    experts_TX: Tensor | None
    """int16: the engine's experts, layers times experts per token; -1 in padding, and for the last token of a sequence,
    whose output nobody reads. None: routers are free."""
    num_sequences: int


def items_of(
    sequences: Sequence[TrainSequence],
    weights: list[float],
    old: list[Tensor] | None,
    ref: list[Tensor] | None,
    estimates: Sequence[Estimate] = (),
) -> list[Item]:
    """`old` and `ref` are log-probabilities per sequence (response_len)."""
    firsts = accumulate((s.response_len for s in sequences), initial=0)
    first_tokens = accumulate((len(s.token_ids) for s in sequences), initial=0)
    none = [None] * len(sequences)
    return [
        Item(*of_sequence)
        for of_sequence in zip(
            *(sequences, firsts, weights, old or none, ref or none, estimates or none, first_tokens), strict=False
        )
    ]


def build(items: Sequence[Item], shape: Shape, device: torch.device) -> MicroBatch:
    """Pack `items`; without any, padding that takes part in every collective and learns nothing."""
    lengths = [len(item.sequence.token_ids) for item in items]
    padded = [padded_len(length, shape.sequence_multiple) for length in lengths] or [shape.total_multiple]
    padded[-1] += -sum(padded) % shape.total_multiple
    tokens, text = _tokens(items, padded)
    rows_T, positions_T = _local_rows(padded, shape)
    row, local_row, sequence, source, mine = _responses(items, padded, rows_T)

    def per_sequence(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)[sequence[mine]].to(device)

    def per_token(values: Sequence[Any]) -> Tensor | None:
        lens = [item.sequence.response_len for item in items]
        if not items or any(value is None or len(value) != n for value, n in zip(values, lens, strict=True)):
            return None
        return torch.cat([torch.from_numpy(np.array(value, np.float32)) for value in values])[mine].to(device)

    estimates = [item.estimate for item in items]
    advantages_R = per_token([estimate and estimate.advantages for estimate in estimates])
    return MicroBatch(
        tokens_1T=tokens[rows_T][None].to(device),
        positions_1T=positions_T[None].to(device),
        packed=_packed(padded, device),
        text_T=text[rows_T],
        rows_R=local_row[mine].to(device),
        targets_R=tokens[row[mine] + 1].to(device),
        sequence_R=sequence[mine].to(device),
        source_R=source[mine],
        weights_R=per_sequence([item.weight for item in items]),
        advantages_R=per_sequence([item.sequence.advantage for item in items])
        if advantages_R is None
        else advantages_R,
        rollout_R=per_token([item.sequence.rollout_logprobs for item in items]),
        stale_R=per_token([_stale(item.sequence) for item in items])
        if any(item.sequence.num_stale for item in items)
        else None,
        old_R=per_token([item.old_logprobs for item in items]),
        ref_R=per_token([item.ref_logprobs for item in items]),
        seeds_R=torch.cat([_seeds(item.sequence) for item in items])[mine]
        if any(item.sequence.num_seeded and item.is_compared for item in items)
        else None,
        values_R=per_token([estimate and estimate.values for estimate in estimates]),
        returns_R=per_token([estimate and estimate.returns for estimate in estimates]),
        experts_TX=_experts(items, padded, rows_T, device),
        num_sequences=len(items),
    )


def _experts(items: Sequence[Item], padded: list[int], rows_T: Tensor, device: torch.device) -> Tensor | None:
    table_TX = None
    for item, start in zip(items, accumulate(padded, initial=0), strict=False):
        if item.sequence.routed_experts:
            num_rows = len(item.sequence.token_ids) - 1
            ids = torch.from_numpy(experts_of(item.sequence.routed_experts).astype(np.int16)).view(num_rows, -1)
            if table_TX is None:
                table_TX = torch.full((sum(padded), ids.shape[1]), -1, dtype=torch.int16)
            table_TX[start : start + num_rows] = ids
    return None if table_TX is None else table_TX[rows_T].to(device)


def _stale(sequence: TrainSequence) -> Tensor:
    return (torch.arange(sequence.response_len) < sequence.num_stale).float()


def _seeds(sequence: TrainSequence) -> Tensor:
    within = torch.arange(sequence.response_len)
    return torch.where((within >= sequence.num_stale) & (within < sequence.num_seeded), sequence.seed, -1)


def _tokens(items: Sequence[Item], padded: list[int]) -> tuple[Tensor, Tensor]:
    """Return (all tokens, their numbers in the update); padding is 0, numbered -1."""
    tokens = torch.zeros(sum(padded), dtype=torch.int64)
    text = torch.full_like(tokens, -1)
    for item, start in zip(items, accumulate(padded, initial=0), strict=False):
        ids = item.sequence.token_ids
        tokens[start : start + len(ids)] = torch.from_numpy(np.array(ids, np.int64))
        text[start : start + len(ids)] = torch.arange(item.first_token, item.first_token + len(ids))
    return tokens, text


def _responses(items: Sequence[Item], padded: list[int], rows_T: Tensor) -> tuple[Tensor, ...]:
    """Return of every response token, in order, (row of the whole micro-batch that predicts it; the same among this
    rank's rows, or -1; sequence; number in the update), and which are learned from on this rank."""
    starts = accumulate(padded, initial=0)
    count = torch.tensor([item.sequence.response_len for item in items], dtype=torch.int64)
    begin = [start + item.sequence.prompt_len - 1 for item, start in zip(items, starts, strict=False)]
    first = [item.first for item in items]
    sequence = torch.arange(len(items)).repeat_interleave(count)
    within = torch.arange(len(sequence)) - (count.cumsum(0) - count)[sequence]
    row = torch.tensor(begin, dtype=torch.int64)[sequence] + within
    place = torch.full((sum(padded),), -1, dtype=torch.int64)
    place[rows_T] = torch.arange(len(rows_T))
    local_row = place[row]
    learned = [x for item in items for x in item.sequence.loss_mask or (True,) * item.sequence.response_len]
    mine = ((local_row >= 0) & torch.tensor(learned, dtype=torch.bool)).nonzero()[:, 0]
    return row, local_row, sequence, torch.tensor(first, dtype=torch.int64)[sequence] + within, mine


def _packed(padded: list[int], device: torch.device) -> PackedSeqParams:
    boundaries = torch.tensor([0, *accumulate(padded)], dtype=torch.int32, device=device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )


def _local_rows(padded: list[int], shape: Shape) -> tuple[Tensor, Tensor]:
    """Return (this rank's rows, their positions in their sequences)."""
    lengths_N = torch.tensor(padded)
    starts_T = (lengths_N.cumsum(0) - lengths_N).repeat_interleave(lengths_N)
    position_T = torch.arange(len(starts_T)) - starts_T
    rows_T = torch.arange(len(starts_T))
    if shape.context == 1:
        return rows_T, position_T
    chunk_T = position_T // (lengths_N // (2 * shape.context)).repeat_interleave(lengths_N)
    last = 2 * shape.context - 1
    mine = ((chunk_T == shape.context_rank) | (chunk_T == last - shape.context_rank)).nonzero()[:, 0]
    return rows_T[mine], position_T[mine]
