"""The policy trainer: one reinforcement-learning or supervised update with Megatron-core, under any layout.

Invariants: every rank calls the same methods with the same sequences; loss, gradients and statistics do not depend on
how sequences are spread over ranks and micro-batches (up to float32 rounding); returned values are equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specactor.config import Config
from specactor.cpu import megatron as cpu_platform
from specactor.device_memory import HostCopies
from specactor.errors import SpecActorError
from specactor.parallel.layout import Layout
from specactor.trainer import model, optimizer, packing
from specactor.trainer.drafter.top_k import TopKRecorder
from specactor.trainer.export import export_hf
from specactor.trainer.losses import token_weights
from specactor.trainer.microbatch import Item, MicroBatch, Shape, build, items_of
from specactor.trainer.objective import (
    PolicyObjective,
    Sums,
    constant_weight,
    cross_entropy,
    reduce_over_ranks,
    response_logprobs,
)
from specactor.trainer.packing import checked, split
from specactor.types import TrainSequence

cpu_platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

Objective = Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]


class TrainingDiverged(SpecActorError):  # noqa: N818
    """A loss or gradient that is not finite."""


@dataclass(frozen=True, kw_only=True)
class TrainStats:
    """Of one `PolicyTrainer.train_step`; equal on all ranks."""

    loss: float
    """Mean over the step's updates."""
    grad_norm: float
    """Global, before clipping; mean over the step's updates."""
    entropy: float
    """Mean per response token, nats, at the sampling temperature."""
    clip_fraction: float
    """Share of response tokens whose gradient was clipped."""
    logprob_gap_max: float
    logprob_gap_mean: float
    """|trainer - engine| of the sampled tokens before the step; nan without rollout log-probabilities."""
    kl: float
    """Mean per response token of the estimate of KL(policy || reference); 0 with algorithm.kl = off."""
    tokens: int
    """Response tokens learned from."""
    num_microbatches: int
    """Per rank, in all updates of the step."""
    learning_rate: float


