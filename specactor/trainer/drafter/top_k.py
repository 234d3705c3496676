"""The policy's top-k log-probabilities, recorded from logits that the trainer computes anyway.

Shapes as in `trainer.logprobs`; K top-k, R response positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specactor.trainer.drafter.buffer import TopK
from specactor.trainer.drafter.states import StateRecorder
from specactor.trainer.logprobs import CHUNK_ELEMENTS

if TYPE_CHECKING:
    from specactor.trainer.microbatch import MicroBatch
    from specactor.trainer.model_trainer import Objective, Watch
    from specactor.types import TrainSequence

SURELY_NOT = -60.0
"""Log-probability of what is not there: finite, since 0 times -inf is not 0."""


@torch.no_grad()
def vocab_parallel_top_k(
    logits_TV: Tensor, k: int, *, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return (ids [T, K] int64, log-probabilities [T, K] float32) of softmax(logits / temperature), best first, on
    every rank of `group` (None: this one holds all), K <= `k`."""
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    ranks = 1 if group is None else dist.get_world_size(group)
    rows = max(1, CHUNK_ELEMENTS // max(1, logits_TV.shape[1]))
    parts = [_of_shard(logits_TV[start : start + rows], k, temperature) for start in range(0, len(logits_TV), rows)]
    width = min(k, logits_TV.shape[1])
    if not parts:
        nothing = logits_TV.new_zeros((0, min(k, ranks * logits_TV.shape[1])), dtype=torch.float32)
        return nothing.long(), nothing
    values_TK, ids_TK, log_sum_T = (torch.cat(column) for column in zip(*parts, strict=True))
    if group is not None:
        ids_TK += dist.get_rank(group) * logits_TV.shape[1]
        mine = torch.cat([values_TK, log_sum_T[:, None]], dim=1)
        all_mine = [torch.empty_like(mine) for _ in range(ranks)]
        all_ids = [torch.empty_like(ids_TK) for _ in range(ranks)]
        dist.all_gather(all_mine, mine, group=group)
        dist.all_gather(all_ids, ids_TK, group=group)
        log_sum_T = torch.stack([part[:, -1] for part in all_mine]).logsumexp(0)
        values_TK = torch.cat([part[:, :width] for part in all_mine], dim=1)
        ids_TK = torch.cat(all_ids, dim=1)
        values_TK, best = values_TK.topk(min(k, values_TK.shape[1]), dim=1)
        ids_TK = ids_TK.gather(1, best)
    return ids_TK, values_TK - log_sum_T[:, None]


def _of_shard(logits_CV: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    scaled_CV = logits_CV.to(torch.float32) / temperature
    values, columns = scaled_CV.topk(min(k, scaled_CV.shape[1]), dim=1)
    return values, columns, scaled_CV.logsumexp(1)


class TopKRecorder:
    """Keeps each sequence's top-k from the update that learns from it. Every rank calls it alike."""

    def __init__(
        self,
        k: int,
        *,
        temperature: float,
        vocab_size: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        states: StateRecorder | None = None,
    ) -> None:
        """`vocab_size` is of all ranks of `group` (None: this one holds all)."""
        self.states = states
        self._k, self._temperature, self._group = k, temperature, group
        self._vocab_size, self._device = vocab_size, device
        self._counts = group is None or dist.get_rank(group) == 0  # the others have the same
        self._micro_batches: list[tuple[Tensor, Tensor, Tensor]] = []
        self._known: dict[int, TopK] = {}

    def around(self, objective: Objective) -> Objective:
        """Return the objective, which then records its micro-batches."""

        def observed(batch: MicroBatch, logits_1TV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logits_RV = logits_1TV.detach()[0].index_select(0, batch.rows_R)
            ids, logprobs = vocab_parallel_top_k(logits_RV, self._k, temperature=self._temperature, group=self._group)
            if self._counts:
                self._micro_batches.append((batch.source_R.cpu(), ids.int().cpu(), logprobs.cpu()))
            return objective(batch, logits_1TV)

        return observed

    def begin(self, sequences: Sequence[TrainSequence]) -> Watch:
        """Return what encloses the next update's forward passes."""
        if self.states is None:
            return nullcontext
        self.states.begin(sequences)
        return self.states.forward

    def updated(self, sequences: Sequence[TrainSequence]) -> None:
        """Keep the top-k of an update's responses. Collective."""
        sizes = [sequence.response_len for sequence in sequences]
        width = min(self._k, self._vocab_size)
        ids = torch.zeros((sum(sizes), width), dtype=torch.int32)
        logprobs = torch.zeros((sum(sizes), width), dtype=torch.float32)
        for source_R, ids_RK, logprobs_RK in self._micro_batches:
            ids[source_R], logprobs[source_R] = ids_RK, logprobs_RK
        self._micro_batches = []
        if self.states is not None:
            self.states.end(sequences)
        if dist.is_initialized():  # each token was seen by one rank (context and data parallelism), others add zero
            ids, logprobs = ids.to(self._device), logprobs.to(self._device)
            dist.all_reduce(ids)
            dist.all_reduce(logprobs)
        said = ~torch.cat([torch.tensor(s.loss_mask or (True,) * s.response_len).bool() for s in sequences])
        if said.any():  # by an environment: no policy has a distribution there, and what is said is certain
            tokens = torch.tensor([token for s in sequences for token in s.token_ids[s.prompt_len :]])
            ids[said, 0] = tokens[said].to(ids)
            logprobs[said, 1:] = SURELY_NOT
        parts = zip(torch.split(ids.cpu(), sizes), torch.split(logprobs.cpu(), sizes), strict=True)
        for sequence, (tokens, values) in zip(sequences, parts, strict=True):
            self._known[id(sequence)] = TopK(tokens=tokens.numpy(), logprobs=values.numpy().astype(np.float16))

    def take(self, sequences: Sequence[TrainSequence]) -> list[TopK]:
        """Return and forget the top-k of these very objects."""
        known, self._known = self._known, {}
        return [known[id(sequence)] for sequence in sequences]
