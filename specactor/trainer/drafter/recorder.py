"""What a draft model learns from, taken out of the policy's own update: the top-k log-probabilities, and for an EAGLE-3
head hidden states.

Shapes: T positions of a micro-batch on this rank, R response positions, K top-k, S tokens whose states are kept, H
hidden, F numbers of all layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specactor.trainer.drafter.buffer import TopK
from specactor.trainer.logprobs import vocab_parallel_top_k

if TYPE_CHECKING:
    from specactor.trainer.microbatch import MicroBatch
    from specactor.trainer.model_trainer import Objective, Watch
    from specactor.types import TrainSequence

SURELY_NOT = -60.0
"""Log-probability of what is not there: finite, since 0 times -inf is not 0."""
MAX_BYTES = 256 * 2**20
"""Of the states of one step, on every rank's host."""
STATES = torch.bfloat16
"""Three digits suffice a head, in half of the memory."""


class _Rows:
    """Where the first tokens that are kept of each sequence lie among all that are kept."""

    def __init__(self, lengths: Sequence[int], kept: Sequence[int]) -> None:
        self.kept, self.num = list(kept), sum(kept)
        self._starts = torch.tensor([*accumulate(lengths, initial=0)])
        self._rows = torch.tensor([*accumulate(kept, initial=0)])
        self._kept = torch.tensor([*kept, 0])

    def of(self, numbers: Tensor) -> Tensor:
        """Return the rows of tokens by their numbers in the update; -1: not kept."""
        sequence = torch.searchsorted(self._starts[1:], numbers, right=True)
        place = numbers - self._starts[sequence]
        return (self._rows[sequence] + place).masked_fill((place < 0) | (place >= self._kept[sequence]), -1)


