"""From prompts to scored groups: what a step learns from.

Every rank executes the same lines; a rank's own share (driving its engines, scoring some responses) happens inside
`Collective.together`, after which all ranks go on with the same values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from transformers import PreTrainedTokenizerBase

from specactor.config import Config
from specactor.data.dataset import Dataset
from specactor.data.stream import PromptStream
from specactor.data.verifiers import get_verifier
from specactor.errors import EngineError
from specactor.parallel.collective import Collective
from specactor.progress import Progress
from specactor.rollout import open_groups
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.pool import EnginePool
from specactor.rollout.requests import greedy_requests, group_requests
from specactor.rollout.speculation.counters import Counts, Figures, added, added_figures
from specactor.trace import Span
from specactor.trainer.advantages import informative, shape_overlong
from specactor.types import Problem, RolloutRequest, ScoredGroup, Trajectory

MAX_RESAMPLE_ROUNDS = 3
"""Times that dynamic sampling draws further prompts in one step. Each costs a rollout; groups may be missing then."""


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """What engines and drafter processes did in a rollout: those of one rank, or of all ranks."""

    counts: dict[str, Counts]
    """What speculation did, per drafter; plain rounds stand under "off"."""
    figures: Figures
    """What drafters counted themselves."""
    drafter_work: list[tuple[float, int]]
    """Per drafter process, its seconds of drafting, and how many frames, requests and connections it dropped."""
    drafters_woken: int
    """Drafter processes that were woken on devices of engines that had run dry."""
    spans: dict[str, dict[str, list[Span]]]
    """What happened when, by host and process; clocks of two hosts have nothing to do with each other."""

    @classmethod
    def total(cls, parts: Sequence[RolloutStats]) -> RolloutStats:
        """Add up the stats of several ranks; the hosts keep the order in which they come."""
        spans: dict[str, dict[str, list[Span]]] = {}
        for part in parts:
            for host, processes in part.spans.items():
                spans.setdefault(host, {}).update(processes)
        return cls(
            counts=added(part.counts for part in parts),
            figures=added_figures(part.figures for part in parts),
            drafter_work=[work for part in parts for work in part.drafter_work],
            drafters_woken=sum(part.drafters_woken for part in parts),
            spans=spans,
        )


class RolloutCollector:
    """The engines and drafters of all ranks, the prompts, and the groups that go on in the next step."""

    def __init__(
        self,
        config: Config,
        *,
        pool: EnginePool,
        drafters: DrafterPool,
        collective: Collective,
        tokenizer: PreTrainedTokenizerBase,
        train_data: Dataset,
        eval_data: Dataset,
        progress: Progress,
        host: str,
        replace_lost: Callable[[], object],
    ) -> None:
        """
        Args:
            host: the name of this rank's host.
            replace_lost: starts lost engines again, with the policy's weights; called on all ranks together.
        """
        self.config = config
        self.pool = pool
        self.drafters = drafters
        self.collective = collective
        self.tokenizer = tokenizer
        self.train_data = train_data
        self.eval_data = eval_data
        self.progress = progress
        self.host = host
        self.replace_lost = replace_lost
        self.prompts = PromptStream(len(train_data), config.seed, shuffle=config.data.shuffle)
        self.open_groups: list[open_groups.OpenGroup] = []
        """Groups that go on in the next step; equal on all ranks."""
        self.left: list[open_groups.OpenGroup] = []
        """Groups that the last step began and did not learn from."""
        self._drafters_woken = 0

    def collect(self, step: int) -> list[ScoredGroup]:
        """Return `rollout.prompts_per_step` scored groups for the step after `step` finished ones."""
        if self.config.rollout.oversample > 1:
            return self._collect_first(step)
        want = self.config.rollout.prompts_per_step
        dynamic = self.config.algorithm.dynamic_sampling
        rounds = 1 + MAX_RESAMPLE_ROUNDS if dynamic else 1
        groups: list[ScoredGroup] = []
        spare: list[ScoredGroup] = []
        asked: list[Problem] = []
        for _ in range(rounds):
            problems = [self.train_data[i] for i in self.prompts.take(want - len(groups))]
            with self.progress.phase("rollout"):
                requests = group_requests(
                    problems, config=self.config.rollout, run_seed=self.config.seed, step=step, earlier=asked
                )
                asked += problems
                trajectories = self._generate_all(requests)
            with self.progress.phase("reward"):
                scored = self._score_groups(problems, trajectories)
            for group in scored:
                (groups if not dynamic or informative(group.rewards) else spare).append(group)
            if len(groups) == want:
                break
        return groups + spare[: want - len(groups)]

    def collect_again(self, step: int, group: int, sample: int | None) -> list[ScoredGroup]:
        """Return one group of the step after `step` finished ones, or one response of it, without the others."""
        problems = [self.train_data[i] for i in self.prompts.take(self.config.rollout.prompts_per_step)]
        requests = group_requests(problems, config=self.config.rollout, run_seed=self.config.seed, step=step)
        wanted = [r for r in requests if r.group_id == group and r.request_id.endswith(f".{sample}") | (sample is None)]
        with self.progress.phase("rollout"):
            trajectories = self._generate_all(wanted)
        with self.progress.phase("reward"):
            return self._score_groups([problems[group]], trajectories)

    def evaluate(self) -> list[ScoredGroup]:
        """Return the greedy policy's response to each held-out problem, in groups of one."""
        problems = [self.eval_data[i] for i in range(min(self.config.eval.problems, len(self.eval_data)))]
        rollout = self.config.rollout
        requests = greedy_requests(
            problems,
            max_new_tokens=rollout.max_new_tokens,
            stop=rollout.stop,
            stop_token_ids=rollout.stop_token_ids,
        )
        with self.progress.phase("eval"):
            trajectories = self._generate_all(requests)
            scores = self._score(problems, trajectories)
            self.stats()  # the next step counts from here
        return [
            ScoredGroup(problem=problem, trajectories=(trajectory,), scores=(score,), rewards=(score,))
            for problem, trajectory, score in zip(problems, trajectories, scores, strict=True)
        ]

    def stats(self, *, trace: bool = False) -> RolloutStats:
        """Return what happened since the last call, equal on all ranks; tell what is wrong with drafters.

        Args:
            trace: whether to record spans from now on.
        """
        own = self.collective.together("stats", partial(self._own_stats, trace))
        stats = RolloutStats.total(self.collective.gather(own, RolloutStats))
        self.progress.drafter_problems(stats.counts)
        return stats

    def _own_stats(self, trace: bool) -> RolloutStats:
        woken, self._drafters_woken = self._drafters_woken, 0
        speculates = self.config.rollout.speculation.mode != "off"
        work = self.drafters.work(trace=trace)
        spans = self.pool.trace(on=trace) if speculates and self.config.tracking.trace else {}
        return RolloutStats(
            counts=self.pool.speculation_counts() if speculates else {},
            figures=self.pool.speculation_figures() if speculates else {},
            drafter_work=[(of.busy_s, sum(of.drops.values())) for of in work.values()],
            drafters_woken=woken,
            spans={self.host: spans | {name: of.spans for name, of in work.items()}},
        )

    def _collect_first(self, step: int) -> list[ScoredGroup]:
        """Return the groups that are complete first, of more than are wanted; drop the others, or keep them open."""
        rollout, want = self.config.rollout, self.config.rollout.prompts_per_step
        num_fresh = open_groups.num_in_flight(want, rollout.oversample) - len(self.open_groups)
        problems = [self.train_data[i] for i in self.prompts.take(num_fresh)]
        with self.progress.phase("rollout"):
            requests = group_requests(problems, config=rollout, run_seed=self.config.seed, step=step)
            groups = open_groups.opened(self.open_groups, [problem.index for problem in problems], requests)
            own = {engine.index for engine in self.pool.engines}
            share = open_groups.share(groups, want, engines=self.config.parallel.engines, own=own)
            finished, stopped = self._generate([r for group in groups for r in group.pending], enough=share)
            groups, self.left = open_groups.settled([group.after(finished, stopped) for group in groups], want)
            self.open_groups = self.left if rollout.partial else []
        with self.progress.phase("reward"):
            return self._score_groups(
                [self.train_data[group.problem] for group in groups], [t for g in groups for t in g.trajectories]
            )

    def _generate_all(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        """Return all responses, in the order of the requests, on every rank."""
        finished, _ = self._generate(requests)
        return [finished[request.request_id] for request in requests]

    def _generate(
        self, requests: Sequence[RolloutRequest], *, enough: int | None = None
    ) -> tuple[dict[str, Trajectory], dict[str, RolloutRequest]]:
        """Return finished responses and stopped requests, by id, on every rank. Replace lost engines on the way.

        Args:
            enough: requests are stopped when this many groups of this rank are complete; None stops none.
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
            self._drafters_woken += outcome.drafters_woken
            pending = list(outcome.unfinished)
            if not self.collective.any(bool(pending)):
                break
            self.replace_lost()
        by_id = {t.request_id: t for t in chain(*self.collective.gather(finished, list[Trajectory]))}
        cut = next((t for t in by_id.values() if t.finish_reason == "abort"), None)
        if cut is not None:
            raise EngineError(
                f"request {cut.request_id}: SGLang aborted it after {len(cut.token_ids)} tokens, expected an end. "
                "See the engine's log in the run's folder; a larger rollout.engine.max_total_tokens may help."
            )
        if enough is None:
            return by_id, {}
        return by_id, {r.request_id: r for r in chain(*self.collective.gather(stopped, list[RolloutRequest]))}

    def _score_groups(self, problems: Sequence[Problem], trajectories: Sequence[Trajectory]) -> list[ScoredGroup]:
        """Score every response, and shape the scores into rewards; groups keep the order of the problems."""
        size = len(trajectories) // len(problems)
        scores = self._score([problems[i // size] for i in range(len(trajectories))], trajectories)
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

    def _score(self, problems: Sequence[Problem], trajectories: Sequence[Trajectory]) -> list[float]:
        """Return the verifier's score of each response, on every rank; each rank computes a share."""
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

    def state(self) -> dict[str, object]:
        """Return what a checkpoint keeps: the position in the prompts, and the open groups."""
        state: dict[str, object] = {"prompts": self.prompts.state()}
        if self.config.rollout.partial:
            state["open_groups"] = open_groups.state(self.open_groups)
        return state

    def restore(self, state: dict[str, object]) -> None:
        self.prompts.restore(state["prompts"])
        if self.config.rollout.partial:
            size = self.config.rollout.group_size
            self.open_groups = open_groups.restored(state.get("open_groups", []), group_size=size)
