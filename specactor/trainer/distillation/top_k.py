"""The policy's likeliest next tokens, from logits that the trainer computes anyway.

A `LikeliestRecorder` stands around an objective of the policy trainer: it sees every micro-batch's logits, keeps the
top k of the response tokens, and hands logits and loss on untouched. So the laws cost no forward pass, and they are
those of the policy that generated the responses (of the first update of a step, or of the pass before several).

Shape legend: T tokens, V entries of the vocabulary on this rank (rank r of the group holds ids r*V .. (r+1)*V - 1),
K likeliest tokens, R response positions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specactor.trainer.distillation.buffer import Law
from specactor.trainer.logprobs import CHUNK_ELEMENTS

if TYPE_CHECKING:
    from specactor.trainer.microbatch import MicroBatch
    from specactor.types import TrainSequence

    Objective = Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]


@torch.no_grad()
def vocab_parallel_likeliest(
    logits_TV: Tensor, k: int, *, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """(ids [T, K] int64, log-probabilities [T, K] float32) of softmax(logits / temperature), likeliest first.

    The same on every rank of `group`, whose ranks share the vocabulary (None: this rank holds all of it). K is `k`, or
    the vocabulary if that is smaller. Every rank sends k candidates per token, never its logits.
    """
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    ranks = 1 if group is None else dist.get_world_size(group)
    rows = max(1, CHUNK_ELEMENTS // max(1, logits_TV.shape[1]))
    parts = [_own(logits_TV[start : start + rows], k, temperature) for start in range(0, len(logits_TV), rows)]
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


def _own(logits_CV: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(scaled logits of the likeliest [C, K], their columns [C, K], logsumexp [C]) of this rank's shard."""
    scaled_CV = logits_CV.to(torch.float32) / temperature
    values, columns = scaled_CV.topk(min(k, scaled_CV.shape[1]), dim=1)
    return values, columns, scaled_CV.logsumexp(1)


class LikeliestRecorder:
    """Of one pass over sequences; every rank has one and calls it alike."""

    def __init__(self, k: int, *, temperature: float, group: dist.ProcessGroup | None) -> None:
        """Args: ranks that share the vocabulary; None: every rank holds all of it."""
        self._k, self._temperature, self._group = k, temperature, group
        self._counts = group is None or dist.get_rank(group) == 0  # the others have the same
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []

    def around(self, objective: Objective) -> Objective:
        """The objective, whose micro-batches are seen on their way."""

        def observed(batch: MicroBatch, logits_1TV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            self.observe(batch.source_R, logits_1TV.detach()[0].index_select(0, batch.rows_R))
            return objective(batch, logits_1TV)

        return observed

    def observe(self, source_R: Tensor, logits_RV: Tensor) -> None:
        """Args: numbers of the response tokens among all of the pass; logits that they are drawn from."""
        ids, logprobs = vocab_parallel_likeliest(logits_RV, self._k, temperature=self._temperature, group=self._group)
        if self._counts:
            self._found.append((source_R.cpu(), ids.int().cpu(), logprobs.cpu()))

    def collect(
        self, response_lens: Sequence[int], *, vocab_size: int, storage: str, device: torch.device, gather: bool = True
    ) -> list[Law]:
        """The laws of all sequences of the pass, in its order, on every rank; the recorder is empty again. Collective.

        Args: response tokens of each sequence; the whole vocabulary; float16 or float32; where the backend wants
        tensors; False where there is only this rank. Each token was seen by one rank (context and data parallelism),
        so what the ranks saw is added up.
        """
        total, width = sum(response_lens), min(self._k, vocab_size)
        ids = torch.zeros((total, width), dtype=torch.int32)
        logprobs = torch.zeros((total, width), dtype=torch.float32)
        for source_R, ids_RK, logprobs_RK in self._found:
            ids[source_R], logprobs[source_R] = ids_RK, logprobs_RK
        self._found = []
        if gather:
            ids, logprobs = ids.to(device), logprobs.to(device)
            dist.all_reduce(ids)
            dist.all_reduce(logprobs)
        kind = {"float16": np.float16, "float32": np.float32}[storage]
        sizes = list(response_lens)
        parts = zip(torch.split(ids.cpu(), sizes), torch.split(logprobs.cpu(), sizes), strict=True)
        return [Law(tokens=tokens.numpy(), logprobs=values.numpy().astype(kind)) for tokens, values in parts]


class LawRecorder:
    """The laws of one RL step's sequences, each from the update that learned from it. Every rank calls it alike."""

    def __init__(self, recorder: LikeliestRecorder, *, vocab_size: int, storage: str, device: torch.device) -> None:
        """Args: as of `LikeliestRecorder.collect`."""
        self._recorder, self._vocab_size, self._storage, self._device = recorder, vocab_size, storage, device
        self._laws: dict[int, Law] = {}

    def around(self, objective: Objective) -> Objective:
        """The objective of the updates to come."""
        return self._recorder.around(objective)

    def updated(self, sequences: Sequence[TrainSequence]) -> None:
        """An update has learned from these. Collective."""
        laws = self._recorder.collect(
            [s.response_len for s in sequences], vocab_size=self._vocab_size, storage=self._storage, device=self._device
        )
        self._laws |= {id(s): law for s, law in zip(sequences, laws, strict=True)}

    def take(self, sequences: Sequence[TrainSequence]) -> list[Law]:
        """Of all sequences of the step, the very objects that were learned from; the recorder is empty again."""
        laws, self._laws = [self._laws[id(s)] for s in sequences], {}
        return laws
