"""Hidden states of the policy, taken out of its own update for an EAGLE-3 head to learn from.

Shapes: T positions of a micro-batch on this rank, S tokens that are kept, H hidden, F numbers of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from specactor.trainer.microbatch import MicroBatch
    from specactor.types import TrainSequence

MAX_BYTES = 256 * 2**20
"""Of the states of one step, on every rank's host."""
STATES = torch.bfloat16
"""Three digits suffice a head, in half of the memory."""


class StateRecorder:
    """Every rank calls it alike."""

    def __init__(
        self,
        layers: Sequence[int],
        modules_of: Callable[[int], Iterator[Any]],
        *,
        hidden_size: int,
        max_tokens: int,
        device: torch.device,
        part: tuple[int, int],
    ) -> None:
        """`modules_of` returns a layer's Megatron modules; `part` is (tensor-parallel rank, how many divide
        positions)."""
        self._hidden, self._device = hidden_size, device
        self._num_features = len(layers) * hidden_size
        self._max_tokens = min(max_tokens, MAX_BYTES // (self._num_features * STATES.itemsize))
        self._tensor_rank, self._parts = part
        self._chosen: list[int] = []
        self._row_of: Tensor
        self._states_SF: Tensor
        self._rows_T: Tensor | None = None
        """Of the micro-batch in its forward pass; -1: not kept."""
        self._known: dict[int, Tensor] = {}
        for block, layer in enumerate(layers):
            for module in modules_of(layer):
                module.register_forward_hook(partial(self._keep, block))

    def begin(self, sequences: Sequence[TrainSequence]) -> None:
        """Choose those of an update whose states are kept: long responses first, which rollouts wait for."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        self._chosen, left = [], self._max_tokens
        for i in sorted(range(len(sequences)), key=lambda i: (-sequences[i].response_len, i)):
            if sequences[i].response_len and lengths[i] <= left:
                self._chosen.append(i)
                left -= lengths[i]
        starts = list(accumulate(lengths, initial=0))
        self._row_of = torch.full((starts[-1],), -1)
        end = 0
        for i in self._chosen:
            self._row_of[starts[i] : starts[i + 1]] = torch.arange(end, end + lengths[i])
            end += lengths[i]
        self._states_SF = torch.zeros((end, self._num_features), dtype=STATES)

    @contextmanager
    def forward(self, batch: MicroBatch) -> Iterator[None]:
        """Enclose a chunk's forward pass; a repeated one is not kept."""
        rows_T = self._row_of[batch.text_T.clamp(min=0)].masked_fill(batch.text_T < 0, -1)
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

    def end(self, sequences: Sequence[TrainSequence]) -> None:
        """Give all ranks all states. Collective."""
        states_SF = self._states_SF
        if dist.is_initialized() and len(states_SF):  # each number was seen by one rank, others add zero
            everywhere = states_SF.to(self._device)
            dist.all_reduce(everywhere)
            states_SF = everywhere.cpu()
        sizes = [len(sequences[i].token_ids) for i in self._chosen]
        for i, states in zip(self._chosen, torch.split(states_SF, sizes), strict=True):
            self._known[id(sequences[i])] = states
        del self._states_SF, self._row_of

    def take(self, sequences: Sequence[TrainSequence]) -> list[Tensor | None]:
        """Return and forget each sequence's states [L, F]; None: not kept."""
        known, self._known = self._known, {}
        return [known.get(id(sequence)) for sequence in sequences]
