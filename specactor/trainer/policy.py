"""The policy trainer, under any layout. Returned values are equal on all ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specactor.config import Config
from specactor.config.train import gap_bound
from specactor.cpu import megatron as cpu_platform
from specactor.errors import SpecActorError
from specactor.parallel.layout import Layout
from specactor.trainer import model
from specactor.trainer.critic import Critic
from specactor.trainer.drafter.recorder import Recorder
from specactor.trainer.losses import token_weights
from specactor.trainer.microbatch import Estimate, MicroBatch, items_of
from specactor.trainer.model_files import export_hf
from specactor.trainer.model_trainer import ModelTrainer, Objective
from specactor.trainer.objective import (
    SLACK,
    PolicyObjective,
    Sums,
    cross_entropy,
    reduce_over_ranks,
    response_logprobs,
)
from specactor.trainer.packing import checked, split
from specactor.trainer.routing_replay import RoutingReplay
from specactor.types import TrainSequence

cpu_platform.install()

from megatron.core import parallel_state  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class TrainStats:
    """Statistics of one step; `specactor.metrics` explains those that are logged. nan: nothing to compare."""

    loss: float
    grad_norm: float
    entropy: float
    clip_fraction: float
    logprob_gap_max: float
    logprob_gap_mean: float
    logprob_gap_share: float
    effective_share: float
    cut_fraction: float
    kl: float
    tokens: int  # response tokens learned from
    scored: int  # tokens of the first update that were compared with what their noise picks
    unpicked: int  # those that it does not pick
    num_microbatches: int
    learning_rate: float
    mtp_loss: float | None = None  # None without an MTP layer
    critic: dict[str, float] | None = None  # metrics of a critic

    def numbers(self) -> dict[str, float]:
        """Return all that are not None; the critic's begin with ``critic_``."""
        own = asdict(self)
        of_critic = own.pop("critic") or {}
        found = {name: float(value) for name, value in own.items() if value is not None}
        return found | {f"critic_{n}": x for n, x in of_critic.items()}


