"""From prompts to scored groups.

All ranks execute the same lines; what one does alone stands in `Collective.together`.
"""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import chain
from statistics import fmean

import xxhash
from transformers import PreTrainedTokenizerBase

from specactor import hooks, samples
from specactor.config import Config
from specactor.data.dataset import SAME_ROWS, Dataset
from specactor.data.stream import CurriculumStream, MixedStream, PromptStream
from specactor.errors import DataError, EngineError
from specactor.parallel.collective import Collective
from specactor.progress import Progress
from specactor.rollout import resume
from specactor.rollout.conversations import Conversations
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.grading import Grading
from specactor.rollout.pool import EnginePool, RolloutOutcome
from specactor.rollout.refill import Refill
from specactor.rollout.requests import by_id, group_requests, held_out_requests, sampling_of
from specactor.rollout.speculation.counters import Counts, added
from specactor.rollout.waiting import Waiting, held_back
from specactor.trace import Span
from specactor.trainer.advantages import informative, shape_overlong
from specactor.types import DrawnProblem, Problem, RolloutRequest, ScoredGroup, Trajectory

PHASES = ("rollout", "reward")
OF_VERIFIER = re.compile(r"[^:]+: verifier \S+:")  # how a verifier's failure begins: its kind, then whose it is


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    counts: dict[str, Counts]  # per drafter; plain rounds stand under "off"
    drafter_work: list[tuple[float, int]]  # per process: seconds of drafting; frames, requests and connections dropped
    drafters_woken: int  # on devices of engines that had run dry
    groups_moved: int  # begun in place of another rank's, whose engines were full
    unreleased: list[str]  # whose `close` failed, of environments and agents, and why
    spans: dict[str, dict[str, list[Span]]]  # by host and process; hosts' clocks are unrelated

    @classmethod
    def total(cls, parts: Sequence[RolloutStats]) -> RolloutStats:
        spans: dict[str, dict[str, list[Span]]] = {}
        for part in parts:
            for host, processes in part.spans.items():
                spans.setdefault(host, {}).update(processes)
        return cls(
            counts=added(part.counts for part in parts),
            drafter_work=[work for part in parts for work in part.drafter_work],
            drafters_woken=sum(part.drafters_woken for part in parts),
            groups_moved=sum(part.groups_moved for part in parts),
            unreleased=[why for part in parts for why in part.unreleased],
            spans=spans,
        )


