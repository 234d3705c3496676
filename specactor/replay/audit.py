"""The audit: the trainer compares every token with its noise, and engines generate parts of responses again, undrafted.
A difference beyond kernels' rounding is a fault of an engine or of verification. Only the parts' length depends on
time.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specactor.config import Config, RolloutConfig
from specactor.config.rollout import SAME_BITS, guarantee
from specactor.cpu.sglang_ops import noise_of as noise_at
from specactor.data.environment import environment_of
from specactor.errors import SpecActorError
from specactor.parallel.collective import Collective
from specactor.progress import Progress
from specactor.replay.compare import TIES, Finding, Noise, first_difference
from specactor.replay.records import SampleRecord, StepRecord
from specactor.rollout.child_process import ChildDied
from specactor.rollout.pool import EnginePool
from specactor.rollout.requests import sampling_of
from specactor.rollout.resume import going_on
from specactor.samples import fetch
from specactor.types import RolloutRequest, ScoredGroup, Trajectory, VersionSpan

if TYPE_CHECKING:  # it imports Megatron
    from specactor.trainer.policy import TrainStats

UNPICKED = {"float32": 0.0, "bfloat16": 1e-4}  # share of tokens that their noise may not pick, by dtype: kernels differ
SHARE = 0.005  # of the seconds of steps, for audits; one may take twice what was predicted
CONTEXT = 2**14  # tokens that these have, at most: what is before a part is read again


Part = tuple[Trajectory, int]  # a response, and from which of its tokens on it is generated again


class Audit:
    """Audits every step; equal on all ranks but for what each one's engines generate."""

    def __init__(self, config: Config, *, pool: EnginePool, collective: Collective, progress: Progress) -> None:
        self.config = config
        self.pool = pool
        self.collective = collective
        self.progress = progress
        rollout, engine, gpu = config.rollout, config.rollout.engine, torch.cuda.is_available()
        _, promise = guarantee(engine, gpu=gpu, dtype=config.model.dtype)
        self._has_same_bits = promise == SAME_BITS
        self._may_score = rollout.audit != "off" and noise_of(rollout) is not None
        self._saved_s = 0.0
        self._token_s = 0.0  # of a round of an audit, on this machine; 0 before the first

    def look(self, step: int, version: int, groups: Sequence[ScoredGroup], *, step_s: float) -> dict[str, float]:
        """Audit a step's responses, of conversations the first turn; return the metrics. Collective. `step_s` is of the
        step before. Raises SpecActorError on all ranks, with rollout.audit stop, for a difference."""
        rollout = self.config.rollout
        if rollout.audit == "off" or not (self._has_same_bits or noise_of(rollout)):  # ties would look like faults
            return {}
        self._saved_s += SHARE * step_s
        tokens = self._affordable(groups)
        if tokens < 16:  # shorter parts are not worth their prefill, and the time is saved up
            return {}
        with self.progress.phase("audit"):
            drawn = choose(groups, tokens, seed=self.config.seed, step=step, version=version)
            own = {engine.index for engine in self.pool.engines}
            wanted = [i for i, (response, _) in enumerate(drawn) if self._engine_of(response) in own]
            come = fetch([response for response, _ in drawn], wanted, ("prompt_ids", "token_ids", "logprobs"))
            given = [(come[i].first_turn, drawn[i][1]) for i in wanted]
            report = self.collective.together("audit", lambda: self._own(step, given, tokens))
            reports = self.collective.gather(report, tuple[dict[str, int], str])
        total = sum((Counter(counts) for counts, _ in reports), Counter())
        if count := total["differences"]:
            first = next(told for _, told in reports if told)
            who = f"{count} responses of step {step} differ when an engine generates them again without drafts"
            self._tell(step, f"{who}: {first}")
        return {f"audit/{name}": total[name] for name in ("responses", "tokens", "ties", "differences")}

    def num_seeded(self, group: ScoredGroup, response: Trajectory) -> int:
        """Return how many first tokens the trainer checks: of an agent, those of its first turn."""
        if not self._may_score:
            return 0
        is_agents = hasattr(environment_of(group.problem.verifier), "run")
        return response.first_turn_len if is_agents else len(response.token_ids)

    def of_training(self, step: int, stats: TrainStats) -> dict[str, float]:
        """Return the metrics of the trainer's check. Raises SpecActorError, with rollout.audit stop, for other
        tokens."""
        if not self._may_score:
            return {}
        if self._is_wrong(stats):
            what = f"{stats.unpicked} of {stats.scored} tokens of step {step} are not those that their noise picks"
            self._tell(step, f"{what}, by the trainer's log-probabilities: speculation or sampling emitted others")
        return {"audit/scored": stats.scored, "audit/unpicked": stats.unpicked}

    def is_suspect(self, looked: Mapping[str, float], stats: TrainStats) -> bool:
        return looked.get("audit/differences", 0) > 0 or self._is_wrong(stats)

    def _is_wrong(self, stats: TrainStats) -> bool:
        return stats.unpicked > UNPICKED[self.config.model.dtype] * stats.scored

    def _affordable(self, groups: Sequence[ScoredGroup]) -> int:
        """Return the tokens of each part that the saved time pays for, equal on all ranks."""
        longest = max(len(t.token_ids) for group in groups for t in group.trajectories)
        rollout_s = self.progress.spent().get("rollout", 0.0)
        own = int(self._saved_s / (self._token_s or rollout_s / longest or 1.0))
        return min([longest, *self.collective.gather(own, int)])

    def _engine_of(self, response: Trajectory) -> int:
        return (response.group_id + 1) % self.config.parallel.engines  # the one after its own

    def _own(self, step: int, chosen: Sequence[Part], tokens: int) -> tuple[dict[str, int], str]:
        """Generate again what the engines before this rank's generated. Return counts, by the names of `metrics.AUDIT`,
        and where and why the first response differs."""
        began = time.perf_counter()
        counts, first = Counter[str](), ""
        for engine in self.pool.engines:
            given = [part for part in chosen if self._engine_of(part[0]) == engine.index]
            if not given or not engine.alive:
                continue
            try:
                again = engine.generate([self._request(part, tokens) for part in given])
            except ChildDied:  # the next sync replaces it
                continue
            pairs = list(zip(given, again, strict=True))
            findings = [self._compare(step, [pair], tokens) for pair in pairs]
            is_tie = [found is not None and found.cause == TIES for found in findings]
            # A cause shows in how many differ, so it is looked for in all of them together.
            others = [pair for pair, tie in zip(pairs, is_tie, strict=True) if not tie]
            found = self._compare(step, others, tokens)
            if found is not None and not first:
                first = f"{found.where}: {found.cause}. {'; '.join(found.evidence)}"
            counts["responses"] += len(given)
            counts["tokens"] += sum(len(t.token_ids) - start for (_, start), t in pairs)
            counts["ties"] += sum(is_tie)
            counts["differences"] += sum(f is not None for f in findings) - sum(is_tie)
        seconds = time.perf_counter() - began
        self._saved_s -= seconds
        if counts["responses"]:
            self._token_s = seconds / tokens
        return dict(counts), first

    def _request(self, part: Part, tokens: int) -> RolloutRequest:
        response, start = part
        sampling = sampling_of(self.config.rollout)
        request = RolloutRequest(
            request_id=f"audit.{response.request_id}",
            prompt_ids=tuple(response.prompt_ids),
            sampling=replace(sampling, max_new_tokens=min(start + tokens, len(response.token_ids))),
            seed=response.seed,
            group_id=response.group_id,
            is_drafted=False,
        )
        before = replace(
            response,
            token_ids=response.token_ids[:start],
            logprobs=response.logprobs[:start],
            spans=(VersionSpan(version=response.spans[0].version, start=0, end=start),),
            routed_experts=b"none is read",
        )
        return going_on(request, before)

    def _compare(self, step: int, pairs: Sequence[tuple[Part, Trajectory]], tokens: int) -> Finding | None:
        ours: list[SampleRecord] = []
        theirs: list[SampleRecord] = []
        for (response, start), again in pairs:
            end = start + tokens  # what is before the part is equal: it was given
            begun, logprobs = response.token_ids[:end], response.logprobs[:end]
            if start or not self._has_same_bits:  # a prefill's keys, and other kernels', differ a little: tokens alone
                both = zip(begun, again.token_ids, strict=False)
                same = next((i for i, (x, y) in enumerate(both) if x != y), len(again.token_ids))
                logprobs = (*again.logprobs[:same], *logprobs[same:])
            ours.append(_record(response, begun, logprobs))
            theirs.append(_record(response, again.token_ids, again.logprobs))
        mode, engines = self.config.rollout.speculation.mode, self.config.parallel.engines
        config = {"rollout": {"speculation": {"mode": mode}}, "model": {"dtype": self.config.model.dtype}}
        a = StepRecord(step=step, samples=tuple(ours), config=config, engines=engines)
        b = StepRecord(step=step, samples=tuple(theirs), engines=engines)
        return first_difference([a], [b], noise=noise_of(self.config.rollout))

    def _tell(self, step: int, what: str) -> None:
        run = f"{self.config.output_dir}/{self.config.name}"
        message = f"audit: {what}. specactor replay {run} --step {step} runs the step again"
        if self.config.rollout.audit == "stop":
            raise SpecActorError(f"rollout.audit: {message}. --rollout.audit warn goes on after it.")
        self.progress.note(message)


