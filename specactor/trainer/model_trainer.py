"""A Megatron model with its optimizer, run over packed micro-batches: the base of policy and critic.

Invariants: every rank calls the same methods with the same sequences; results do not depend on how these are spread (up
to float32 rounding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specactor import samples
from specactor.config import Config
from specactor.cpu import megatron as cpu_platform
from specactor.device_memory import HostCopies
from specactor.parallel.layout import Layout
from specactor.trainer import model, optimizer, packing
from specactor.trainer.microbatch import Item, MicroBatch, Shape, build, items_of
from specactor.trainer.mtp import MtpTraining
from specactor.trainer.objective import Sums
from specactor.trainer.routing_replay import RoutingReplay
from specactor.trainer.shards import share
from specactor.types import TrainSequence

cpu_platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

Objective = Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, output of the model) -> (loss, what is added to `Sums`)."""
Watch = Callable[[MicroBatch], AbstractContextManager[object]]
"""Encloses the forward pass of a chunk over a micro-batch."""


class ModelTrainer:
    def __init__(self, config: Config, layout: Layout, built: model.Policy) -> None:
        self.config, self.layout = config, layout
        gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        self.chunks = optimizer.wrap(built)
        # Megatron's wrapper would copy all logits, whose type is changed for rows that are learned from alone.
        self._wrapper = {"fp32_output": False} if config.model.dtype == "bfloat16" else {}
        self.shared_parameters = share(self.chunks)
        self.optimizer = optimizer.make(self.chunks, built, config.train, config.model.dtype)
        self._host_copies = HostCopies()
        self._replay: RoutingReplay | None = None
        self._mtp = MtpTraining.of(built, temperature=config.rollout.temperature)
        self._shape = Shape(
            context=layout.context,
            context_rank=parallel_state.get_context_parallel_rank(),
            tensor=layout.tensor,
        )

    def reset_optimizer(self) -> None:
        optimizer.reset(self.optimizer)

    def offload(self) -> None:
        """Free a GPU's memory while engines generate."""
        optimizer.offload(self.chunks, self.optimizer, self.config.model.dtype, self._host_copies)

    def reload(self) -> None:
        optimizer.reload(self.chunks, self.optimizer, self.config.model.dtype, self._host_copies)

    def _update(
        self, items: list[Item], objective: Objective, learning_rate: float, watch: Watch = nullcontext
    ) -> tuple[Sums, float, int]:
        """Return (this rank's sums, global gradient norm, micro-batches) of one update."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        found: list[dict[str, Tensor]] = []

        def loss_of(batch: MicroBatch, output_1TV: Tensor) -> Tensor:
            loss, values = objective(batch, output_1TV)
            found.append(values)
            if self._mtp is not None:
                of_layer, values = self._mtp.loss(batch)
                found.append(values)
                loss = loss + of_layer
            return loss

        count = self._run(items, loss_of, forward_only=False, watch=watch)
        sums = Sums()
        for values in found:  # not before: the host would wait for the device in every micro-batch
            sums.add(values)
        optimizer.set_rates(self.optimizer, learning_rate, self.config.train)
        # Parameters are written where engines of this host read them.
        return sums, optimizer.step(self.optimizer, self.config.train), count

    def _run(
        self,
        items: list[Item],
        loss_of: Callable[[MicroBatch, Tensor], Tensor],
        *,
        forward_only: bool,
        watch: Watch = nullcontext,
    ) -> int:
        """Return the number of micro-batches. The last stage calls `loss_of`."""
        plan = self._plan([item.sequence for item in items])
        batches = [build([items[i] for i in part], self._shape, self.device) for part in plan]

        def reduced(batch: MicroBatch, output_1TV: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return loss_of(batch, output_1TV), torch.zeros((), dtype=torch.int, device=self.device), {}

        def forward(batches: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)
            replayed = self._replay.forward(batch.experts_TX) if self._replay is not None else nullcontext()
            with replayed, watch(batch):
                output = chunk(
                    *(batch.tokens_1T, batch.positions_1T, None),
                    packed_seq_params=batch.packed,
                    **self._wrapper,
                )
            return output, partial(reduced, batch)

        iterators = [iter(batches) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=batches[0].tokens_1T.shape[1],
            micro_batch_size=1,
            forward_only=forward_only,
        )
        if self._replay is not None:
            self._replay.forget()
        return len(batches)

    def _own(self, sequences: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
        """Fetch the tokens that this rank packs. Collective."""
        return samples.fetch(sequences, chain(*self._plan(sequences)), samples.OF_SEQUENCE)

    def _plan(self, sequences: Sequence[TrainSequence]) -> list[list[int]]:
        """Return this rank's micro-batches, as indices into `sequences`."""
        multiple = self._shape.sequence_multiple
        lengths = [packing.padded_len(len(sequence.token_ids), multiple) for sequence in sequences]
        capacity = self.config.train.tokens_per_microbatch * self.layout.context
        stages = self.layout.pipeline if len(self.chunks) > 1 else 1
        plan = packing.balance(lengths, self.layout.data, capacity, multiple_of=stages)
        return plan[parallel_state.get_data_parallel_rank()]

    @torch.no_grad()
    def _per_token(
        self, sequences: Sequence[TrainSequence], values_of: Callable[[MicroBatch, Tensor], Tensor]
    ) -> list[Tensor]:
        """Return `values_of` each sequence's response tokens, (R), on every rank's CPU."""
        found = torch.zeros(sum(s.response_len for s in sequences), dtype=torch.float32)
        parts: list[tuple[Tensor, Tensor]] = []

        def keep(batch: MicroBatch, output_1TV: Tensor) -> Tensor:
            values_R = values_of(batch, output_1TV)
            parts.append((batch.source_R, values_R.float()))
            return values_R.sum()

        self._run(items_of(sequences, [0.0] * len(sequences), None, None), keep, forward_only=True)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            for source_R, values_R in parts:  # copied when all are computed, as `_update` has it
                found[source_R] = values_R.cpu()
        everywhere = found.to(self.device)
        dist.all_reduce(everywhere)  # every token was found by one rank; the others add zero
        return list(torch.split(everywhere.cpu(), [s.response_len for s in sequences]))