class PolicyTrainer:
    """Megatron model, data parallelism and optimizer of this rank; needs `specactor.parallel.groups.init` before."""

    def __init__(self, config: Config, layout: Layout, model_dir: Path) -> None:
        """Load the policy from a Hugging Face folder. Collective."""
        self.config, self.layout = config, layout
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU
        self.policy = model.build(model_dir, dtype=config.model.dtype, train=config.train)
        self.chunks = optimizer.wrap(self.policy, config.train)
        self.optimizer = optimizer.make(self.chunks, self.policy, config.train, config.model.dtype)
        self._host_copies = HostCopies()
        self._shape = Shape(
            context=layout.context,
            context_rank=parallel_state.get_context_parallel_rank(),
            tensor=layout.tensor,
        )
        self._objective = PolicyObjective(config.algorithm, config.rollout.temperature)
        self._reference: list[Tensor] = []
        if config.algorithm.kl != "off":
            self.take_reference()

    def train_step(
        self, sequences: Sequence[TrainSequence], *, learning_rate: float, recorder: TopKRecorder | None = None
    ) -> TrainStats:
        """Learn from the sequences of one RL step; all ranks pass all of them. Collective.

        Makes ``train.updates_per_step`` optimizer updates, each on its share of the groups. Raises DataError for a
        sequence without prompt or an update without response tokens, TrainingDiverged when loss or gradient is not
        finite. A recorder sees the logits of all response tokens.
        """
        objective: Objective = self._objective if recorder is None else recorder.around(self._objective)
        updates = split(checked(sequences), self.config.train.updates_per_step)
        old = [self._logprobs(part) if len(updates) > 1 else None for part in updates]
        ref = [self._reference_logprobs(part) if self._reference else None for part in updates]
        sums, grad_norms, num_microbatches = [], [], 0
        for part, old_part, ref_part in zip(updates, old, ref, strict=True):
            lens = [s.num_learned for s in part]
            algorithm = self.config.algorithm
            weights = token_weights(lens, algorithm.aggregation, self.config.rollout.max_new_tokens)
            items = items_of(part, weights, old_part, ref_part)
            part_sums, grad_norm, count = self._update(items, objective, learning_rate)
            if recorder is not None:
                recorder.updated(part)
            sums.append(part_sums)
            grad_norms.append(grad_norm)
            num_microbatches += count
        total, grad_norm = reduce_over_ranks(sums, sum(grad_norms) / len(grad_norms), self.device)
        _check_finite(total.loss, grad_norm)
        gap_tokens = total.gap_tokens or math.nan
        return TrainStats(
            loss=total.loss / len(updates),
            grad_norm=grad_norm,
            entropy=total.entropy / total.tokens,
            clip_fraction=total.clipped / total.tokens,
            logprob_gap_max=total.gap_max if total.gap_tokens else math.nan,
            logprob_gap_mean=total.gap / gap_tokens,
            kl=total.kl / total.tokens,
            tokens=round(total.tokens),
            num_microbatches=num_microbatches,
            learning_rate=learning_rate,
        )

    def supervised_step(self, sequences: Sequence[TrainSequence], *, learning_rate: float) -> float:
        """One update on the cross entropy of the responses; returns the loss (see `specactor.trainer.objective`).

        The constant number of tokens per sequence is ``rollout.max_new_tokens``. Collective; raises as `train_step`.
        """
        weight = constant_weight(len(checked(sequences)), self.config.rollout.max_new_tokens)
        items = items_of(sequences, [weight] * len(sequences), None, None)
        sums, grad_norm, _ = self._update(items, cross_entropy, learning_rate)
        total, grad_norm = reduce_over_ranks([sums], grad_norm, self.device)
        _check_finite(total.loss, grad_norm)
        return total.loss

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[tuple[float, ...]]:
        """Log-probability of every response token at ``rollout.temperature``, on every rank. Collective."""
        return [tuple(part.tolist()) for part in self._logprobs(checked(sequences))]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `specactor.trainer.model.Policy.named_weights`. Collective."""
        return self.policy.named_weights()

    def export_hf(self, target: Path) -> None:
        """Write the policy as a Hugging Face folder, whole or not at all. Collective; raises CheckpointError."""
        source, dtype = self.policy.source_dir, self.config.model.dtype
        export_hf(self.named_weights(), target, source=source, dtype=dtype, device=self.device)

    def take_reference(self) -> None:
        """Make the weights of this moment the reference of the KL penalty (at first: those of `model_dir`)."""
        self._reference = [p.detach().to("cpu", copy=True) for p in self._parameters()]

    def reset_optimizer(self) -> None:
        """Forget Adam's moments and step count, as between supervised warm-up and reinforcement learning."""
        optimizer.reset(self.optimizer)

    def top_k_recorder(self, top_k: int) -> TopKRecorder:
        """A recorder of the policy's top-k log-probabilities, for `train_step`."""
        return TopKRecorder(
            top_k,
            temperature=self.config.rollout.temperature,
            vocab_size=int(self.policy.bridge.hf_config.vocab_size),
            device=self.device,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def offload(self) -> None:
        """Free a GPU's memory of gradients and optimizer while engines generate; nothing to do on a CPU."""
        optimizer.offload(self.chunks, self.optimizer, self.config.model.dtype, self._host_copies)

    def reload(self) -> None:
        """The reverse of `offload`, before the next update."""
        optimizer.reload(self.chunks, self.optimizer, self.config.model.dtype, self._host_copies)

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for chunk in self.policy.chunks for parameter in chunk.parameters())

    def _update(self, items: list[Item], objective: Objective, learning_rate: float) -> tuple[Sums, float, int]:
        """One optimizer update; (this rank's sums, global gradient norm, micro-batches)."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = Sums()

        def loss_of(batch: MicroBatch, logits_1TV: Tensor) -> Tensor:
            loss, values = objective(batch, logits_1TV)
            sums.add(values)
            return loss

        count = self._run(items, loss_of, forward_only=False)
        optimizer.set_learning_rate(self.optimizer, learning_rate, self.config.train.weight_decay)
        _, grad_norm, _ = self.optimizer.step()
        return sums, float(grad_norm), count

    def _run(self, items: list[Item], loss_of: Callable[[MicroBatch, Tensor], Tensor], *, forward_only: bool) -> int:
        """Megatron's schedule over this rank's micro-batches; returns their number. The last stage calls `loss_of`."""
        batches = [build([items[i] for i in plan], self._shape, self.device) for plan in self._plan(items)]

        def reduced(batch: MicroBatch, logits_1TV: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return loss_of(batch, logits_1TV), torch.zeros((), dtype=torch.int, device=self.device), {}

        def forward(batches: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)
            output = chunk(batch.tokens_1T, batch.positions_1T, None, packed_seq_params=batch.packed)
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
        return len(batches)

    def _plan(self, items: list[Item]) -> list[list[int]]:
        """This data-parallel rank's micro-batches, as indices into `items`."""
        multiple = self._shape.sequence_multiple
        lengths = [packing.padded_len(len(item.sequence.token_ids), multiple) for item in items]
        capacity = self.config.train.tokens_per_microbatch * self.layout.context
        stages = self.layout.pipeline if len(self.chunks) > 1 else 1
        plan = packing.balance(lengths, self.layout.data, capacity, multiple_of=stages)
        return plan[parallel_state.get_data_parallel_rank()]

    @torch.no_grad()
    def _logprobs(self, sequences: Sequence[TrainSequence]) -> list[Tensor]:
        """Per sequence the (response) log-probabilities, on the CPU, the same on every rank."""
        total = sum(s.response_len for s in sequences)
        found = torch.zeros(total, dtype=torch.float32)
        counts = parallel_state.get_tensor_model_parallel_rank() == 0

        def keep(batch: MicroBatch, logits_1TV: Tensor) -> Tensor:
            logprobs_R, _ = response_logprobs(batch, logits_1TV, self.config.rollout.temperature)
            if counts:
                found[batch.source_R] = logprobs_R.float().cpu()
            return logprobs_R.sum()

        self._run(items_of(sequences, [0.0] * len(sequences), None, None), keep, forward_only=True)
        everywhere = found.to(self.device)
        dist.all_reduce(everywhere)  # every token was found by one rank; the others add zero
        return list(torch.split(everywhere.cpu(), [s.response_len for s in sequences]))

    def _reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Tensor]:
        with self._reference_weights():
            return self._logprobs(sequences)

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """The reference's weights in place of the policy's, which come back bit for bit."""
        parameters = list(self._parameters())
        own = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            torch._foreach_copy_(parameters, self._reference)
            try:
                yield
            finally:
                torch._foreach_copy_(parameters, own)


_CPU = torch.device("cpu")


def _check_finite(loss: float, grad_norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise TrainingDiverged(
            f"train_step: got loss {loss} and gradient norm {grad_norm}, expected finite numbers. The weights are "
            "no longer usable: resume from the last checkpoint with a lower --train.learning-rate or --train.grad-clip."
        )