class PolicyTrainer(ModelTrainer):
    """With algorithm.advantage = gae it has the critic, too."""

    def __init__(self, config: Config, layout: Layout, model_dir: Path, *, critic: Critic | None = None) -> None:
        """Load the policy from a Hugging Face folder. Collective."""
        self.policy = model.build(model_dir, dtype=config.model.dtype, train=config.train)
        super().__init__(config, layout, self.policy)
        self.critic = critic
        if config.train.routing_replay != "off":
            self._replay = RoutingReplay(self.policy)
        algorithm, temperature, dtype = config.algorithm, config.rollout.temperature, config.model.dtype
        gap = gap_bound(config.train.max_logprob_gap, dtype)
        self._objective = PolicyObjective(algorithm, temperature, gap, SLACK[dtype])
        self._reference: list[Tensor] = []
        if config.algorithm.kl_coef:
            self.take_reference()

    @property
    def routes_freely(self) -> bool:
        """Return whether tokens may take other experts than in the engine."""
        return bool(self.policy.config.num_moe_experts) and self.config.train.routing_replay != "r3"

    def train_step(
        self, sequences: Sequence[TrainSequence], *, learning_rate: float, recorder: Recorder | None = None
    ) -> TrainStats:
        """Learn from one RL step, in ``train.updates_per_step`` updates. Collective: all ranks pass all sequences, one
        the tokens. Raises DataError for an update without response tokens, SpecActorError for a loss or
        gradient that is not finite."""
        if self._replay is not None:
            self._replay.check(sequences)
        updates = [self._own(part) for part in split(checked(sequences), self.config.train.updates_per_step)]
        objective: Objective = self._objective
        if recorder is not None:
            objective = recorder.around(objective, [sequence for part in updates for sequence in part])
        none: list[Sequence[Estimate]] = [()] * len(updates)
        estimates = self.critic.estimates(updates) if self.critic is not None else none
        old = [self._logprobs(part) if len(updates) > 1 else None for part in updates]
        ref = self._reference_logprobs(updates)
        sums, grad_norms, num_microbatches, learned = [], [], 0, []
        for part, old_part, ref_part, estimated in zip(updates, old, ref, estimates, strict=True):
            aggregation, longest = self.config.algorithm.aggregation, self.config.rollout.max_new_tokens
            weights = token_weights(
                [s.num_learned for s in part], aggregation, longest, is_branch=[s.is_branch for s in part]
            )
            items = items_of(part, weights, old_part, ref_part, estimated)
            if part is not updates[0]:
                items = [replace(item, is_compared=False) for item in items]
            if self.critic is not None:
                learned.append(self.critic.learn(items))
            watch = recorder.begin(part) if recorder is not None else nullcontext
            part_sums, grad_norm, count = self._update(items, objective, learning_rate, watch)
            if recorder is not None:
                recorder.updated(part)
            sums.append(part_sums)
            grad_norms.append(grad_norm)
            num_microbatches += count
        total, grad_norm = reduce_over_ranks(sums, sum(grad_norms) / len(grad_norms), self.device)
        _check_finite(total.loss, grad_norm)
        of_critic = self.critic.stats(estimates, learned) if self.critic is not None else None
        if of_critic is not None:
            _check_finite(of_critic["loss"], of_critic["grad_norm"])
        return TrainStats(
            grad_norm=grad_norm,
            num_microbatches=num_microbatches,
            learning_rate=learning_rate,
            critic=of_critic,
            **_means(total, len(updates)),
        )

    def supervised_step(self, sequences: Sequence[TrainSequence], *, learning_rate: float) -> float:
        """Make one update on cross entropy; return the loss. Collective; raises as `train_step`."""
        # The number of tokens is a constant, since a mean over them would reward short responses: of two ways to
        # answer, the one with fewer tokens would get the larger gradient per token.
        weight = 1 / (len(checked(sequences)) * self.config.rollout.max_new_tokens)
        items = items_of(sequences, [weight] * len(sequences), None, None)
        sums, grad_norm, _ = self._update(items, cross_entropy, learning_rate)
        total, grad_norm = reduce_over_ranks([sums], grad_norm, self.device)
        _check_finite(total.loss, grad_norm)
        return total.loss

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[tuple[float, ...]]:
        """Return each response token's log-probability at ``rollout.temperature``, on every rank. Collective."""
        return [tuple(part.tolist()) for part in self._logprobs(checked(sequences))]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.policy.named_weights()

    def export_hf(self, target: Path) -> None:
        """Write a Hugging Face folder; see `model_files.export_hf`."""
        source, dtype = self.policy.source_dir, self.config.model.dtype
        export_hf(self.named_weights(), target, source=source, dtype=dtype)

    def take_reference(self) -> None:
        """Make the present weights the KL penalty's reference."""
        self._reference = [p.detach().to("cpu", copy=True) for p in self._parameters()]

    def recorder(
        self,
        top_k: int,
        *,
        layers: Sequence[int] = (),
        max_tokens: int = sys.maxsize,
        max_example_tokens: int = sys.maxsize,
    ) -> Recorder:
        """Return a recorder of the top-k and of these layers' outputs (-1: the embedding) for a buffer of so many
        tokens."""
        return Recorder(
            top_k,
            temperature=self.config.rollout.temperature,
            vocab_size=int(self.policy.bridge.hf_config.vocab_size),
            device=self.device,
            group=parallel_state.get_tensor_model_parallel_group(),
            modules=[[*self.policy.modules_of(layer)] for layer in layers],
            hidden_size=self.policy.config.hidden_size,
            max_tokens=max_tokens,
            max_example_tokens=max_example_tokens,
            parts=self.layout.tensor if self.policy.config.sequence_parallel else 1,
        )

    def offload(self) -> None:
        super().offload()
        if self.critic is not None:
            self.critic.offload()

    def reload(self) -> None:
        super().reload()
        if self.critic is not None:
            self.critic.reload()

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for chunk in self.policy.chunks for parameter in chunk.parameters())

    def _logprobs(self, sequences: Sequence[TrainSequence]) -> list[Tensor]:
        def logprobs_of(batch: MicroBatch, logits_1TV: Tensor) -> Tensor:
            return response_logprobs(batch, logits_1TV, self.config.rollout.temperature)[0]

        return self._per_token(sequences, logprobs_of)

    def _reference_logprobs(self, updates: Sequence[Sequence[TrainSequence]]) -> Sequence[list[Tensor] | None]:
        if not self._reference:
            return [None] * len(updates)
        with self._reference_weights():  # once for all updates: the weights come from the host
            # Which experts the policy took says nothing of those that the reference takes.
            return [self._logprobs([replace(s, routed_experts=b"") for s in part]) for part in updates]

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Swap in the reference's weights; the policy's come back bit for bit."""
        parameters: list[Any] = list(self._parameters())
        # Gradients, in float32, are zeroed before an update: their place takes no further memory of the device.
        own = [parameter.main_grad for parameter in parameters]
        with torch.no_grad():
            torch._foreach_copy_(own, parameters)
            torch._foreach_copy_(parameters, self._reference)
            try:
                yield
            finally:
                torch._foreach_copy_(parameters, own)


def _means(total: Sums, num_updates: int) -> dict[str, Any]:
    share = total.weight**2 / (total.weight_squared * total.weighed) if total.weight_squared else 0.0
    return {
        "loss": total.loss / num_updates,
        "entropy": total.entropy / total.tokens,
        "clip_fraction": total.clipped / total.tokens,
        "logprob_gap_max": total.gap_max if total.gap_tokens else math.nan,
        "logprob_gap_mean": total.gap / total.gap_tokens if total.gap_tokens else math.nan,
        "logprob_gap_share": total.gap_apart / total.gap_tokens if total.gap_tokens else math.nan,
        "effective_share": share if total.weighed else math.nan,
        "cut_fraction": total.cut / total.weighed if total.weighed else math.nan,
        "kl": total.kl / total.tokens,
        "tokens": round(total.tokens),
        "scored": round(total.scored),
        "unpicked": round(total.unpicked),
        "mtp_loss": total.mtp_loss / total.mtp_tokens if total.mtp_tokens else None,
    }


def _check_finite(loss: float, grad_norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise SpecActorError(
            f"train_step: got loss {loss} and gradient norm {grad_norm}, expected finite numbers. The weights are "
            "no longer usable: resume from the last checkpoint with a lower --train.learning-rate or --train.grad-clip."
        )
