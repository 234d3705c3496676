"""The drafter trainer: the draft model learns from the buffer for a bounded time, after RL steps.

Invariants:
1. Every rank calls the same methods with the same lessons; losses do not depend on the number of ranks (up to float32
   rounding), and all ranks stop at the same micro-batch. `learn_alone` is excepted: `adopt` is called after it.
2. Nothing of the policy is touched, and the process's random state neither read nor moved: what is drawn follows from
   the seed and the number of the update.
3. An update is made whole or not at all. A refresh ends before its limit, unless a micro-batch takes longer than any
   before it in the refresh and than the mean of the last refresh that ran some, halved for every one since that ran
   none.
4. What is not finite neither stays in the weights nor gets a version: a refresh that diverges leaves those before.
   Memory is excepted: a rank that runs out of it raises alone.
5. After `save` and `load`, training goes on as if it had not stopped.

Shape legend: as in `batches` and `losses`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from specactor.config import DistillationConfig
from specactor.errors import CheckpointError, SpecActorError
from specactor.trainer.distillation import batches, losses
from specactor.trainer.distillation.buffer import DraftBuffer, Lesson
from specactor.trainer.distillation.emphasis import NUM_BINS, lost, token_weights
from specactor.trainer.distillation.updates import OPTIMIZER, diverged, make_updater
from specactor.trainer.distillation.watch import Clock, Watch

WEIGHTS, BUFFER, STATE = "weights.safetensors", "buffer.safetensors", "drafter.json"
_SUMS = ("loss", "sample", "law", "overlap", "laws", "weight")


@dataclass(frozen=True, kw_only=True)
class RefreshStats:
    """Of one `DrafterTrainer.refresh`; equal on all ranks, but for `seconds`."""

    updates: int
    micro_steps: int
    """Of every rank, with those of an update that was given up."""
    tokens: int
    """Response tokens learned from."""
    losses: tuple[float, ...]
    """Of every update: weighted mean per response token."""
    sample_loss: float
    """-log q of the policy's samples, in the last update; nan without an update, like all of these."""
    law_loss: float
    """KL(policy, draft) over the likeliest tokens, in the last update."""
    overlap: float
    """At least 1 - TV (see `losses.overlap`), in the last update: what the best drafter with this law would reach."""
    grad_norm: float
    """Of the last update, before clipping."""
    seconds: float
    stopped: Literal["time", "updates", "empty"]
    tokens_per_update: int
    """That each update drew; fewer than the config's after a refresh in which no update fitted the time."""
    version: int
    """Of the draft model, after the refresh."""
    overlap_before: float = math.nan
    """As `overlap`, on the responses that were held out; nan without any."""
    overlap_after: float = math.nan


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """How far one rank's draft model has come."""

    version: int
    updates: int
    lost: tuple[float, ...]
    moments: list[str]
    """What its optimizer has a state of (`updates.PlainUpdater.optimizer_state`)."""