class Recorder:
    """Keeps the top-k and states of sequences that the buffer can hold from the update that learns from them. Every
    rank calls it alike."""

    def __init__(
        self,
        k: int,
        *,
        temperature: float,
        vocab_size: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        modules: Sequence[Sequence[Any]] = (),
        hidden_size: int = 0,
        max_tokens: int = sys.maxsize,
        max_example_tokens: int = sys.maxsize,
        parts: int = 1,
    ) -> None:
        """`vocab_size` is of all ranks of `group` (None: this one holds all).

        Args:
            modules: per layer whose states are kept, those of it on this rank.
            max_tokens: that the buffer holds.
            max_example_tokens: of a longer sequence it holds so many, the first.
            parts: how many ranks of `group` divide positions.
        """
        self._k, self._temperature, self._group = k, temperature, group
        self._vocab_size, self._device = vocab_size, device
        self._tensor_rank = 0 if group is None else dist.get_rank(group)
        self._micro_batches: list[tuple[Tensor, Tensor, Tensor]] = []
        self._known: list[tuple[TopK | None, Tensor | None]] = []
        self._hidden, self._parts = hidden_size, parts
        self._num_features = len(modules) * hidden_size
        self._longest = min(max_example_tokens, max_tokens)
        self.max_tokens = min(max_tokens, MAX_BYTES // max(1, self._num_features * STATES.itemsize))
        """That are kept of one step."""
        self._choice: Iterator[int | None] = iter(())
        self._chosen: list[int | None] = []
        """Tokens that are kept of each sequence of the update; None: it was not chosen."""
        self._tokens: _Rows
        self._responses: _Rows
        self._states_SF: Tensor
        self._rows_T: Tensor | None = None
        """Of the micro-batch in its forward pass; -1: not kept."""
        for block, of_layer in enumerate(modules):
            for module in of_layer:
                module.register_forward_hook(partial(self._keep, block))

    def around(self, objective: Objective, sequences: Sequence[TrainSequence]) -> Objective:
        """Choose those of a step, in the order of its updates, that are kept. Return the objective, which then records
        its micro-batches."""
        self._choice = iter(self._choose(sequences))

        def observed(batch: MicroBatch, logits_1TV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            rows_R = self._responses.of(batch.source_R)
            kept = (rows_R >= 0).nonzero()[:, 0]
            if not len(kept):  # alike on the ranks of `group`
                return objective(batch, logits_1TV)
            logits_RV = logits_1TV.detach()[0].index_select(0, batch.rows_R)
            ids, logprobs = vocab_parallel_top_k(logits_RV, self._k, temperature=self._temperature, group=self._group)
            if self._tensor_rank == 0:  # the others have the same
                if len(kept) < len(rows_R):
                    on_device = kept.to(ids.device, non_blocking=True)
                    ids, logprobs = ids.index_select(0, on_device), logprobs.index_select(0, on_device)
                self._micro_batches.append((rows_R[kept], ids.int(), logprobs))
            return objective(batch, logits_1TV)

        return observed

    def _choose(self, sequences: Sequence[TrainSequence]) -> list[int | None]:
        """Return how many tokens of each are kept: of long responses first, which rollouts wait for. Without states
        none is left out that the buffer would keep."""
        numbers = range(len(sequences))
        # as the buffer cuts them
        lengths = [min(len(s.token_ids), self._longest) if s.prompt_len < self._longest else 0 for s in sequences]
        if self._num_features:
            order = sorted(numbers, key=lambda i: (-sequences[i].response_len, i))
        else:  # the reverse of that in which they leave the buffer
            order = sorted(numbers, key=lambda i: (sequences[i].prompt_len - lengths[i], -i))
        chosen: list[int | None] = [None] * len(sequences)
        left = self.max_tokens
        for i in order:
            if sequences[i].response_len and lengths[i] <= left:
                chosen[i] = lengths[i]
                left -= lengths[i]
        return chosen

    def begin(self, sequences: Sequence[TrainSequence]) -> Watch:
        """Begin with the step's next update, of these sequences. Return what encloses its forward passes."""
        self._chosen = [*islice(self._choice, len(sequences))]
        of_responses = [max(0, (n or 0) - s.prompt_len) for n, s in zip(self._chosen, sequences, strict=True)]
        self._responses = _Rows([sequence.response_len for sequence in sequences], of_responses)
        if not self._num_features:
            return nullcontext
        self._tokens = _Rows([len(sequence.token_ids) for sequence in sequences], [kept or 0 for kept in self._chosen])
        self._states_SF = torch.zeros((self._tokens.num, self._num_features), dtype=STATES)
        return self._forward

    @contextmanager
    def _forward(self, batch: MicroBatch) -> Iterator[None]:
        """Enclose a chunk's forward pass; a repeated one is not kept."""
        rows_T = self._tokens.of(batch.text_T)
        if self._parts > 1:
            rows_T = rows_T.chunk(self._parts)[self._tensor_rank]
        elif self._tensor_rank:  # the first one has the same
            rows_T = rows_T.new_full(rows_T.shape, -1)
        self._rows_T = rows_T
        try:
            yield
        finally:
            self._rows_T = None

    def _keep(self, block: int, _: Any, __: Any, output: Any) -> None:
        if self._rows_T is None:
            return
        hidden_T1H: Tensor = output[0] if isinstance(output, tuple) else output
        kept = (self._rows_T >= 0).nonzero()[:, 0]
        states = hidden_T1H.detach()[:, 0].index_select(0, kept.to(hidden_T1H.device)).to("cpu", STATES)
        self._states_SF[self._rows_T[kept], block * self._hidden : (block + 1) * self._hidden] = states

    def updated(self, sequences: Sequence[TrainSequence]) -> None:
        """Keep what was recorded of an update's sequences. Collective."""
        states: Sequence[Tensor | None] = [None] * len(sequences)
        if self._num_features:
            states = torch.split(self._everywhere(self._states_SF), self._tokens.kept)
            del self._states_SF
        known = zip(self._top_k(sequences), states, strict=True)
        self._known += [(None, None) if n is None else of for n, of in zip(self._chosen, known, strict=True)]

    def _everywhere(self, values: Tensor) -> Tensor:
        """Return what all ranks have together: each number was seen by one, the others add zero. Collective."""
        if not dist.is_initialized() or not len(values):
            return values
        values = values.to(self._device)
        dist.all_reduce(values)
        return values.cpu()

    def _top_k(self, sequences: Sequence[TrainSequence]) -> Iterator[TopK]:
        sizes, width = self._responses.kept, min(self._k, self._vocab_size)
        ids = torch.zeros((sum(sizes), width), dtype=torch.int32)
        logprobs = torch.zeros((sum(sizes), width), dtype=torch.float32)
        for rows, ids_RK, logprobs_RK in self._micro_batches:
            ids[rows], logprobs[rows] = ids_RK.cpu(), logprobs_RK.cpu()  # once all are computed
        self._micro_batches = []
        ids, logprobs = self._everywhere(ids), self._everywhere(logprobs)
        kept = [(s, n) for s, n in zip(sequences, sizes, strict=True) if n]
        said = ~torch.tensor([own for s, n in kept for own in s.loss_mask[:n] or (True,) * n], dtype=torch.bool)
        if said.any():  # by an environment: no policy has a distribution there, and what is said is certain
            tokens = torch.tensor([token for s, n in kept for token in s.token_ids[s.prompt_len : s.prompt_len + n]])
            ids[said, 0] = tokens[said].to(ids)
            logprobs[said, 1:] = SURELY_NOT
        for tokens, values in zip(torch.split(ids, sizes), torch.split(logprobs, sizes), strict=True):
            # Copies: one example that is kept would keep all of the update's.
            yield TopK(tokens=tokens.numpy().copy(), logprobs=values.numpy().astype(np.float16))

    def take(self) -> list[tuple[TopK | None, Tensor | None]]:
        """Return and forget (the top-k, the states [L, F]) of each sequence, as they came: of the tokens that the
        buffer keeps; None: it keeps none."""
        known, self._known = self._known, []
        return known
