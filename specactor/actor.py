"""One RL step, as every rank executes it: begin at `SpecActor.step`. A rank's own share happens in
`Collective.together`, after which all hold the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import cast

from specactor import hooks, measurements, samples
from specactor.config import Config
from specactor.config.train import gap_bound, learning_rate
from specactor.device_memory import DeviceMemory
from specactor.errors import CopiesDifferError, WeightSyncError
from specactor.parallel.collective import Collective
from specactor.progress import Progress
from specactor.replay.audit import Audit
from specactor.replay.recorder import StepRecorder
from specactor.rollout.child_process import RESTARTS_WITHIN
from specactor.rollout.collector import RolloutCollector, RolloutStats
from specactor.rollout.pool import EnginePool
from specactor.rollout.resume import stale_tokens
from specactor.trace import Span
from specactor.trainer.advantages import AdvantageKind, group_advantages
from specactor.trainer.drafter.refresh import Distillation
from specactor.trainer.policy import PolicyTrainer, TrainStats
from specactor.trainer.shards import RankShards
from specactor.types import ScoredGroup, TrainSequence
from specactor.weights_sync.sender import SyncReport, WeightSender


@dataclass(eq=False)
class SpecActor:
    config: Config
    _: KW_ONLY
    trainer: PolicyTrainer
    devices: DeviceMemory
    rollouts: RolloutCollector
    sender: WeightSender
    weights: RankShards
    collective: Collective
    progress: Progress
    distillation: Distillation | None  # keeps the draft model fresh; None: it does not learn
    on_trace: Callable[[int, Sequence[Mapping[str, Sequence[Span]]]], None]
    """It takes the number of a traced step and its spans, per host and process."""
    recorder: StepRecorder
    audit: Audit
    steps_done: int = 0
    version: int = 0
    _pushed: dict[str, float] = field(default_factory=dict)  # metrics of the draft model's last push
    _failed_syncs: list[int] = field(default_factory=list)  # versions; of syncs in which no engine died of its own
    _sync_s: float = 0.0
    _step_s: float = 0.0  # of the step before

    @property
    def pool(self) -> EnginePool:
        return self.rollouts.pool

    def start(self) -> None:
        """Record what the run starts with, and bring it to the engines."""
        # As after a step, while the trainer has the devices' memory: later its critic has no weights there, and moments
        # are on the host, where their digests are others.
        self.recorder.started(self.steps_done, self.rollouts.digest)
        with self.progress.phase("sync"):
            self.devices.to_weights(self.trainer)
            self.sync()

    def step(self, save: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Take policy version v to v + 1; return metrics without times and memory, equal on all ranks. `save` writes a
        due checkpoint, while the trainer has the devices' memory."""
        step = self.steps_done + 1
        traced = self.progress.recorder.on = step in self.config.tracking.trace
        self.rollouts.take_stats(trace=traced)  # what follows is counted from here
        groups = self.rollouts.collect(self.steps_done)
        rollout = self.rollouts.take_stats()
        audited = self.audit.look(step, self.version, groups, step_s=self._step_s)
        batch = self.learnable(groups)
        if self.distillation is not None:  # the draft model learns from all of them on every rank
            batch = samples.fetch(batch, range(len(batch)), samples.OF_EXAMPLE)
        with self.progress.phase("train"):
            self.devices.to_trainer(self.trainer)
            trained = self.train(batch)
        with self.progress.phase("record"):
            data, suspect = self.rollouts.digest, self.audit.is_suspect(audited, trained)
            self.recorder.stepped(step, self.version - 1, groups, batch, trained, data, is_suspect=suspect)
        audited |= self.audit.of_training(step, trained)
        self.steps_done = step
        refreshed = self.refresh(batch)
        save()
        with self.progress.phase("sync"):
            self.devices.to_weights(self.trainer)
            synced = self.sync()
        spent = self.progress.spent()
        self._sync_s, self._step_s = spent.get("sync", 0.0), sum(spent.values())
        metrics = measurements.of_step(groups, batch, trained, synced, version=self.version)
        metrics |= measurements.of_environments(groups, self.rollouts.num_failed)
        metrics["reward/failed"] = self.rollouts.num_unscored
        metrics |= self.rollouts.drawn
        metrics |= self.of_rollout(rollout, batch) | refreshed | self._pushed | audited
        if traced:
            self.progress.recorder.on = False
            own, *others = rollout.spans.values()
            self.on_trace(step, [{"trainer": self.progress.recorder.take(), **own}, *others])
        return metrics

    def learnable(self, groups: Sequence[ScoredGroup]) -> list[TrainSequence]:
        """Return the groups' sequences, with advantages."""
        kind, rewards = self.config.algorithm.advantage, [list(g.rewards) for g in groups]
        advantages = self._advantages(rewards, kind)
        return [
            TrainSequence(
                token_ids=samples.joined(t.prompt_ids, t.token_ids),
                prompt_len=len(t.prompt_ids),
                advantage=advantage,
                reward=reward,
                rollout_logprobs=t.logprobs,
                num_stale=stale_tokens(t, self.version) if self.config.rollout.partial else 0,
                group_id=group_id,
                is_branch=t is not first,
                routed_experts=t.routed_experts if self.config.train.routing_replay == "r3" else b"",
                loss_mask=t.loss_mask,
                seed=t.seed,
                num_seeded=self.audit.num_seeded(group, t),
            )
            for group_id, (group, of_group) in enumerate(zip(groups, advantages, strict=True))
            for first, advantage, reward in zip(group.trajectories, of_group, group.rewards, strict=True)
            for t in (first, *first.branches)
        ]

    def _advantages(self, rewards: list[list[float]], kind: str) -> list[list[float]]:
        if kind == "gae":  # the trainer makes one for each token, with its critic
            return [[0.0] * len(of_group) for of_group in rewards]
        if ":" not in kind:
            return group_advantages(rewards, cast("AdvantageKind", kind))
        own = self.collective.together("advantages", lambda: hooks.advantages_by(kind, rewards))
        return self.collective.gather(own, list[list[float]])[0]  # a hook may answer as it likes

    def train(self, batch: Sequence[TrainSequence]) -> TrainStats:
        """Make one or more optimizer updates towards the next version."""
        recorder = self.distillation.recorder if self.distillation is not None else None
        algorithm = self.config.algorithm
        still = algorithm.critic.warmup_steps if algorithm.advantage == "gae" else 0
        rate = learning_rate(self.steps_done, self.config.train, still=still)
        if still and self.steps_done == still:
            self.trainer.reset_optimizer()  # moments of gradients that moved nothing
        stats = self.trainer.train_step(batch, learning_rate=rate, recorder=recorder)
        if any(sequence.num_stale < sequence.response_len for sequence in batch):
            bound = gap_bound(self.config.train.max_logprob_gap, self.config.model.dtype)
            free = self.trainer.routes_freely
            measurements.check_agreement(stats, step=self.steps_done + 1, bound=bound, routes_freely=free)
        self.version += 1
        return stats

    def sync(self) -> SyncReport:
        """Replace dead engines, bring all to the versions of policy and draft model, and let them generate."""
        cause: WeightSyncError | None = None
        while True:
            restart = partial(self.pool.restart_lost, cause.ended if cause is not None else ())
            replaced = self.collective.together("engine restart", restart)
            for index in sorted(i for part in self.collective.gather(replaced, tuple[int, ...]) for i in part):
                self.progress.note(f"engine {index} had died and was started again")
            try:
                report = self.sender.push(self.weights, self.pool.engines, version=self.version)
            except CopiesDifferError:
                raise  # new engines would be given the same
            except WeightSyncError as error:
                self._count_failed(error)
                self.progress.note(f"{error} Trying again.")
                cause = error
                continue
            if report.note:
                self.progress.note(f"Weights go through buckets in every step: {report.note}.")
            if report.through_host:
                self.progress.note(f"Weights go through host memory: {report.through_host}.")
            self.pool.set_version(self.version)
            if self.distillation is not None:
                self._pushed = self.distillation.push()
            self.devices.to_engines()
            return report

    def _count_failed(self, error: WeightSyncError) -> None:
        """Raise on all ranks, where trying again helps no more: no engine was lost, or this happened too often."""
        lost = self.pool.lost()
        if not self.collective.any(bool(lost)):
            raise error
        if self.collective.any(not set(lost) <= set(error.ended)):
            return  # an engine died of its own, which the pool counts
        limit, since = self.config.rollout.engine.max_restarts, self.version - RESTARTS_WITHIN
        self._failed_syncs = [*(version for version in self._failed_syncs if version > since), self.version]
        if len(self._failed_syncs) > limit:
            raise WeightSyncError(
                f"rollout.engine.max_restarts: {limit + 1} weight syncs failed with engines that lived, allowed are "
                f"{limit} in {RESTARTS_WITHIN} steps. Leave out a host that damages data; the engines' logs are in the "
                f"run's folder, under engines/. The last one: {error}"
            ) from error

    def refresh(self, batch: Sequence[TrainSequence]) -> dict[str, float]:
        """Let the draft model learn from the batch; return metrics."""
        if self.distillation is None:
            return {}
        spent, is_last = self.progress.spent(), self.steps_done == self.config.train.steps
        step_s = sum(spent.get(phase, 0.0) for phase in ("rollout", "reward", "train")) + self._sync_s
        with self.progress.phase("refresh"):
            return self.distillation.refresh(batch, version=self.version - 1, step_s=step_s, is_last=is_last)

    def of_rollout(self, stats: RolloutStats, batch: Sequence[TrainSequence]) -> dict[str, float]:
        rollout = self.config.rollout
        woken = stats.drafters_woken if self.config.lends_devices else None
        moved = stats.groups_moved if self.config.parallel.engines > 1 else None
        is_dynamic = self.config.algorithm.dynamic_sampling != "off"  # it counts what it drew
        left = self.rollouts.left if rollout.oversample > 1 and not is_dynamic else None
        return (
            measurements.of_speculation(stats.counts)
            | measurements.of_drafters(stats.counts, stats.drafter_work)
            | measurements.of_tail(woken, moved, left, self.rollouts.open_tokens, batch)
        )

    def state(self) -> dict[str, object]:
        """Return what a checkpoint keeps beside the trainer's own state, whole on rank 0. Collective."""
        state = {"steps_done": self.steps_done, "version": self.version, **self.rollouts.state()}
        return state | ({"distillation": self.distillation.state()} if self.distillation is not None else {})

    def restore(self, state: dict[str, object]) -> None:
        self.steps_done = int(str(state["steps_done"]))
        self.version = int(str(state["version"]))
        self.rollouts.restore(state)
        if self.distillation is not None and isinstance(kept := state.get("distillation"), dict):
            self.distillation.restore(kept)
