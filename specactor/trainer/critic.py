"""The critic of PPO (arXiv 1707.06347): a second model of the policy's shape and weights, with one output per token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specactor.config import Config
from specactor.parallel.layout import Layout
from specactor.trainer import model
from specactor.trainer.losses import gae, gae_of_turns, turn_numbers, value_loss_T, whitened
from specactor.trainer.microbatch import Estimate, Item, MicroBatch
from specactor.trainer.model_trainer import ModelTrainer
from specactor.trainer.objective import Sums, reduce_over_ranks
from specactor.types import TrainSequence


class Critic(ModelTrainer):
    """Predicts rewards. All methods are collective."""

    def __init__(self, config: Config, layout: Layout, model_dir: Path) -> None:
        """Load all but the output layer from a Hugging Face folder."""
        built = model.build(model_dir, dtype=config.model.dtype, train=config.train, scalar=True)
        super().__init__(config, layout, built)

    @classmethod
    def of(cls, config: Config, layout: Layout, model_dir: Path) -> Critic | None:
        return cls(config, layout, model_dir) if config.algorithm.advantage == "gae" else None

    def estimates(self, updates: Sequence[Sequence[TrainSequence]]) -> list[Sequence[Estimate]]:
        """Return each sequence's values, returns, and advantages whitened over the step, of sampled tokens alone."""
        settings = self.config.algorithm.critic
        sequences = [sequence for part in updates for sequence in part]
        masks = [torch.tensor([*s.loss_mask] or [True] * s.response_len, dtype=torch.bool) for s in sequences]
        values = [own for part in updates for own in self._per_token(part, values_R)]
        # What an environment said takes no part: a turn's first value follows on the last one of the turn before.
        sampled = [own[mask] for own, mask in zip(values, masks, strict=True)]
        rewards = [sequence.reward for sequence in sequences]
        estimate = partial(gae_of_turns, turns=list(map(turn_numbers, masks))) if settings.level == "turn" else gae
        advantages, returns = estimate(sampled, rewards, gamma=settings.gamma, decay=settings.gae_lambda)
        kinds = (sampled, whitened(advantages), returns)
        found = iter([Estimate(*map(partial(_placed, mask), of)) for mask, *of in zip(masks, *kinds, strict=True)])
        return [[next(found) for _ in part] for part in updates]

    def learn(self, items: list[Item]) -> tuple[Sums, float]:
        """Return (this rank's sums, gradient norm) of one update towards the returns."""
        sums, grad_norm, _ = self._update(items, self._objective, self.config.algorithm.critic.learning_rate)
        return sums, grad_norm

    def stats(self, estimates: Sequence[Sequence[Estimate]], learned: Sequence[tuple[Sums, float]]) -> dict[str, float]:
        """Return the metrics of one step, named as in `specactor.metrics`."""
        norm = sum(grad_norm for _, grad_norm in learned) / len(learned)
        total, norm = reduce_over_ranks([sums for sums, _ in learned], norm, self.device)
        flat = [estimate for part in estimates for estimate in part]
        returns_T = torch.cat([estimate.returns for estimate in flat])
        error_T = returns_T - torch.cat([estimate.values for estimate in flat])
        returns_T, error_T = returns_T[returns_T.isfinite()], error_T[returns_T.isfinite()]
        variance = float(returns_T.var(correction=0))
        return {
            "loss": total.loss / len(learned),
            "grad_norm": norm,
            "explained_variance": 1 - float(error_T.var(correction=0)) / variance if variance else math.nan,
            "clip_fraction": total.clipped / total.tokens,
        }

    def offload(self) -> None:
        """Also move weights to host memory, since engines need none."""
        super().offload()
        for buffer in self._buffers():
            buffer.offload_to_cpu(move_params=True, move_grads=False)

    def reload(self) -> None:
        for buffer in self._buffers():
            buffer.reload_from_cpu(move_params=True, move_grads=False)
        super().reload()

    def _buffers(self) -> Iterator[Any]:
        if torch.cuda.is_available():  # on a CPU nothing is handed over
            for chunk in self.chunks:
                yield from chunk.buffers + chunk.expert_parallel_buffers

    def _objective(self, batch: MicroBatch, output_1T1: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        new_R = values_R(batch, output_1T1)
        if batch.values_R is None or batch.returns_R is None:
            assert batch.num_sequences == 0
            return new_R.sum(), {}
        clip = self.config.algorithm.critic.value_clip
        loss_R, clipped_R = value_loss_T(new_R, batch.values_R, batch.returns_R, clip)
        loss = (loss_R * batch.weights_R).sum()
        return loss, {"loss": loss.detach(), "clipped": clipped_R.sum(), "tokens": torch.tensor(len(loss_R))}


def _placed(mask_T: Tensor, values_S: Tensor) -> Tensor:
    """Put values at the places of sampled tokens, and nan elsewhere."""
    values_T = torch.full(mask_T.shape, math.nan, dtype=values_S.dtype)
    values_T[mask_T] = values_S
    return values_T


def values_R(batch: MicroBatch, output_1T1: Tensor) -> Tensor:  # noqa: N802 (ends in the shape that it returns)
    """Expected reward before each response token, float32."""
    return output_1T1[0, :, 0].index_select(0, batch.rows_R).float()