def choose(groups: Sequence[ScoredGroup], tokens: int, *, seed: int, step: int, version: int) -> list[Part]:
    """Draw so many tokens of some responses that one policy sampled whole, without branches."""
    whole = [t for g in groups for t in g.trajectories if [s.version for s in t.spans] == [version]]
    drawing, context = random.Random(f"audit {seed} {step}"), 0
    parts: list[Part] = []
    for i, response in enumerate(drawing.sample(whole, min(64, len(whole)))):  # so many are looked at together
        context += len(response.prompt_ids) + len(response.token_ids)
        if context > CONTEXT and parts:
            break
        # Beginnings must have equal log-probabilities, too; but few of a response's first tokens were drafted.
        place = drawing.random() if i % 2 else 0.0
        start = int(place * max(0, response.first_turn_len - tokens))
        parts.append((replace(response, branches=()), start))
    return parts


def _record(of: Trajectory, token_ids: Sequence[int], logprobs: Sequence[float]) -> SampleRecord:
    return SampleRecord.of(  # what is left empty was asked for equally
        request_id=of.request_id,
        group=of.group_id,
        sample=int(of.request_id.rpartition(".")[2]),
        problem=0,
        seed=of.seed,
        spans=(),
        finish_reason="",
        prompt_ids=of.prompt_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        routed_experts=b"",
        score=0.0,
        reward=0.0,
        advantage=0.0,
        is_whole=True,
    )


def noise_of(rollout: RolloutConfig) -> Noise | None:
    """Return a run's noise; None with top-p or top-k, where its key is a token's rank."""
    return gumbel if (rollout.top_p, rollout.top_k) == (1.0, -1) else None


def gumbel(seed: int, position: int, token: int) -> float:
    """Return what `cpu.sglang_ops.sample_with_noise` adds to a token's log-probability."""
    before = torch.tensor([position - 1])  # SGLang's key: the position of the token that the pass was given
    return noise_at(torch.tensor([seed]), before, torch.tensor([[token]])).item()
