"""The path of one RL step: `SpecActor.step`. (`run.run` builds an actor and steps it until the run is done.)

Every rank executes the same lines; a rank's own share of the work (driving its
engines, scoring some responses) happens inside `Collective.together`, after which all ranks go on with the same values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from specactor import measurements
from specactor.config import Config
from specactor.data.dataset import Dataset
from specactor.data.stream import PromptStream
from specactor.data.verifiers import get_verifier
from specactor.errors import AgreementError, EngineError, WeightSyncError
from specactor.parallel.collective import Collective
from specactor.progress import Progress
from specactor.rollout import open_groups
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.pool import EnginePool
from specactor.rollout.requests import greedy_requests, group_requests
from specactor.rollout.resume import stale_tokens
from specactor.rollout.speculation.counters import Counts, Figures, added, added_figures
from specactor.trace import Span
from specactor.trainer.advantages import group_advantages, informative, shape_overlong
from specactor.trainer.drafter.refresh import Distillation
from specactor.trainer.policy import PolicyTrainer, TrainStats
from specactor.trainer.schedule import learning_rate
from specactor.types import Problem, RolloutRequest, ScoredGroup, TrainSequence, Trajectory
from specactor.weights_sync.sender import SyncReport, WeightSender, WeightSource


@dataclass(frozen=True)
class Watched:
    """What engines and drafter processes of one rank, or of one host, said of themselves."""

    machine: str
    figures: Figures
    work: list[tuple[float, int]]
    """Per drafter process, seconds of drafting, and how many frames, requests and connections it dropped."""
    spans: dict[str, list[Span]]
    """Per process."""

    def __add__(self, other: Watched) -> Watched:
        """Of one host."""
        figures = added_figures([self.figures, other.figures])
        return Watched(self.machine, figures, self.work + other.work, other.spans | self.spans)


class SpecActor:
    """The policy in training, its engines, and where the run stands."""

    def __init__(
        self,
        config: Config,
        *,
        trainer: PolicyTrainer,
        pool: EnginePool,
        drafters: DrafterPool,
        sender: WeightSender,
        weights: WeightSource,
        collective: Collective,
        tokenizer: PreTrainedTokenizerBase,
        train_data: Dataset,
        eval_data: Dataset,
        progress: Progress,
        distillation: Distillation | None = None,
        machine: str = "",
        on_trace: Callable[[int, list[dict[str, list[Span]]]], None] = lambda step, spans: None,
        on_groups: Callable[[int, Sequence[ScoredGroup]], None] = lambda step, groups: None,
    ) -> None:
        """Args: what keeps the draft model fresh, if anything; name of this rank's host; what becomes of the spans of a
        step's rollout, per host and process; and of its scored responses."""
        self.config = config
        self.trainer = trainer
        self.pool = pool
        self.drafters = drafters
        self.sender = sender
        self.weights = weights
        self.collective = collective
        self.tokenizer = tokenizer
        self.train_data = train_data
        self.eval_data = eval_data
        self.progress = progress
        self.distillation = distillation
        self.machine = machine
        self.on_trace = on_trace
        self.on_groups = on_groups
        self.prompts = PromptStream(len(train_data), config.seed, shuffle=config.data.shuffle)
        self.open_groups: list[open_groups.OpenGroup] = []
        """That go on in the next step; equal on all ranks."""
        self.drafters_woken = 0
        """On devices of engines that had run dry, in this step so far."""
        """Of this rank's engines since the last step."""
        self.dropped: list[open_groups.OpenGroup] = []
        self.steps_done = 0
        self.version = 0

    def step(self) -> dict[str, float]:
        """One RL step: policy version v -> v + 1. Returns its metrics, but for times and memory; equal on all ranks."""
        traced = self.steps_done + 1 in self.config.tracking.trace
        self.watch(trace=traced)
        groups = self.collect()
        speculation, watched = self.speculation(), self.watch(trace=False)
        self.pool.learn(speculation)
        if traced:
            self.on_trace(self.steps_done + 1, [seen.spans for seen in watched])
        self.on_groups(self.steps_done + 1, groups)
        batch = self.learnable(groups)
        with self.progress.phase("train"):
            stats = self.train(batch)
        with self.progress.phase("sync"):
            report = self.sync()
        self.steps_done += 1
        metrics = measurements.of_step(groups, batch, stats, report, version=self.version)
        metrics |= measurements.of_speculation(speculation) | self.of_tail(batch)
        if self.distillation is not None:
            spent, is_last = self.progress.spent(), self.steps_done == self.config.train.steps
            with self.progress.phase("refresh"):
                metrics |= self.distillation.refresh(
                    batch,
                    version=self.version - 1,
                    step_s=sum(spent.get(phase, 0.0) for phase in ("rollout", "reward", "train", "sync")),
                    is_last=is_last,
                )
        figures = added_figures(seen.figures for seen in watched)
        return metrics | measurements.of_drafters(figures, [of for seen in watched for of in seen.work])

    def collect(self) -> list[ScoredGroup]:
        """Prompts -> responses -> rewards, until there are enough groups to learn from (DAPO: dynamic sampling)."""
        if self.config.rollout.oversample > 1:
            return self.collect_first()
        want = self.config.rollout.prompts_per_step
        dynamic = self.config.algorithm.dynamic_sampling
        rounds = 1 + self.config.algorithm.max_resample_rounds if dynamic else 1
        groups: list[ScoredGroup] = []
        spare: list[ScoredGroup] = []
        asked: list[Problem] = []
        for _ in range(rounds):
            problems = [self.train_data[i] for i in self.prompts.take(want - len(groups))]
            with self.progress.phase("rollout"):
                requests = group_requests(
                    problems,
                    config=self.config.rollout,
                    run_seed=self.config.seed,
                    step=self.steps_done,
                    earlier=asked,
                )
                asked += problems
                trajectories = self.rollout(requests)
            with self.progress.phase("reward"):
                scored = self.score_groups(problems, trajectories)
            for group in scored:
                (groups if not dynamic or informative(group.rewards) else spare).append(group)
            if len(groups) == want:
                break
        return groups + spare[: want - len(groups)]

    def collect_first(self) -> list[ScoredGroup]:
        """The groups that are complete first, of more than are wanted; the others are dropped, or kept open."""
        rollout, want = self.config.rollout, self.config.rollout.prompts_per_step
        num_fresh = open_groups.num_in_flight(want, rollout.oversample) - len(self.open_groups)
        problems = [self.train_data[i] for i in self.prompts.take(num_fresh)]
        with self.progress.phase("rollout"):
            requests = group_requests(problems, config=rollout, run_seed=self.config.seed, step=self.steps_done)
            groups = open_groups.opened(self.open_groups, [problem.index for problem in problems], requests)
            own = {engine.index for engine in self.pool.engines}
            share = open_groups.share(groups, want, engines=self.config.parallel.engines, own=own)
            found, stopped = self.generate([r for group in groups for r in group.pending], enough=share)
            groups, rest = open_groups.settled([group.after(found, stopped) for group in groups], want)
            self.open_groups, self.dropped = (rest, []) if rollout.partial else ([], rest)
        with self.progress.phase("reward"):
            return self.score_groups(
                [self.train_data[group.problem] for group in groups], [t for g in groups for t in g.trajectories]
            )

    def speculation(self) -> dict[str, Counts]:
        """What speculation did in all engines since the last call, per drafter; equal on all ranks."""
        if self.config.rollout.speculation.mode == "off":
            return {}
        own = self.collective.together("speculation", self.pool.speculation_counts)
        counts = added(self.collective.gather(own, dict[str, Counts]))
        self.progress.drafter_problems(counts)
        return counts

    def watch(self, *, trace: bool) -> list[Watched]:
        """What engines and drafter processes say of themselves, since the last call, per host; equal on all ranks.

        Args: whether to record spans from now on.
        """
        speculation = self.config.rollout.speculation
        traces = bool(self.config.tracking.trace) and speculation.mode != "off"
        if not (traces or speculation.is_decoupled):
            return []

        def look() -> Watched:
            figures = self.pool.speculation_figures()
            spans = self.pool.trace(on=trace) if traces else {}
            work = self.drafters.work(trace=trace)
            spans |= {name: of.spans for name, of in work.items()} if traces else {}
            told = [(of.busy_s, sum(of.drops.values())) for of in work.values()]
            return Watched(self.machine, figures, told, spans)

        by_machine: dict[str, Watched] = {}
        for seen in self.collective.gather(self.collective.together("watch", look), Watched):
            by_machine[seen.machine] = seen + by_machine[seen.machine] if seen.machine in by_machine else seen
        return list(by_machine.values())

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        """All responses, in the order of the requests, on every rank."""
        found, _ = self.generate(requests)
        return [found[request.request_id] for request in requests]

    def generate(
        self, requests: Sequence[RolloutRequest], *, enough: int | None = None
    ) -> tuple[dict[str, Trajectory], dict[str, RolloutRequest]]:
        """(responses, requests that were stopped when `enough` groups of this rank were complete), by id, on every
        rank. Lost engines are replaced on the way.
        """
        engines = self.config.parallel.engines
        own = {engine.index for engine in self.pool.engines}
        pending = [request for request in requests if request.group_id % engines in own]
        finished: list[Trajectory] = []
        stopped: list[RolloutRequest] = []
        missing = Counter(request.group_id for request in pending)
        while True:
            left = None if enough is None else enough - sum(count == 0 for count in missing.values())
            outcome = self.collective.together(
                "rollout",
                partial(self.pool.generate, pending, on_finished=self.progress.response, enough_groups=left),
            )
            finished += outcome.finished
            stopped += outcome.stopped
            missing.subtract(trajectory.group_id for trajectory in outcome.finished)
            self.drafters_woken += outcome.drafters_woken
            pending = list(outcome.unfinished)
            if not self.collective.any(bool(pending)):
                break
            self.sync()
        everyone = self.collective.gather(finished, list[Trajectory])
        by_id = {t.request_id: t for part in everyone for t in part}
        cut = next((t for t in by_id.values() if t.finish_reason == "abort"), None)
        if cut is not None:
            raise EngineError(
                f"request {cut.request_id}: SGLang aborted it after {len(cut.token_ids)} tokens, expected an end. "
                "See the engine's log in the run's folder; a larger rollout.engine.max_total_tokens may help."
            )
        if enough is None:
            return by_id, {}
        parts = self.collective.gather(stopped, list[RolloutRequest])
        return by_id, {request.request_id: request for part in parts for request in part}

    def score_groups(self, problems: Sequence[Problem], trajectories: Sequence[Trajectory]) -> list[ScoredGroup]:
        """Every rank scores its share; groups keep the order of the problems."""
        size = len(trajectories) // len(problems)
        scores = self.score([problems[i // size] for i in range(len(trajectories))], trajectories)
        a, limit = self.config.algorithm, self.config.rollout.max_new_tokens
        rewards = [
            shape_overlong(score, len(t.token_ids), limit, a.overlong_buffer, a.overlong_penalty)
            for score, t in zip(scores, trajectories, strict=True)
        ]
        cuts = [slice(i * size, (i + 1) * size) for i in range(len(problems))]
        return [
            ScoredGroup(
                problem=problem,
                trajectories=tuple(trajectories[cut]),
                scores=tuple(scores[cut]),
                rewards=tuple(rewards[cut]),
            )
            for problem, cut in zip(problems, cuts, strict=True)
        ]

    def score(self, problems: Sequence[Problem], trajectories: Sequence[Trajectory]) -> list[float]:
        """The verifier's score of each response, on every rank."""
        rank, world = self.collective.rank, self.collective.world

        def own_share() -> list[float]:
            return [
                get_verifier(problem.verifier)(
                    self.tokenizer.decode(list(trajectory.token_ids), skip_special_tokens=True), problem
                )
                for problem, trajectory in list(zip(problems, trajectories, strict=True))[rank::world]
            ]

        shares = self.collective.gather(self.collective.together("reward", own_share), list[float])
        return [shares[i % world][i // world] for i in range(len(trajectories))]

    def learnable(self, groups: Sequence[ScoredGroup]) -> list[TrainSequence]:
        """Groups -> sequences with advantages."""
        advantages = group_advantages([list(g.rewards) for g in groups], self.config.algorithm.advantage)
        return [
            TrainSequence(
                token_ids=t.prompt_ids + t.token_ids,
                prompt_len=len(t.prompt_ids),
                advantage=advantage,
                rollout_logprobs=t.logprobs,
                num_stale=stale_tokens(t, self.version) if self.config.rollout.partial else 0,
                group_id=group_id,
            )
            for group_id, (group, of_group) in enumerate(zip(groups, advantages, strict=True))
            for t, advantage in zip(group.trajectories, of_group, strict=True)
        ]

    def train(self, batch: Sequence[TrainSequence]) -> TrainStats:
        """One or more optimizer updates: the policy moves to its next version."""
        self.collective.together("release", self.pool.release_memory)  # engines run on other ranks' devices, too
        self.trainer.reload()
        recorder = self.distillation.recorder if self.distillation is not None else None
        rate = learning_rate(self.steps_done, self.config.train)
        stats = self.trainer.train_step(batch, learning_rate=rate, recorder=recorder)
        fresh = any(sequence.num_stale < sequence.response_len for sequence in batch)
        if fresh and not stats.logprob_gap_max <= self.config.train.max_logprob_gap:  # nan is no agreement either
            raise AgreementError(
                f"train.max_logprob_gap: at step {self.steps_done + 1} the engine and the trainer differ by "
                f"{stats.logprob_gap_max:.2e} in the log-probability of a sampled token, more than "
                f"{self.config.train.max_logprob_gap:.2e}. In float32 this means wrong weights or a wrong model in one "
                "of them; in bfloat16 allow more with --train.max-logprob-gap, and keep algorithm.tis_cap on."
            )
        self.version += 1
        self.trainer.offload()
        self.collective.barrier()
        self.collective.together("resume", self.pool.resume_memory)
        return stats

    def sync(self) -> SyncReport:
        """Bring every engine to the policy's version; replace engines that died."""
        cause: WeightSyncError | None = None
        for _ in range(self.config.rollout.engine.max_restarts + 1):
            replaced = self.collective.together("engine restart", self.pool.restart_lost)
            for index in sorted(i for part in self.collective.gather(replaced, tuple[int, ...]) for i in part):
                self.progress.note(f"engine {index} had died and was started again")
            try:
                report = self.sender.push(self.weights, self.pool.engines, version=self.version)
            except WeightSyncError as error:
                if not self.collective.any(self.pool.any_lost()):
                    raise
                self.progress.note(f"{error} Trying again.")
                cause = error
                continue
            self.pool.set_version(self.version)
            if self.distillation is not None:
                self.distillation.push()  # to engines that are new
            return report
        raise WeightSyncError(
            f"rollout.engine.max_restarts: engines were lost in {self.config.rollout.engine.max_restarts + 1} weight "
            f"syncs in a row. Their logs are in the run's folder, under engines/. The last one: {cause}"
        ) from cause

    def of_tail(self, batch: Sequence[TrainSequence]) -> dict[str, float]:
        """Metrics of what was done with the step's last requests, since the last call. Collective."""
        rollout, own, self.drafters_woken = self.config.rollout, self.drafters_woken, 0
        woken = sum(self.collective.gather(own, int)) if rollout.tail.drafters else None
        left = self.open_groups if rollout.partial else self.dropped
        return measurements.of_tail(woken, left if rollout.oversample > 1 else None, batch)

    def evaluate(self) -> list[ScoredGroup]:
        """The greedy policy's response to each held-out problem, in groups of one."""
        problems = [self.eval_data[i] for i in range(min(self.config.eval.problems, len(self.eval_data)))]
        with self.progress.phase("eval"):
            rollout = self.config.rollout
            requests = greedy_requests(
                problems,
                max_new_tokens=rollout.max_new_tokens,
                stop=rollout.stop,
                stop_token_ids=rollout.stop_token_ids,
            )
            trajectories = self.rollout(requests)
            scores = self.score(problems, trajectories)
            self.speculation()  # a step's counts are of its own rollout
            self.drafters_woken = 0
        return [
            ScoredGroup(problem=problem, trajectories=(trajectory,), scores=(score,), rewards=(score,))
            for problem, trajectory, score in zip(problems, trajectories, scores, strict=True)
        ]

    def state(self) -> dict[str, object]:
        """What a checkpoint keeps beside the trainer's own state."""
        state = {"steps_done": self.steps_done, "version": self.version, "prompts": self.prompts.state()}
        if self.config.rollout.partial:
            state["open_groups"] = open_groups.state(self.open_groups)
        return state | ({"distillation": self.distillation.state()} if self.distillation is not None else {})

    def restore(self, state: dict[str, object]) -> None:
        self.steps_done = int(str(state["steps_done"]))
        self.version = int(str(state["version"]))
        self.prompts.restore(state["prompts"])
        if self.config.rollout.partial:
            size = self.config.rollout.group_size
            self.open_groups = open_groups.restored(state.get("open_groups", []), group_size=size)
        if self.distillation is not None and isinstance(kept := state.get("distillation"), dict):
            self.distillation.restore(kept)