class DrafterTrainer:
    """A draft model with its optimizer and buffer, the same on every rank of `group` (None: one rank)."""

    def __init__(
        self, config: DistillationConfig, model: nn.Module, *, seed: int, group: dist.ProcessGroup | None = None
    ) -> None:
        """Args: a causal model of transformers, in float32 for training, on its device. Collective."""
        self.config, self.model = config, model
        self.device = next(model.parameters()).device
        self.buffer = DraftBuffer(
            max_tokens=config.buffer_tokens,
            half_life_steps=config.half_life_steps,
            seed=seed,
            max_lesson_tokens=config.tokens_per_microbatch,
        )
        self.version = 0
        """Times that the weights have changed, by refreshes and by what ranks learned alone."""
        self.updates = 0
        """Made so far, also in refreshes that diverged."""
        self.lost: tuple[float, ...] = ()
        """Where acceptance is lost (`emphasis.lost`), as the last refresh saw it; one refresh has one."""
        self.halvings = 0
        """Of the tokens of an update, since no update fitted the time."""
        self._seen = torch.zeros(2, NUM_BINS, dtype=torch.float64)
        """Of this refresh's updates, all ranks, per bin: tokens whose law is known, and the sum of their overlaps."""
        self._drawn = (0, 0)
        """Lessons and tokens of the last draw."""
        self._micro_s = 0.0
        self._group = group
        self._rank, self._ranks = (0, 1) if group is None else (group.rank(), group.size())
        # eval: dropout would draw from the process's random state
        self._updater = make_updater(model.eval(), config, group, self.device)

    def refresh(
        self,
        *,
        limit_s: float,
        clock: Clock,
        max_updates: int = 0,
        rate_of: Callable[[int], float] | None = None,
        held_out: Sequence[Lesson] = (),
    ) -> RefreshStats:
        """Learn from the buffer until the time or the updates are over. Collective.

        Args: seconds; a clock in seconds, each rank's own; updates at most (0: ``config.max_updates``, where 0 means
        any number); learning rate of an update by its number over all refreshes, instead of the config's; responses
        with laws, not in the buffer, on which its worth is seen. Raises SpecActorError when a loss, a gradient or a
        weight is not finite; weights and optimizer are then those before (under ZeRO they are not brought back: see
        `is_finite`). Memory is excepted: torch.OutOfMemoryError is raised on its rank alone.
        """
        watch = Watch(clock, limit_s, self._micro_s, self._group, self.device)
        restore = self._updater.kept()
        try:
            before = self._overlap(held_out, watch)
            watch.reserve(watch.elapsed_s())  # as much for the same afterwards
            stats = self._learn(watch, max_updates or self.config.max_updates or 2**62, rate_of or self._rate)
            after = self._overlap(held_out, watch) if stats.updates else before
        except SpecActorError:  # on every rank alike, since what is not finite is a sum over ranks
            restore()
            raise
        self._adapt(watch, stats.updates, stats.micro_steps, stats.stopped)
        return replace(stats, overlap_before=before, overlap_after=after)

    def learn_alone(self, over: Callable[[], bool], *, max_updates: int) -> RefreshStats:
        """Learn on this rank, without the others, until `over` says so between two micro-batches. Not with ZeRO.

        Its draft model is another than theirs from then on, until all `adopt` one. Raises SpecActorError as `refresh`
        does, and RuntimeError where memory is short; all is then as before.
        """
        watch = Watch(time.perf_counter, math.inf, 0.0, None, self.device, over)
        updates, restore = self.updates, self._updater.kept()
        try:
            return self._learn(watch, max_updates, self._rate)
        except (SpecActorError, RuntimeError):
            self.updates = updates
            restore()
            raise

    def learned(self) -> Learned:
        """How far this rank has come."""
        return Learned(version=self.version, updates=self.updates, lost=self.lost, moments=self._updater.moments())

    def adopt(self, source: int, learned: Learned) -> None:
        """What one rank has `learned`, with its weights and optimizer, on all ranks. Collective."""
        self._updater.adopt(source, learned.moments)
        self.version, self.updates, self.lost = learned.version, learned.updates, learned.lost

    def _learn(self, watch: Watch, max_updates: int, rate_of: Callable[[int], float]) -> RefreshStats:
        found: list[dict[str, float]] = []
        tokens_per_update, micro_steps, norm = self.tokens_per_update, 0, math.nan
        stopped: Literal["time", "updates", "empty"] = "updates" if len(self.buffer) else "empty"
        self._seen.zero_()
        while stopped == "updates" and len(found) < max_updates:
            made, steps = self._gradients(watch)
            micro_steps += steps
            if made is None:
                stopped = "time"
                break
            norm = self._updater.step(rate_of(self.updates))
            self.updates += 1
            found.append(made)
        if found and watch.agreed(not self.is_finite()):
            raise diverged("weight", math.nan)
        self.version += bool(found)
        self.lost = lost(*self._seen.tolist()) or self.lost
        return self._stats(found, micro_steps, norm, watch.elapsed_s(), stopped, tokens_per_update)

    @property
    def tokens_per_update(self) -> int:
        """That an update draws: the config's, halved while no update fits the time."""
        return max(1, self.config.tokens_per_update >> self.halvings)

    @property
    def is_warming_up(self) -> bool:
        """Whether the next update has a lower learning rate than those to come."""
        return self.updates + 1 < self.config.warmup_updates

    def is_finite(self) -> bool:
        """Whether all weights are, on this rank. Collective with ZeRO stage 3."""
        return all([bool(tensor.isfinite().all()) for _, tensor in self.named_weights()])  # every rank gathers all

    def _adapt(
        self, watch: Watch, updates: int, micro_steps: int, stopped: Literal["time", "updates", "empty"]
    ) -> None:
        """What the next refresh expects of a micro-batch, and draws for an update. Collective."""
        if micro_steps:
            self._micro_s = watch.total_s / micro_steps
        elif stopped == "time":
            self._micro_s /= 2  # it may have been an exception, and nothing is measured before one is run again
        if stopped == "time" and not updates:
            num_lessons, num_tokens = self._drawn
            if num_lessons > 1:  # of one there is no half
                self.halvings += 1
                while self.tokens_per_update >= num_tokens:  # the buffer had no more
                    self.halvings += 1
        elif self.halvings and updates:
            in_time = stopped == "updates" and not watch.over(2 * math.ceil(micro_steps / updates))
            self.halvings -= updates > 2 or in_time  # where three fit, one of twice the tokens does, with time to spare

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under Hugging Face names, as the drafters take them. Collective with ZeRO stage 3."""
        return self._updater.named_weights()

    def _gradients(self, watch: Watch) -> tuple[dict[str, float] | None, int]:
        """(sums of one update over all ranks, micro-batches run); None where the time is over."""
        lessons = batches.of_one_width(self.buffer.draw(self.updates, self.tokens_per_update))
        mean = self.buffer.mean_reward()
        weights = [
            token_weights(
                lesson.response_len,
                lost=self.lost,
                position_emphasis=self.config.position_emphasis,
                reward=lesson.reward,
                mean_reward=mean,
                reward_emphasis=self.config.reward_emphasis,
            )
            for lesson in lessons
        ]
        total = float(sum(of_lesson.sum() for of_lesson in weights))
        lengths = [len(lesson.token_ids) for lesson in lessons]
        self._drawn = (len(lessons), sum(lengths))
        mine = batches.plan(lengths, watch.ranks, self.config.tokens_per_microbatch)[watch.rank]
        whole = not self._updater.can_abandon
        if whole and watch.over(micro_steps=len(mine)):
            return None, 0
        sums = torch.zeros(len(_SUMS) + 1 + 2 * NUM_BINS, dtype=torch.float64, device=self.device)
        for number, indices in enumerate(mine):
            if not whole and watch.over():
                self._updater.abandon()
                return None, number
            batch = batches.build([lessons[i] for i in indices], [weights[i] for i in indices], self.device)
            last = number == len(mine) - 1
            with self._updater.micro_step(last, alone=watch.alone), watch.timed():
                loss, values = self._loss(batch, total)
                self._updater.backward(loss * watch.ranks, last)  # gradients are averaged over the ranks
            sums += values
        if watch.group is not None:
            dist.all_reduce(sums, group=watch.group)
        result = dict(zip((*_SUMS, "tokens"), sums.tolist(), strict=False))
        if not math.isfinite(result["loss"]):
            if not whole:
                self._updater.abandon()
            raise diverged("loss", result["loss"])
        self._seen += sums[-2 * NUM_BINS :].view(2, NUM_BINS).cpu()
        return result, len(mine)

    @torch.no_grad()
    def _overlap(self, lessons: Sequence[Lesson], watch: Watch) -> float:
        """Per token of these responses; nan where no law is known. Collective."""
        mine = batches.plan([len(x.token_ids) for x in lessons], watch.ranks, self.config.tokens_per_microbatch)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for indices in mine[watch.rank]:
            members = [lessons[i] for i in indices]
            batch = batches.build(members, [np.ones(x.response_len) for x in members], self.device)
            _, values = self._loss(batch, 1.0)
            sums += values[[_SUMS.index("overlap"), _SUMS.index("laws")]]
        if lessons and watch.group is not None:
            dist.all_reduce(sums, group=watch.group)
        overlap, laws = (float(total) for total in sums)
        return overlap / laws if laws else math.nan

    def _loss(self, batch: batches.Batch, total: float) -> tuple[Tensor, Tensor]:
        """(this micro-batch's part of the mean over the update's weights, sums over its tokens)."""
        logits = self._updater.logits(batch.tokens_BT)
        logits_NV = logits.flatten(0, 1).index_select(0, batch.row_N)
        logq_NV = losses.log_draft(logits_NV, batch.temperatures_N)
        found = losses.terms(logq_NV, batch.targets_N, batch.top_tokens_NK, batch.top_logp_NK, batch.has_law_N)
        loss_N = losses.per_token(
            found, batch.has_law_N, sample_weight=self.config.sample_weight, law_weight=self.config.law_weight
        )
        loss = (loss_N * batch.weights_N).sum() / total
        if not len(loss_N):
            loss = loss + 0.0 * logits.sum()  # an empty micro-batch takes part in the reduction
        known_N = batch.has_law_N.to(loss_N.dtype)
        values = [
            loss.detach() * total,
            found.sample.detach().sum(),
            (found.law.detach() * known_N).sum(),
            found.overlap.nan_to_num().sum(),
            known_N.sum(),
            batch.weights_N.sum(),
            known_N.new_tensor(float(len(loss_N))),
        ]
        kept_2N = torch.stack([known_N, found.overlap.nan_to_num()]).double()
        at_2B = kept_2N.new_zeros(2, NUM_BINS).index_add_(1, batch.bins_N, kept_2N)
        return loss, torch.cat([torch.stack([value.double() for value in values]), at_2B.flatten()])

    def _rate(self, update: int) -> float:
        """Of an update by its number over all refreshes: it rises along a line, then stays."""
        return self.config.learning_rate * min(1.0, (update + 1) / max(1, self.config.warmup_updates))

    def _stats(
        self,
        found: Sequence[dict[str, float]],
        micro_steps: int,
        norm: float,
        seconds: float,
        stopped: Literal["time", "updates", "empty"],
        tokens_per_update: int,
    ) -> RefreshStats:
        end = found[-1] if found else dict.fromkeys((*_SUMS, "tokens"), math.nan)
        laws = end["laws"] or math.nan
        return RefreshStats(
            updates=len(found),
            micro_steps=micro_steps,
            tokens=round(sum(of["tokens"] for of in found)),
            losses=tuple(of["loss"] / of["weight"] for of in found),
            sample_loss=end["sample"] / end["tokens"],
            law_loss=end["law"] / laws,
            overlap=end["overlap"] / laws,
            grad_norm=norm,
            seconds=seconds,
            stopped=stopped,
            tokens_per_update=tokens_per_update,
            version=self.version,
        )

    def save(self, folder: Path) -> None:
        """Everything that continuing needs, into an existing folder. Collective; rank 0 writes (ZeRO: every rank)."""
        from safetensors.numpy import save_file as save_arrays
        from safetensors.torch import save_file

        weights = {name: tensor.to("cpu").contiguous() for name, tensor in self.named_weights()}
        self._updater.save(folder)
        if self._rank == 0:
            save_file(weights, folder / WEIGHTS)
            save_arrays(self.buffer.state(), folder / BUFFER)
            about = {"version": self.version, "updates": self.updates, "lost": self.lost, "halvings": self.halvings}
            (folder / STATE).write_text(
                json.dumps(about | {"zero_stage": self.config.zero_stage, "ranks": self._ranks})
            )

    def load(self, folder: Path) -> None:
        """What `save` wrote. Collective. Raises CheckpointError for the state of another draft model, or that ZeRO has
        divided in another way."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file as load_arrays
        from safetensors.torch import load_file

        try:
            weights, arrays = load_file(folder / WEIGHTS), load_arrays(folder / BUFFER)
            about = json.loads((folder / STATE).read_text())
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{folder}: no state of a draft model ({error}). Use another checkpoint.") from error
        self._check_division(folder, about)
        if self.config.zero_stage < 3:
            self._load_weights(weights, folder)
        self._updater.load(folder)
        self.buffer.restore(arrays)
        self.version, self.updates, self.lost = about["version"], about["updates"], tuple(about["lost"])
        self.halvings = about.get("halvings", 0)  # older checkpoints have none

    def _check_division(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Older checkpoints do not say how they were divided, but plain ones have a file of their own."""
        own = self.config.zero_stage
        stage = about.get("zero_stage", 0 if (folder / OPTIMIZER).is_file() else own or "1, 2 or 3")
        if stage != own:
            raise CheckpointError(
                f"{folder}: got an optimizer of distillation.zero_stage {stage}, expected {own}. Resume with "
                f"--distillation.zero-stage {stage}, or with --distillation.refresh off."
            )
        if own and about.get("ranks", self._ranks) != self._ranks:
            raise CheckpointError(
                f"{folder}: got an optimizer that ZeRO divided over {about['ranks']} ranks, expected {self._ranks}. "
                f"Resume with {about['ranks']} ranks, or with --distillation.refresh off."
            )

    @torch.no_grad()
    def _load_weights(self, weights: dict[str, Tensor], folder: Path) -> None:
        own = dict(self.model.named_parameters())
        if {n: w.shape for n, w in weights.items()} != {n: p.shape for n, p in own.items()}:
            raise CheckpointError(f"{folder}: is of another draft model. Use the one that it was saved with.")
        for name, parameter in own.items():
            parameter.copy_(weights[name])
