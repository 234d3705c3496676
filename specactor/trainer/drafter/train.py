"""The draft model learns from the buffer for a bounded time, after RL steps.

Invariants: losses do not depend on the number of ranks (up to float32 rounding), and all stop at the same micro-batch;
the process's random state stays; an update is made whole or not at all; after `save` and `load` training goes on as
before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
Stopped = Literal["time", "updates", "empty"]


@dataclass(frozen=True, kw_only=True)
class RefreshStats:
    """Results of one refresh, equal on all ranks but for `seconds`."""

    updates: int
    micro_steps: int  # of every rank, with those of an update that was given up
    tokens: int  # response tokens learned from
    losses: tuple[float, ...]  # of every update: mean per response token
    kl: float  # KL(policy, draft) over the top-k, in the last update; nan without an update, like the next two
    overlap: float  # at least 1 - TV (see `losses.overlap`), in the last update
    grad_norm: float  # of the last update, before clipping
    seconds: float
    stopped: Stopped


class Deadline:
    """The time of one refresh, over by the clock of any rank."""

    def __init__(
        self, clock: Clock, limit_s: float, *, expected_s: float, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        """`expected_s` is of the first micro-batch; `group` None: one rank."""
        self._clock, self._limit_s, self._group, self._device = clock, limit_s, group, device
        self._start_s, self._longest_s, self._began_s = clock(), expected_s, 0.0
        self.total_s = 0.0

    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    def is_over(self, micro_steps: int = 1) -> bool:
        """Return whether so many micro-batches, at the longest so far, would end late on some rank."""
        return self.on_any_rank(self.elapsed_s() + micro_steps * self._longest_s > self._limit_s)

    def on_any_rank(self, here: bool) -> bool:
        if self._group is None:
            return here
        flag = torch.tensor([int(here)], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def __enter__(self) -> None:
        self._began_s = self._clock()

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # or only the launches would be timed
        took_s = self._clock() - self._began_s
        self._longest_s = max(self._longest_s, took_s)
        self.total_s += took_s


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
        self.halvings = 0  # of the tokens of an update, since no update fitted the time
        self._drawn = (0, 0)  # examples and tokens of the last draw
        self._micro_s = 0.0
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
        """Learn from the buffer until the time or the updates are over. Collective. Only a micro-batch that takes
        longer than any before ends it late. Raises SpecActorError when a loss, gradient or weight is not finite, with
        weights and optimizer as before (not under ZeRO), and torch.OutOfMemoryError on its rank alone.

        Args:
            max_updates: 0: the config's, where 0 is any number.
            rate_of: learning rate by the update's number over all refreshes.
        """
        deadline = Deadline(clock, limit_s, expected_s=self._micro_s, group=self._group, device=self.device)
        restore = self._updater.kept()
        try:
            stats = self._learn(deadline, max_updates or self.config.max_updates or 2**62, rate_of or self._rate)
        except SpecActorError:  # on every rank alike, since what is not finite is a sum over ranks
            restore()
            raise
        self._adapt(deadline, stats)
        return stats

    def _learn(self, deadline: Deadline, max_updates: int, rate_of: Callable[[int], float]) -> RefreshStats:
        made: list[dict[str, float]] = []
        micro_steps, norm = 0, math.nan
        stopped: Stopped = "updates" if len(self.buffer) else "empty"
        while stopped == "updates" and len(made) < max_updates:
            sums, steps = self._gradients(deadline)
            micro_steps += steps
            if sums is None:
                stopped = "time"
                break
            norm = self._updater.step(rate_of(self.updates))
            self.updates += 1
            made.append(sums)
        if made and deadline.on_any_rank(not self.is_finite()):
            raise diverged("weight", math.nan)
        self.version += bool(made)
        last = made[-1] if made else dict.fromkeys(_SUMS, math.nan)
        with_top_k = last["with_top_k"] or math.nan
        return RefreshStats(
            updates=len(made),
            micro_steps=micro_steps,
            tokens=round(sum(sums["tokens"] for sums in made)),
            losses=tuple(sums["loss"] / sums["tokens"] for sums in made),
            kl=last["kl"] / with_top_k,
            overlap=last["overlap"] / with_top_k,
            grad_norm=norm,
            seconds=deadline.elapsed_s(),
            stopped=stopped,
        )

    @property
    def tokens_per_update(self) -> int:
        """Return the tokens of an update: the config's, halved while none fits the time."""
        return max(1, self.config.tokens_per_update >> self.halvings)

    def is_finite(self) -> bool:
        """Return whether this rank's weights are. Collective with ZeRO stage 3."""
        return all([bool(tensor.isfinite().all()) for _, tensor in self.named_weights()])  # every rank gathers all

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors under Hugging Face names. Collective with ZeRO stage 3."""
        return self._updater.named_weights()

    def _adapt(self, deadline: Deadline, stats: RefreshStats) -> None:
        if stats.micro_steps:
            self._micro_s = deadline.total_s / stats.micro_steps
        elif stats.stopped == "time":
            self._micro_s /= 2  # it may have been an exception, and nothing is measured before one is run again
        if stats.stopped == "time" and not stats.updates:
            num_examples, num_tokens = self._drawn
            if num_examples > 1:  # of one there is no half
                self.halvings += 1
                while self.tokens_per_update >= num_tokens:  # the buffer had no more
                    self.halvings += 1
        elif self.halvings and stats.updates:
            twice = 2 * math.ceil(stats.micro_steps / stats.updates)
            in_time = stats.stopped == "updates" and not deadline.is_over(twice)
            # where three fit, one of twice the tokens does, with time to spare
            self.halvings -= stats.updates > 2 or in_time

    def _gradients(self, deadline: Deadline) -> tuple[dict[str, float] | None, int]:
        """Return (sums of one update over all ranks, micro-batches run); None: too late."""
        examples = self.buffer.draw(self.updates, self.tokens_per_update)
        lengths = [len(example.token_ids) for example in examples]
        num_tokens = sum(example.response_len for example in examples)
        self._drawn = (len(examples), sum(lengths))
        mine = losses.plan_micro_batches(lengths, self._ranks, self.config.tokens_per_microbatch)[self._rank]
        whole = not self._updater.can_abandon
        if whole and deadline.is_over(micro_steps=len(mine)):
            return None, 0
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=self.device)
        for number, indices in enumerate(mine):
            if not whole and deadline.is_over():
                self._updater.abandon()
                return None, number
            batch = losses.build([examples[i] for i in indices], self.device)
            last = number == len(mine) - 1
            with self._updater.micro_step(last), deadline:
                loss, values = self._loss(batch)
                # gradients are averaged over the ranks
                self._updater.backward(loss * (self._ranks / num_tokens), last)
            sums += values
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        result = dict(zip(_SUMS, sums.tolist(), strict=True))
        if not math.isfinite(result["loss"]):
            if not whole:
                self._updater.abandon()
            raise diverged("loss", result["loss"])
        return result, len(mine)

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
        """Return an update's learning rate: a linear warm-up, then constant. Each halving of an update's tokens divides
        it by the square root of 2 (Malladi et al., NeurIPS 2022, on Adam)."""
        risen = min(1.0, (update + 1) / max(1, self.config.warmup_updates))
        return self.config.learning_rate * risen * math.sqrt(0.5**self.halvings)

    def save(self, folder: Path) -> None:
        """Write all that continuing needs. Collective; rank 0 writes (ZeRO: every rank)."""
        from safetensors.torch import save_file

        weights = {name: tensor.to("cpu").contiguous() for name, tensor in self.named_weights()}
        self._updater.save(folder)
        if self._rank == 0:
            save_file(weights, folder / WEIGHTS)
            (folder / BUFFER).write_bytes(self.buffer.state())
            about = {"version": self.version, "updates": self.updates, "halvings": self.halvings}
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
        self.halvings = about["halvings"]

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
