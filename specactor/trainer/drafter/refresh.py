"""The draft model in a run: it learns after a step, reaches whoever drafts, and is in checkpoints.

Invariants: every rank calls the same methods with the same values; the policy's tokens, rewards and losses are those of
a run without it; after `save` and `load` it goes on as before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from specactor.config import Config, DraftTrainingConfig, SpeculationConfig
from specactor.errors import SpecActorError
from specactor.parallel.collective import Collective
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.sglang.engine_client import Engine
from specactor.trainer.checkpoint import failing_on_all
from specactor.trainer.drafter import init
from specactor.trainer.drafter.buffer import TopK, example_from
from specactor.trainer.drafter.head import Head
from specactor.trainer.drafter.head_training import HeadTrainer
from specactor.trainer.drafter.recorder import MAX_BYTES, Recorder
from specactor.trainer.drafter.train import Clock, DrafterTrainer, RefreshStats
from specactor.types import TrainSequence
from specactor.waits import BULK_S
from specactor.weights_sync.draft_push import DraftSender, num_bytes, push_to_engine
from specactor.weights_sync.messages import DraftWeights

FOLDER = "drafter"  # in a checkpoint


class Distillation:
    """A refresh that fails leaves the weights there are; whoever refuses a push is asked again. Only
    torch.OutOfMemoryError ends the run, since others wait for that rank. Refreshes and pushes together keep to their
    share of the steps: what one takes beyond it the next ones lack."""

    def __init__(
        self,
        config: Config,
        collective: Collective,
        *,
        recorder_of: Callable[[Sequence[int]], Recorder | None],
        policy: Any,
        engines: Callable[[], Sequence[Engine]],
        processes: DrafterPool,
        note: Callable[[str], None] = lambda text: None,
        device: torch.device | str = "cpu",
        clock: Clock = time.perf_counter,
    ) -> None:
        """Read the draft model. Collective. Raises ConfigError for one that does not fit.

        Args:
            recorder_of: makes the recorder of the policy's top-k and these layers' outputs.
            policy: transformers' config.
            engines: those of this rank with a draft model.
        """
        self.config = DraftTrainingConfig.of(config.distillation)
        self._collective = collective
        self._temperature = config.rollout.temperature
        self._folder = Path(config.rollout.speculation.first_draft_model)
        self._engines, self._processes = engines, processes
        self._note, self._clock = note, clock
        self._held: WeakKeyDictionary[Engine, int] = WeakKeyDictionary()
        """Versions that engines took; others hold version 0."""
        self._hands_over = False  # whether this rank has engines or processes that draft
        self._told_of_states = False
        self._left_s = 0.0  # of the last refresh's share; below 0: owed by the next ones
        init.quiet()
        model = collective.together("draft model", lambda: init.read_fitting(self._folder, policy, device))
        group = dist.group.WORLD if collective.world > 1 else None
        self.recorder = recorder_of(model.layers_learned if isinstance(model, Head) else ())
        kind = HeadTrainer if isinstance(model, Head) else DrafterTrainer
        self.drafter = kind(self.config, model, seed=config.seed, group=group)
        self._sender = DraftSender(getattr(torch, config.model.dtype))
        self._packed: DraftWeights | None = None  # on ranks that have somebody to hand them to
        self._gathered = 0  # the version of which all ranks have had all weights; 0: of none
        self._leave_device()

    def refresh(
        self, sequences: Sequence[TrainSequence], *, version: int, step_s: float, is_last: bool
    ) -> dict[str, float]:
        """Remember an RL step, and learn unless it is the last; return metrics. Collective. `version` is of the policy
        that sampled `sequences`, `step_s` this rank's."""
        began_s, num_cut = self._clock(), self._remember(sequences, version)
        self._left_s = min(0.0, self._left_s) + max(0.0, step_s) * self.config.refresh
        limit_s = max(0.0, self._left_s - (self._clock() - began_s))
        limit_s = self._collective.gather(limit_s, float)[0]  # ranks have clocks of their own
        stats, failed = self._learn(limit_s) if limit_s and not is_last else (None, False)
        self._left_s -= self._clock() - began_s
        num_tokens = self.drafter.buffer.num_tokens
        if isinstance(self.drafter, HeadTrainer):
            self.drafter.buffer.take()  # hidden states of older policies are not worth their memory
        metrics: dict[str, float] = {
            "drafter/version": self.drafter.version,
            "drafter/refreshed": int(stats is not None and stats.updates > 0),
            "drafter/failed": int(failed),
            "drafter/buffer_tokens": num_tokens,
            "drafter/cut_responses": num_cut,
            "time/refresh_limit_s": limit_s,
        }
        return metrics | (_metrics_of(stats) if stats is not None else {})

    def push(self) -> dict[str, float]:
        """Send the weights to all that draft with older ones; return metrics. Collective."""
        began_s, version = self._clock(), self.drafter.version
        behind = [engine for engine in self._engines() if self._held.get(engine, 0) < version]
        wanting = bool(behind) or self._processes.want(version)
        metrics: dict[str, float] = {"drafter/refused": 0, "drafter/pushed_bytes": 0}
        if self._collective.any(wanting) and self._is_sound():
            weights = self._packed
            packed_s = self._clock()

            def hand_over() -> tuple[list[str], float, int]:
                if weights is None:
                    return [], 0.0, 0
                said = [problem for engine in behind if (problem := self._hand(engine, weights))]
                engines_s = self._clock() - packed_s
                refused, processes_s = self._processes.renew(weights)
                return said + refused, engines_s + processes_s, num_bytes(weights)

            own = self._collective.together("draft push", hand_over)
            ranks = self._collective.gather(own, tuple[list[str], float, int])
            problems = [problem for part, *_ in ranks for problem in part]
            for problem in problems:
                self._note(f"draft model, version {version}: {problem}. It goes on with the weights that it has.")
            metrics = {"drafter/refused": len(problems), "drafter/pushed_bytes": max(size for *_, size in ranks)}
            # without the wait for who did not answer: it would leave no time to learn in
            self._left_s -= packed_s - began_s + max(spent_s for _, spent_s, _ in ranks)
        return metrics | {"drafter/oldest_version": self._oldest()}

    def save(self, folder: Path) -> None:
        """Write into a checkpoint if weights are finite. Collective. Raises CheckpointError where the disk fails."""
        own = folder / FOLDER
        if not self._is_sound():
            return  # a run that resumes there begins with the draft model of the config

        def make() -> None:
            if self._collective.rank == 0:
                own.mkdir()

        def write() -> None:
            self.drafter.save(own)

        with failing_on_all(f"{own}: could not be written"):
            self._collective.together("checkpoint", make)
            if self.config.zero_stage:  # its ranks meet while they save, which they cannot within `together`
                write()
            else:
                self._collective.together("checkpoint", write)

    def load(self, checkpoint: Path) -> None:
        """Load from a checkpoint, or start anew without one. Collective."""
        folder = checkpoint / FOLDER
        if self._collective.any(not folder.is_dir()):
            self._note(f"{checkpoint} holds no draft model: it starts from {self._folder}")
        else:
            with self._on_device():
                if self.config.zero_stage:
                    self.drafter.load(folder)
                else:
                    self._collective.together("checkpoint", lambda: self.drafter.load(folder))
                self._packed, self._gathered = None, 0

    def state(self) -> dict[str, Any]:
        return {"left_s": min(0.0, self._left_s)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._left_s = state.get("left_s", 0.0)

    def export(self, folder: Path) -> bool:
        """Write in Hugging Face format if weights are finite; return whether they were. Collective. Raises
        CheckpointError where the disk fails."""
        if not self._is_sound():
            return False
        weights = dict(self.drafter.named_weights())

        def write() -> None:
            if self._collective.rank == 0:
                init.write_model(self.drafter.model, folder, tokenizer=self._folder, weights=weights)

        with failing_on_all(f"{folder}: could not be written"):
            self._collective.together("draft model export", write)
        return True

    def close(self) -> None:
        self._sender.close()

    def _remember(self, sequences: Sequence[TrainSequence], version: int) -> int:
        """Return how many responses were cut."""
        known: Sequence[tuple[TopK | None, Tensor | None]] = [(None, None)] * len(sequences)
        if self.recorder is not None:
            known = self.recorder.take()
        for_head = isinstance(self.drafter, HeadTrainer)
        buffer = self.drafter.buffer
        before = buffer.too_long
        num_cut = buffer.add(
            [
                example_from(sequence, top_k, version=version, temperature=self._temperature, states=of_policy)
                for sequence, (top_k, of_policy) in zip(sequences, known, strict=True)
                if sequence.response_len and not (for_head and of_policy is None)
            ]
        )
        if buffer.too_long and not before:
            self._note(
                f"draft model: responses to prompts of {self.config.tokens_per_microbatch} tokens or more are not "
                "learned from."
            )
        skipped = any(s.response_len for s, (_, of_policy) in zip(sequences, known, strict=True) if of_policy is None)
        if for_head and self.recorder is not None and skipped and not len(buffer) and not self._told_of_states:
            self._told_of_states = True
            self._note(
                f"draft model: learns from no response: the hidden states of {self.recorder.max_tokens} tokens take "
                f"{MAX_BYTES >> 20} MiB, and all are longer. Lower distillation.tokens_per_microbatch to "
                f"{self.recorder.max_tokens}, to which they are then cut."
            )
        return num_cut

    def _learn(self, limit_s: float) -> tuple[RefreshStats | None, bool]:
        """Return (statistics, whether it failed)."""
        with self._on_device():
            try:
                return self.drafter.refresh(limit_s=limit_s, clock=self._clock), False
            except SpecActorError as error:  # on every rank alike, since what went wrong is a sum over ranks
                self._note(str(error))
        return None, True

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Have the draft model where it learns; else engines have that memory. After an error, which ends the run,
        nothing waits for other ranks."""
        self.drafter.reload()
        yield
        self._leave_device()

    def _leave_device(self) -> None:
        """Look at the weights and pack them where that is fast; they change nowhere else."""
        self._is_finite = self.drafter.is_finite()
        version = self.drafter.version
        # Had at any time: an engine may be dead now, and have a successor at the push.
        self._hands_over |= bool(self._engines()) or self._processes.oldest_version() is not None
        # It may be collective, so what this rank has packed, or has to hand over, does not decide it.
        if version and self._is_finite and self._gathered != version:
            weights = chain(self.drafter.named_weights(), self.drafter.fixed_weights())
            if self._hands_over:
                self._packed = self._sender.pack(weights, version=version)
            else:
                deque(weights, maxlen=0)
            self._gathered = version
        self.drafter.offload()

    def _is_sound(self) -> bool:
        """Return whether weights are finite. Collective."""
        sound = not self._collective.any(not self._is_finite)
        if not sound:
            self._note("draft model: has weights that are not finite. They are neither pushed, saved nor exported.")
        return sound

    def _hand(self, engine: Engine, weights: DraftWeights) -> str:
        problem = push_to_engine(engine, weights, timeout_s=BULK_S)
        if not problem:
            self._held[engine] = weights.draft_version
        return problem

    def _oldest(self) -> int:
        own = [self._held.get(engine, 0) for engine in self._engines()]
        of_processes = self._processes.oldest_version()
        own += [] if of_processes is None else [of_processes]
        return min((v for part in self._collective.gather(own, list[int]) for v in part), default=0)


def left_behind(checkpoint: Path, speculation: SpeculationConfig) -> str:
    """Return a note for a run that resumes there without refreshes."""
    draft_model = speculation.first_draft_model
    if draft_model not in speculation.in_use or not (checkpoint / FOLDER).is_dir():
        return ""
    return (
        f"{checkpoint} holds a draft model that was kept fresh; without refreshes drafts come from {draft_model}. "
        "Set --distillation.refresh to go on with it."
    )


def _metrics_of(stats: RefreshStats) -> dict[str, float]:
    if not stats.updates:
        return {"drafter/updates": 0, "drafter/tokens": 0}
    return {
        "drafter/updates": stats.updates,
        "drafter/tokens": stats.tokens,
        "drafter/loss": sum(stats.losses) / len(stats.losses),
        "drafter/kl": stats.kl,
        "drafter/overlap": stats.overlap,
        "drafter/grad_norm": stats.grad_norm,
    }
