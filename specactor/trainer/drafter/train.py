"""The draft model learns from the buffer for a bounded time, after RL steps.

Invariants: losses do not depend on the number of ranks (up to float32 rounding), and all make as many updates; the
process's random state stays; after `save` and `load` training goes on as before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from specactor.config import DraftTrainingConfig
from specactor.errors import CheckpointError, SpecActorError
from specactor.trainer.drafter import losses
from specactor.trainer.drafter.buffer import DraftBuffer
from specactor.trainer.drafter.updates import diverged, make_updater

WEIGHTS, BUFFER, STATE = "weights.safetensors", "buffer.msgpack", "drafter.json"
_SUMS = ("loss", "kl", "overlap", "with_top_k", "tokens")

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class RefreshStats:
    """Results of one refresh, equal on all ranks but for `seconds`."""

    updates: int
    tokens: int  # response tokens learned from
    losses: tuple[float, ...]  # of every update: mean per response token
    kl: float  # KL(policy, draft) over the top-k, in the last update; nan without an update, like the next two
    overlap: float  # at least 1 - TV (see `losses.overlap`), in the last update
    grad_norm: float  # of the last update, before clipping
    seconds: float


class DrafterTrainer:
    """A draft model with optimizer and buffer, the same on all ranks of `group`."""

    def __init__(
        self, config: DraftTrainingConfig, model: nn.Module, *, seed: int, group: dist.ProcessGroup | None = None
    ) -> None:
        """Take a causal model of transformers in float32, on its device. `group` None: one rank. Collective."""
        self.config, self.model = config, model
        self.device = next(model.parameters()).device
        self.buffer = DraftBuffer(
            max_tokens=config.buffer_tokens,
            half_life_steps=config.half_life_steps,
            seed=seed,
            max_example_tokens=config.tokens_per_microbatch,
        )
        self.version = 0  # refreshes that have changed the weights
        self.updates = 0  # made so far, also in refreshes that diverged
        self._group = group
        self._rank, self._ranks = (0, 1) if group is None else (group.rank(), group.size())
        # eval: dropout would draw from the process's random state
        self._updater = make_updater(model.eval(), config, group, self.device)

    def offload(self) -> None:
        """Free a GPU's memory; weights can be read in host memory."""
        self._updater.offload()

    def reload(self) -> None:
        """Take it again, to learn or to load."""
        self._updater.reload()

    def refresh(
        self,
        *,
        limit_s: float,
        clock: Clock,
        max_updates: int = 0,
        rate_of: Callable[[int], float] | None = None,
    ) -> RefreshStats:
        """Learn from the buffer until the time or the updates are over. Collective. An update is begun if the longest
        so far would end in time on all ranks, the first in any case. Raises SpecActorError on all ranks when a loss,
        gradient or weight is not finite, and torch.OutOfMemoryError on its rank alone.

        Args:
            max_updates: 0: the config's, where 0 is any number.
            rate_of: learning rate by the update's number over all refreshes.
        """
        most, rate_of = max_updates or self.config.max_updates or math.inf, rate_of or self._rate
        made: list[dict[str, float]] = []
        norm, longest_s, start_s = math.nan, 0.0, clock()
        while len(self.buffer) and len(made) < most:
            began_s = clock()
            if self.on_any_rank(began_s - start_s + longest_s >= limit_s):
                break
            try:
                sums = self._gradients()
                norm = self._updater.step(rate_of(self.updates))
            except SpecActorError:  # on all ranks; the updates before it are in the weights
                self.version += bool(made) and not self.on_any_rank(not self.is_finite())
                raise
            self.updates += 1
            made.append(sums)
            longest_s = max(longest_s, clock() - began_s)
        if made and self.on_any_rank(not self.is_finite()):
            raise diverged("weight", math.nan)
        self.version += bool(made)
        last = made[-1] if made else dict.fromkeys(_SUMS, math.nan)
        with_top_k = last["with_top_k"] or math.nan
        return RefreshStats(
            updates=len(made),
            tokens=round(sum(sums["tokens"] for sums in made)),
            losses=tuple(sums["loss"] / sums["tokens"] for sums in made),
            kl=last["kl"] / with_top_k,
            overlap=last["overlap"] / with_top_k,
            grad_norm=norm,
            seconds=clock() - start_s,
        )

    def on_any_rank(self, here: bool) -> bool:
        """Return whether it is so on any rank. Collective."""
        if self._group is None:
            return here
        flag = torch.tensor([int(here)], dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def is_finite(self) -> bool:
        """Return whether this rank's weights are. Collective with ZeRO stage 3."""
        return all([bool(tensor.isfinite().all()) for _, tensor in self.named_weights()])  # every rank gathers all

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors under Hugging Face names. Collective with ZeRO stage 3."""
        return self._updater.named_weights()

    def fixed_weights(self) -> list[tuple[str, Tensor]]:
        """Return what an engine's model has besides, without which it takes no weights; none learns."""
        return []

    def _gradients(self) -> dict[str, float]:
        """Return the sums of one update over all ranks."""
        examples = self.buffer.draw(self.updates, self.config.tokens_per_update)
        lengths = [len(example.token_ids) for example in examples]
        num_tokens = sum(example.response_len for example in examples)
        mine = losses.plan_micro_batches(lengths, self._ranks, self.config.tokens_per_microbatch)[self._rank]
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=self.device)
        for number, indices in enumerate(mine):
            batch = losses.build([examples[i] for i in indices], self.device)
            last = number == len(mine) - 1
            with self._updater.micro_step(last):
                loss, values = self._loss(batch)
                # gradients are averaged over the ranks
                self._updater.backward(loss * (self._ranks / num_tokens), last)
            sums += values
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        result = dict(zip(_SUMS, sums.tolist(), strict=True))
        if not math.isfinite(result["loss"]):
            raise diverged("loss", result["loss"])
        return result

    def _loss(self, batch: losses.Batch) -> tuple[Tensor, Tensor]:
        """Return (sum of a micro-batch's losses, `_SUMS` over its tokens)."""
        logits = self._updater.logits(batch.tokens_BT)

        def of_rows(logits_PV: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            rows = batch.rows(part)
            return losses.token_losses(losses.draft_logprobs(logits_PV, rows.temperatures_N), rows)

        loss_N, overlap_N = losses.by_parts(of_rows, logits.flatten(0, 1), batch.row_N)
        loss = loss_N.sum()
        if not len(loss_N):
            loss = loss + 0.0 * logits.sum()  # an empty micro-batch takes part in the reduction
        known_N = batch.has_top_k_N.double()
        kl_N = loss_N.detach().double() * known_N
        sums = [loss.detach().double(), kl_N.sum(), overlap_N.double().sum(), known_N.sum()]
        return loss, torch.stack([*sums, known_N.new_tensor(float(len(loss_N)))])

    def _rate(self, update: int) -> float:
        """Return an update's learning rate: a linear warm-up, then constant."""
        return self.config.learning_rate * min(1.0, (update + 1) / max(1, self.config.warmup_updates))

    def save(self, folder: Path) -> None:
        """Write all that continuing needs. Collective; rank 0 writes (ZeRO: every rank)."""
        from safetensors.torch import save_file

        weights = {name: tensor.to("cpu").contiguous() for name, tensor in self.named_weights()}
        self._updater.save(folder)
        if self._rank == 0:
            save_file(weights, folder / WEIGHTS)
            (folder / BUFFER).write_bytes(self.buffer.state())
            about = {"version": self.version, "updates": self.updates}
            (folder / STATE).write_text(
                json.dumps(about | {"zero_stage": self.config.zero_stage, "ranks": self._ranks})
            )

    def load(self, folder: Path) -> None:
        """Load what `save` wrote. Collective. Raises CheckpointError for another model or division by ZeRO."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            weights, examples = load_file(folder / WEIGHTS), (folder / BUFFER).read_bytes()
            about = json.loads((folder / STATE).read_text())
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{folder}: no state of a draft model ({error}). Use another checkpoint.") from error
        self._check_division(folder, about)
        if self.config.zero_stage < 3:
            self._load_weights(weights, folder)
        self._updater.load(folder)
        self.buffer.restore(examples)
        self.version, self.updates = about["version"], about["updates"]

    def _check_division(self, folder: Path, about: Mapping[str, Any]) -> None:
        stage, own = about["zero_stage"], self.config.zero_stage
        if stage != own:
            raise CheckpointError(
                f"{folder}: got an optimizer of ZeRO stage {stage}, expected {own}. Resume with "
                f"--distillation.zero {stage or 'off'}, or with --distillation.refresh 0."
            )
        if own and about["ranks"] != self._ranks:
            raise CheckpointError(
                f"{folder}: got an optimizer that ZeRO divided over {about['ranks']} ranks, expected {self._ranks}. "
                f"Resume with {about['ranks']} ranks, or with --distillation.refresh 0."
            )

    @torch.no_grad()
    def _load_weights(self, weights: dict[str, Tensor], folder: Path) -> None:
        own = dict(self.model.named_parameters())
        if {n: w.shape for n, w in weights.items()} != {n: p.shape for n, p in own.items()}:
            raise CheckpointError(f"{folder}: is of another draft model. Use the one that it was saved with.")
        for name, parameter in own.items():
            parameter.copy_(weights[name])
