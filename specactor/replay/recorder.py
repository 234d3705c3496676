"""Records the steps of a run while it trains."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib import metadata
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from specactor import __version__
from specactor.config import Config
from specactor.data.environment import environment_of
from specactor.parallel.collective import Collective
from specactor.recipes import to_json
from specactor.replay.records import (
    KEPT_STEPS,
    RankWeights,
    SampleRecord,
    StepRecord,
    drop_before,
    file_of,
    steps_of,
    write,
)
from specactor.samples import experts_of, is_here
from specactor.trainer import optimizer
from specactor.trainer.policy import PolicyTrainer, TrainStats
from specactor.types import ScoredGroup, TrainSequence, Trajectory
from specactor.weights_sync.digest import digest

LIBRARIES = ("torch", "sglang", "megatron-core", "transformers", "mbridge", "triton", "transformer-engine", "numpy")


@dataclass(eq=False)
class StepRecorder:
    """Writes a `StepRecord` per step on rank 0, with digests of all ranks' parameters and moments."""

    config: Config
    run: Path
    _: KW_ONLY
    trainer: PolicyTrainer
    collective: Collective
    written_bytes: int = 0  # by the last step, on rank 0

    def started(self, step: int, data: Callable[[], int]) -> None:
        """Record what the run starts with, unless that step has its record. Collective. `data` returns a
        digest of where the data stream stands, and is collective too."""
        if self.config.tracking.record == "off":
            return
        weights, stands = self._weights(), data()
        if self.collective.rank:
            return
        for later in (s for s in steps_of(self.run) if s > step):
            file_of(self.run, later).unlink()  # of a history that was left by resuming from an earlier checkpoint
        if not file_of(self.run, step).exists():
            write(self.run, self._record(data=stands, step=step, weights=weights))

    def stepped(
        self,
        step: int,
        version: int,
        groups: Sequence[ScoredGroup],
        batch: Sequence[TrainSequence],
        stats: TrainStats | None,
        data: Callable[[], int] | None,
        *,
        is_suspect: bool = False,
    ) -> None:
        """Record what was sampled and, unless `stats` is None, learned from it. Collective. `is_suspect`: all samples
        are kept whole, for a replay. `data`: as of `started`; None where a part of the step was generated."""
        if self.config.tracking.record == "off":
            return
        weights, stands = self._weights() if stats is not None else (), 0 if data is None else data()
        places = [(g, k) for g, group in enumerate(groups) for k in range(len(group.trajectories))]
        # A session's branches stand behind its first sequence.
        firsts = [0, *accumulate(1 + len(groups[g].trajectories[k].branches) for g, k in places)]
        advantages = [batch[first].advantage for first in firsts[:-1]] if batch else [0.0] * len(places)
        own = {
            i: self._sample(groups[g], k, advantages[i], is_whole=is_suspect or (i + step) % 16 == 0)
            for i, (g, k) in enumerate(places)
            if is_here(groups[g].trajectories[k])
        }
        parts = self.collective.gather(own, dict[int, SampleRecord], only_first=True)
        if self.collective.rank:
            return
        known = dict(chain(*(part.items() for part in parts)))
        samples = tuple(known[i] for i in range(len(places)))
        metrics = {} if stats is None else stats.numbers()
        record = self._record(
            data=stands, step=step, version=version, samples=samples, metrics=metrics, weights=weights
        )
        self.written_bytes = write(self.run, record)
        drop_before(self.run, step - KEPT_STEPS)

    def _sample(self, group: ScoredGroup, k: int, advantage: float, *, is_whole: bool) -> SampleRecord:
        t = group.trajectories[k]
        is_agents = hasattr(environment_of(group.problem.verifier), "run")
        return SampleRecord.of(
            request_id=t.request_id,
            group=t.group_id,
            sample=int(t.request_id.rpartition(".")[2]),
            problem=group.problem.index,
            seed=t.seed,
            spans=tuple((s.version, s.start, s.end) for s in t.spans),
            finish_reason=t.finish_reason,
            prompt_ids=t.prompt_ids,
            token_ids=t.token_ids,
            logprobs=t.logprobs,
            routed_experts=experts_of(t.routed_experts).astype(np.int16).tobytes(),
            score=group.scores[k],
            reward=group.rewards[k],
            advantage=advantage,
            is_whole=self.config.tracking.record == "full" or is_whole,
            seeded=t.first_turn_len if t.loss_mask and is_agents else None,
            branches=_digest_of(t.branches),
        )

    def _record(self, **rest: Any) -> StepRecord:
        engines, config = self.config.parallel.engines, to_json(self.config)
        return StepRecord(config=config, libraries=libraries(), engines=engines, **rest)

    def _weights(self) -> tuple[RankWeights, ...]:
        from megatron.core import parallel_state

        place = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
        models = [("", self.trainer.chunks)]
        moments = [optimizer.digest_of(self.trainer.optimizer)]
        if self.trainer.critic is not None:
            models.append(("critic.", self.trainer.critic.chunks))
            moments.append(optimizer.digest_of(self.trainer.critic.optimizer))
        digests = {
            f"{whose}{i}.{name}" if len(chunks) > 1 else whose + name: digest(parameter)
            for whose, chunks in models
            for i, chunk in enumerate(chunks)
            for name, parameter in chunk.module.named_parameters()
        }
        own = RankWeights(place=place, digests=digests, optimizer=xxhash.xxh3_64_intdigest(str(moments).encode()))
        return tuple(self.collective.gather(own, RankWeights))


def _digest_of(branches: Sequence[Trajectory]) -> int:
    digest = xxhash.xxh3_64()
    for t in branches:
        spans = [(s.version, s.start, s.end) for s in t.spans]
        digest.update(f"{len(t.prompt_ids)} {len(t.token_ids)} {spans}".encode())
        digest.update(np.array([*t.prompt_ids, *t.token_ids], np.int32).tobytes())
        digest.update(np.array(t.logprobs, np.float32).tobytes())
    return digest.intdigest() if branches else 0


def libraries() -> dict[str, str]:
    found = {"specactor": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | ({"OMP_NUM_THREADS": threads} if (threads := os.environ.get("OMP_NUM_THREADS")) else {})