@dataclass(eq=False)
class RolloutCollector:
    config: Config
    _: KW_ONLY
    pool: EnginePool
    drafters: DrafterPool
    grading: Grading
    collective: Collective
    tokenizer: PreTrainedTokenizerBase
    train_data: Dataset
    eval_data: Mapping[str, Dataset]
    progress: Progress
    host: str  # this rank's
    max_prompt_tokens: int  # of an environment's first prompt
    prompt_limit: str = ""  # why no more
    replace_lost: Callable[[], object]  # collective; new engines get the policy's weights

    def __post_init__(self) -> None:
        config, data = self.config, self.train_data
        weights, shuffle = [1.0, *config.data.mix.values()], config.data.order != "source"
        stream: PromptStream | MixedStream = PromptStream(len(data), config.seed, shuffle=shuffle)
        if len(weights) > 1:
            stream = MixedStream(data.sizes, weights, config.seed, shuffle=shuffle)
        self.prompts: PromptStream | MixedStream | CurriculumStream = stream
        if config.data.order == "curriculum":
            self.prompts = CurriculumStream(stream, config.seed, sizes=data.sizes)
        self.open_groups: list[resume.OpenGroup] = []  # go on in the next step; finished responses stay on one rank
        self.left: list[resume.OpenGroup] = []  # begun in the last step, and not learned from
        self.open_tokens = 0  # begun of their other responses
        self.num_failed = self.num_unscored = 0  # of the last step: conversations, and responses whose verifier failed
        self._first_failure, self._unreleased = "", list[str]()
        self._warned: set[str] = set()  # verifiers' kinds of failures that were reported
        self._drafters_woken = self._groups_moved = 0
        self.drawn: dict[str, float] = {}
        """With dynamic sampling metrics of all groups that the step drew, kept or not."""
        self._num_rollouts = 0  # equal on all ranks

    def collect(self, step: int) -> list[ScoredGroup]:
        """Return the scored groups of the step after `step` finished ones.

        Raises DataError when failures have left none.
        """
        self.num_failed, self.num_unscored, self.drawn = 0, 0, {}
        if self.config.algorithm.dynamic_sampling != "off":
            groups = self._collect_teaching(step)
        elif self.config.rollout.oversample > 1:
            groups = self._collect_first(step)
        else:
            groups = self._collect_all(step)
        if not groups:
            raise DataError(
                f"environments and verifiers: {self.num_failed + self.num_unscored} responses of a step failed, and no "
                f"group is left to learn from; the first: {self._first_failure}. Correct what failed, or raise "
                "rollout.environment_timeout_s."
            )
        if isinstance(self.prompts, CurriculumStream):
            for group in groups:
                self.prompts.learn(group.problem.index, fmean(group.scores))
        return groups

    def _collect_all(self, step: int) -> list[ScoredGroup]:
        problems = self.train_data.drawn(self.prompts.take(self.config.rollout.prompts_per_step))
        requests = group_requests(problems, config=self.config.rollout, run_seed=self.config.seed, step=step)
        trajectories = self._generate_all(requests, problems)
        return self._score_groups(problems, trajectories)

    def _collect_teaching(self, step: int) -> list[ScoredGroup]:
        rollout, want = self.config.rollout, self.config.rollout.prompts_per_step
        begin, drawn = self.prompts.state(), list[DrawnProblem]()
        ahead = resume.num_in_flight(want, rollout.oversample)
        own = {engine.index for engine in self.pool.engines}

        def requests_of(number: int) -> list[RolloutRequest]:
            drawn.extend(self.train_data.drawn(self.prompts.take(number + 1 - len(drawn))))
            earlier, own_problem = drawn[:number], [drawn[number]]
            return group_requests(own_problem, config=rollout, run_seed=self.config.seed, step=step, earlier=earlier)

        refill = Refill(
            want=want,
            ahead=ahead,
            most=max(ahead, 4 * want),
            size=rollout.group_size,
            requests_of=requests_of,
            problem_of=lambda request: drawn[request.group_id],
            teaches=lambda number, responses: self._teaches(drawn[number], responses),
            store=self.collective.store,
            prefix=f"groups/{step}",
            is_own=lambda number: number % self.config.parallel.engines in own,
        )
        found, _ = self._generate([], [], refill=refill)
        kept = refill.kept
        assert kept is not None
        # What was drawn ahead and is not needed is drawn again in the next step.
        num_used = kept[-1] + 1 if len(kept) == want else refill.most
        self.prompts.restore(begin)
        drawn[:] = self.train_data.drawn(self.prompts.take(num_used))
        rates = {number: rate for number in range(num_used) if not math.isnan(rate := refill.rates[number])}
        if isinstance(self.prompts, CurriculumStream):  # also of what nothing is learned from
            for number, rate in rates.items():
                self.prompts.learn(drawn[number].index, rate)
        numbers = kept or range(num_used)
        of = {number: [found[r.request_id] for r in requests_of(number)] for number in range(num_used)}
        self.drawn = {
            "reward/drawn_groups": num_used,
            **({"reward/drawn_mean": fmean(rates.values())} if rates else {}),
            "rollout/tokens": sum(t.num_sampled for own in of.values() for t in own),
            "rollout/responses": num_used * rollout.group_size,
        }
        groups = self._score_groups(
            [drawn[number] for number in numbers],
            [t for n in numbers for t in of[n]],
            finished=[t for own in of.values() for t in own],
        )
        refill.forget()
        if len(kept) < want and groups:
            self._tell_few(len(kept), num_used)
        return groups[:want]

    def _tell_few(self, kept: int, drawn: int) -> None:
        """Say what a step learns from. Raises DataError where a filter of the user's has left nothing."""
        name, setting = self.config.algorithm.dynamic_sampling, "algorithm.dynamic_sampling"
        if not kept and ":" in name:
            raise DataError(
                f"{setting}: {name} kept none of the {drawn} groups that a step draws at most, expected at least one. "
                "Let it keep more, learn from other problems, or raise rollout.prompts_per_step."
            )
        # Equal scores have no advantages: such a step hardly moves the policy, and the next one draws other problems.
        rest = "It learns from these alone." if kept else "It goes on with groups whose scores are equal."
        self.progress.note(f"{setting}: of {drawn} groups, which a step draws at most, {kept} teach something. {rest}")

    def _teaches(self, problem: Problem, responses: Sequence[Trajectory]) -> tuple[bool, float]:
        """Return whether to learn from a group, and its mean score, nan where failures left nothing to compare."""
        responses = sorted(responses, key=lambda t: int(t.request_id.rpartition(".")[2]))
        group = self._group(problem, [self.grading.scored(t) for t in responses])
        if group is None:
            return False, math.nan  # it tells nothing of its problem
        name = self.config.algorithm.dynamic_sampling
        return hooks.keeps(name, group) if ":" in name else informative(group.scores), fmean(group.scores)

    def collect_again(self, step: int, alone: Sequence[str]) -> list[ScoredGroup]:
        """As `collect`, for these groups ("3") or responses ("3.1") alone, each generated alone."""
        problems = self.train_data.drawn(self.prompts.take(self.config.rollout.prompts_per_step))
        requests = group_requests(problems, config=self.config.rollout, run_seed=self.config.seed, step=step)
        found: list[ScoredGroup] = []
        for name in alone:
            group, _, sample = name.partition(".")
            end = f".{sample}" if sample else ""
            wanted = [r for r in requests if r.group_id == int(group) and r.request_id.endswith(end)]
            problem = [problems[int(group)]]
            trajectories = self._generate_all(wanted, problem)
            found += self._score_groups(problem, trajectories)
        return found

    def evaluate(self) -> dict[str, list[ScoredGroup]]:
        """Return the responses to held-out problems, by set; one greedy response each, or more."""
        found = {name: self._evaluated(data[: self.config.eval.problems]) for name, data in self.eval_data.items()}
        with self.progress.phase("eval"):
            self.take_stats()  # the next step counts from here
            # After a resume no evaluation comes before the step: keys left of one would change the step's last bits.
            self.collective.together("flush", self.pool.flush)
        return found

    def _evaluated(self, problems: Sequence[Problem]) -> list[ScoredGroup]:
        size = self.config.eval.samples
        requests = held_out_requests(problems, config=self.config.rollout, run_seed=self.config.seed, samples=size)
        trajectories = self._generate_all(requests, problems, phases=("eval", "eval"))
        unscored = {t.request_id: t.failure for t in trajectories if OF_VERIFIER.match(t.failure)}
        if unscored:
            self.progress.note(
                f"held-out problems: {len(unscored)} of {len(trajectories)} responses have no score and do not count; "
                f"the first: {next(iter(unscored.values()))}"
            )
        self._tell_failures([t for t in trajectories if t.request_id not in unscored])
        groups = []
        for i, problem in enumerate(problems):
            scored = [t for t in trajectories[i * size : (i + 1) * size] if t.request_id not in unscored]
            scores = tuple(t.reward or 0.0 for t in scored)
            groups.append(ScoredGroup(problem=problem, trajectories=tuple(scored), scores=scores, rewards=scores))
        return samples.whole(groups, wanted=self.collective.rank == 0)  # which writes them

    def take_stats(self, *, trace: bool = False) -> RolloutStats:
        """Return all ranks' stats since the last call; `trace`: see `Engine.trace`."""
        own = self.collective.together("stats", partial(self._own_stats, trace))
        stats = RolloutStats.total(self.collective.gather(own, RolloutStats))
        self.progress.drafter_problems(stats.counts)
        self.progress.unreleased(stats.unreleased)
        return stats

    def _own_stats(self, trace: bool) -> RolloutStats:
        woken, self._drafters_woken = self._drafters_woken, 0
        moved, self._groups_moved = self._groups_moved, 0
        speculates = self.config.rollout.speculation.mode != "off"
        work = self.drafters.work(trace=trace)
        spans = self.pool.trace(on=trace) if speculates and self.config.tracking.trace else {}
        return RolloutStats(
            counts=self.pool.speculation_counts() if speculates else {},
            drafter_work=[(of.busy_s, sum(of.drops.values())) for of in work.values()],
            drafters_woken=woken,
            groups_moved=moved,
            unreleased=[self._unreleased.pop(0) for _ in self._unreleased[:]],
            spans={self.host: spans | {name: of.spans for name, of in work.items()}},
        )

    def _collect_first(self, step: int) -> list[ScoredGroup]:
        """Return the first complete groups; drop the others, or keep them open."""
        rollout, want = self.config.rollout, self.config.rollout.prompts_per_step
        num_fresh = resume.num_in_flight(want, rollout.oversample) - len(self.open_groups)
        problems = self.train_data.drawn(self.prompts.take(num_fresh))
        requests = group_requests(problems, config=rollout, run_seed=self.config.seed, step=step)
        groups = resume.opened(self.open_groups, [problem.index for problem in problems], requests)
        pending = [r for group in groups for r in group.pending]
        of_pending = [self.train_data[group.problem] for group in groups for _ in group.pending]
        finished, stopped = self._generate(pending, of_pending, enough=want - sum(group.complete for group in groups))
        groups, self.left = resume.settled([group.after(finished, stopped) for group in groups], want)
        self.open_groups = self.left if rollout.partial else []
        of_groups = [self.train_data[group.problem] for group in groups]
        return self._score_groups(of_groups, [t for group in groups for t in group.trajectories])

    def _generate_all(
        self, requests: Sequence[RolloutRequest], problems: Sequence[Problem], *, phases: tuple[str, str] = PHASES
    ) -> list[Trajectory]:
        size = len(requests) // len(problems)
        finished, _ = self._generate(requests, [problem for problem in problems for _ in range(size)], phases=phases)
        return [finished[request.request_id] for request in requests]

    def _generate(
        self,
        requests: Sequence[RolloutRequest],
        problems: Sequence[Problem],
        *,
        enough: int | None = None,
        refill: Refill | None = None,
        phases: tuple[str, str] = PHASES,
    ) -> tuple[dict[str, Trajectory], dict[str, RolloutRequest]]:
        """Return finished responses and stopped requests on every rank; tokens stay on one (`specactor.samples`). Stop
        at `enough` groups that all ranks together complete."""
        of = {request.request_id: problem for request, problem in zip(requests, problems, strict=True)}
        self._num_rollouts += 1
        waiting = self._held_back(requests if enough is None else [])
        pending = [r for r in waiting.without(requests) if r.group_id % self.config.parallel.engines in waiting.own]

        def problem_of(known: RolloutRequest | Trajectory) -> Problem:
            return of[known.request_id] if refill is None else refill.problem_of(known)

        def hear(response: Trajectory) -> None:
            self.progress.response(response)
            self.grading.add(response, problem_of(response), self.tokenizer)

        self.grading.begin()
        conversations = Conversations(
            pending,
            [of[request.request_id] for request in pending],
            self.tokenizer,
            timeout_s=self.config.rollout.environment_timeout_s,
            max_prompt_tokens=self.max_prompt_tokens,
            prompt_limit=self.prompt_limit,
            unreleased=self._unreleased.append,
        )
        waiting.begin = lambda new: conversations.add(new, list(map(problem_of, new)))
        if refill is not None:
            refill.begin, refill.when_scored = waiting.begin, self.grading.when_scored
        with self.progress.phase(phases[0]), conversations:
            finished, stopped = self._until_over(pending, hear, enough, conversations, refill, waiting)
        self._groups_moved += waiting.num_moved
        with self.progress.phase(phases[1]):
            finished = self.collective.together("reward", lambda: list(map(self.grading.scored, finished)))
        # raises where two ranks took one group
        responses = by_id(samples.told([*map(samples.packed, finished)], self.collective))
        _check_ends(responses.values())
        if enough is None:
            return responses, {}
        self.collective.store.delete_key(f"complete/{self._num_rollouts}")  # no rank reads it any more
        self.open_tokens = sum(self.collective.gather(sum(map(resume.num_begun, stopped)), int))
        if not self.config.rollout.partial:  # nobody goes on with them
            return responses, {}
        return responses, {r.request_id: r for r in chain(*self.collective.gather(stopped, list[RolloutRequest]))}

    def _held_back(self, requests: Sequence[RolloutRequest]) -> Waiting:
        slots, prefix = self.config.rollout.engine.max_running_requests, f"waiting/{self._num_rollouts}"
        lists = held_back(requests, engines=self.config.parallel.engines, slots=slots)
        own = {engine.index for engine in self.pool.engines}
        return Waiting(lists=lists, own=own, slots=slots, store=self.collective.store, prefix=prefix)

    def _until_over(
        self,
        pending: list[RolloutRequest],
        hear: Callable[[Trajectory], None],
        enough: int | None,
        conversations: Conversations,
        refill: Refill | None,
        waiting: Waiting,
    ) -> tuple[list[Trajectory], list[RolloutRequest]]:
        finished: list[Trajectory] = []
        stopped: list[RolloutRequest] = []

        def is_enough(more: int) -> bool:
            return enough is not None and self.collective.store.add(f"complete/{self._num_rollouts}", more) >= enough

        while True:
            generate = partial(
                self.pool.generate,
                pending,
                on_finished=hear,
                is_enough=None if enough is None else is_enough,
                conversations=conversations if conversations or refill or waiting.lists else None,
                refill=refill,
                waiting=waiting,
            )
            outcome = self.collective.together("rollout", partial(self._leaving, generate, refill))
            finished += outcome.finished
            stopped += outcome.stopped
            self._drafters_woken += outcome.drafters_woken
            pending = [*outcome.unfinished, *waiting.left()]
            if refill is not None:
                refill.read()
            if not self.collective.any(bool(pending) or (refill is not None and refill.kept is None)):
                return finished, stopped
            self.replace_lost()
            if refill is not None:
                refill.attempt += 1

    def _leaving(self, generate: Callable[[], RolloutOutcome], refill: Refill | None) -> RolloutOutcome:
        """Generate, and tell the other ranks when this one cannot go on alone."""
        try:
            outcome = generate()
        except BaseException:
            if refill is not None:
                refill.leave()
            raise
        if refill is not None and self.pool.lost():
            refill.leave()
        return outcome

    def _score_groups(
        self,
        problems: Sequence[Problem],
        trajectories: Sequence[Trajectory],
        *,
        finished: Sequence[Trajectory] | None = None,
    ) -> list[ScoredGroup]:
        """Shape scores into rewards, without failed responses and groups of fewer than two others. Only failures among
        `finished` are reported."""
        size = len(trajectories) // len(problems)
        cuts = [slice(i * size, (i + 1) * size) for i in range(len(problems))]
        with self.progress.phase("reward"):
            self._tell_failures(trajectories if finished is None else finished)
            found = [self._group(p, trajectories[cut]) for p, cut in zip(problems, cuts, strict=True)]
        return [group for group in found if group is not None]

    def _group(self, problem: Problem, trajectories: Sequence[Trajectory]) -> ScoredGroup | None:
        """Return the group without failures; None where nothing is left to compare."""
        a, limit = self.config.algorithm, self.config.rollout.max_new_tokens
        kept = [(t, t.reward or 0.0) for t in trajectories if not t.failure]
        if len(kept) < len(trajectories) and len(kept) < 2:
            return None
        return ScoredGroup(
            problem=problem,
            trajectories=tuple(t for t, _ in kept),
            scores=tuple(score for _, score in kept),
            rewards=tuple(shape_overlong(score, t.longest, limit, a.overlong_buffer) for t, score in kept),
        )

    def _tell_failures(self, trajectories: Sequence[Trajectory]) -> None:
        failures = [t.failure for t in trajectories if t.failure]
        if failures and not self.num_failed + self.num_unscored:
            self._first_failure = failures[0]
        of_verifiers = [(failure, found[0]) for failure in failures if (found := OF_VERIFIER.match(failure))]
        for failure, kind in of_verifiers:
            if kind not in self._warned:
                self._warned.add(kind)
                self.progress.note(f"{failure}. Its response is left out; more of the kind are counted: reward/failed")
        self.num_unscored += len(of_verifiers)
        self.num_failed += len(failures) - len(of_verifiers)
        if failures := [failure for failure in failures if not OF_VERIFIER.match(failure)]:
            self.progress.note(
                f"environments: {len(failures)} of {len(trajectories)} conversations failed; the first: {failures[0]}"
            )

    def state(self) -> dict[str, object]:
        """Return what a checkpoint keeps: the position in the prompts and, on rank 0, the open groups. Collective."""
        state: dict[str, object] = {"prompts": self.prompts.state(), "data": self.train_data.content}
        if self.config.rollout.partial:
            first, flat = self.collective.rank == 0, [t for group in self.open_groups for t in group.finished.values()]
            found = iter(samples.fetch(flat, range(len(flat)) if first else (), samples.OF_RESPONSE))
            whole = [replace(g, finished={name: next(found) for name in g.finished}) for g in self.open_groups]
            state["open_groups"] = resume.state(whole if first else [])
        return state

    def digest(self) -> int:
        """Return a digest of `state`, which is large and not made for it; 0 on ranks other than 0. Collective."""
        found = xxhash.xxh3_64()
        if self.collective.rank == 0:  # a curriculum's state has as many numbers as problems that were tried
            found.update(json.dumps({"prompts": self.prompts.state()}, sort_keys=True).encode())
        if self.open_groups:
            here = [t for group in self.open_groups for t in group.finished.values() if samples.is_here(t)]
            own = {t.request_id: xxhash.xxh3_64_intdigest(resume.encoded(t)) for t in here}
            told = dict(chain(*(part.items() for part in self.collective.gather(own, dict[str, int]))))
            for group in self.open_groups if self.collective.rank == 0 else ():
                finished = sorted((name, told[name]) for name in group.finished)
                found.update(resume.encoded((group.problem, group.requests, finished)))
        return found.intdigest() if self.collective.rank == 0 else 0

    def restore(self, state: dict[str, object]) -> None:
        self.prompts.restore(state["prompts"])
        if state.get("data", self.train_data.content) != self.train_data.content:
            self.progress.note("The problems to learn from are as many as at the checkpoint, but others: data changed.")
        if self.config.rollout.partial:
            restored = resume.restored(state.get("open_groups", []), group_size=self.config.rollout.group_size)
            scored = [replace(g, finished={n: samples.packed(t) for n, t in g.finished.items()}) for g in restored]
            sampling, replays = sampling_of(self.config.rollout), self.config.train.routing_replay == "r3"
            self.open_groups, others = resume.begun_again(scored, sampling, with_experts=replays)
            if others:
                self.progress.note(f"open groups of other settings are begun again: {', '.join(others)}")


def check_same_problems(sets: Sequence[Dataset], collective: Collective) -> None:
    """Raise DataError on all ranks where one has other problems than rank 0: they would mix in silence. Collective."""
    own = collective.together("data", lambda: [part.content for part in sets])
    first, *others = collective.gather((socket.gethostname(), own), tuple[str, list[str]])
    for rank, (host, found) in enumerate(others, 1):
        if found != first[1]:
            raise DataError(f"data: rank {rank} on {host} has other problems than rank 0 on {first[0]}. {SAME_ROWS}")


def _check_ends(responses: Iterable[Trajectory]) -> None:
    cut = next((t for t in responses if t.finish_reason == "abort"), None)
    if cut is not None:
        raise EngineError(
            f"request {cut.request_id}: SGLang aborted it after {len(cut.token_ids)} tokens, expected an end. "
            "See the engine's log in the run's folder; a larger rollout.engine.max_total_tokens may help."
        )
