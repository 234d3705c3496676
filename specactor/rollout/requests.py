"""Which responses a step asks for, and from which engine. PURE.

Invariants: a request's seed depends on run, step (with `rollout.noise_visits` K > 1 epoch // K), problem and sample
alone; a repeated problem gets further samples; a group goes to one engine, for its prefix cache; engines differ by at
most one group's work; equal input is assigned alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specactor.config import RolloutConfig
from specactor.data.stream import request_seed
from specactor.errors import EngineError
from specactor.types import DrawnProblem, Problem, RolloutRequest, SamplingParams, Trajectory

HELD_OUT = -1  # step in the seeds of held-out problems; smaller ones are blocks of `noise_visits` epochs


def group_requests(
    problems: Sequence[DrawnProblem],
    *,
    config: RolloutConfig,
    run_seed: int,
    step: int,
    earlier: Sequence[DrawnProblem] = (),
) -> list[RolloutRequest]:
    """Return `config.group_size` requests per problem, group by group, after the step's `earlier` problems. Ids begin
    with the number of finished steps."""
    asked = [problem.index for problem in (*earlier, *problems)]
    sampling = sampling_of(config)
    return [
        RolloutRequest(
            request_id=f"{step}.{group}.{sample}",
            prompt_ids=problem.prompt_ids,
            sampling=sampling,
            seed=request_seed(
                run_seed,
                step if config.noise_visits == 1 else HELD_OUT - 1 - problem.epoch // config.noise_visits,
                problem.index,
                sample + config.group_size * asked[:group].count(problem.index),
            ),
            group_id=group,
        )
        for group, problem in enumerate(problems, start=len(earlier))
        for sample in range(config.group_size)
    ]


def held_out_requests(
    problems: Sequence[Problem], *, config: RolloutConfig, run_seed: int, samples: int
) -> list[RolloutRequest]:
    """Return one greedy request per problem, or `samples` with the same seeds at any time."""
    sampling = sampling_of(config)
    if samples == 1:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=config.max_new_tokens, stop=config.stop)
    return [
        RolloutRequest(
            request_id=f"eval.{position}" if samples == 1 else f"eval.{position}.{sample}",
            prompt_ids=problem.prompt_ids,
            sampling=sampling,
            seed=0 if samples == 1 else request_seed(run_seed, HELD_OUT, problem.index, sample),
            group_id=position,
        )
        for position, problem in enumerate(problems)
        for sample in range(samples)
    ]


def sampling_of(config: RolloutConfig) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=config.stop,
        max_new_tokens=config.max_new_tokens,
    )


def assign(requests: Sequence[RolloutRequest], num_engines: int) -> list[list[RolloutRequest]]:
    """Return requests per engine, in order; the heaviest group goes first, to the lightest engine. A group weighs its
    prompts and the tokens that it may generate."""
    if num_engines < 1:
        raise EngineError(f"assign: got {num_engines} engines, expected at least 1. Restart the lost ones first.")
    weights: dict[int, int] = {}
    for request in requests:
        weight = len(request.prompt_ids) + request.sampling.max_new_tokens
        weights[request.group_id] = weights.get(request.group_id, 0) + weight
    loads = [0] * num_engines
    engine_of: dict[int, int] = {}
    for group, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        engine = min(range(num_engines), key=lambda i: (loads[i], i))
        engine_of[group] = engine
        loads[engine] += weight
    parts: list[list[RolloutRequest]] = [[] for _ in range(num_engines)]
    for request in requests:
        parts[engine_of[request.group_id]].append(request)
    return parts


def by_id(responses: Iterable[Trajectory]) -> dict[str, Trajectory]:
    """Return responses by request. Raises EngineError for a second one."""
    found: dict[str, Trajectory] = {}
    for response in responses:
        if response.request_id in found:
            raise EngineError(f"a second response to request {response.request_id!r}")
        found[response.request_id] = response
    return found


def merge(
    requests: Sequence[RolloutRequest], delivered: Iterable[Trajectory]
) -> tuple[list[Trajectory], list[RolloutRequest]]:
    """Return (finished, unfinished), each in the order of `requests`. Raises EngineError for unknown or second
    responses."""
    wanted = {request.request_id for request in requests}
    if len(wanted) != len(requests):
        raise EngineError("request_id: used twice in one rollout. Ids must be unique within a call.")
    came = by_id(delivered)
    for name in came:
        if name not in wanted:
            raise EngineError(f"a response to unknown request {name!r}")
    finished = [came[r.request_id] for r in requests if r.request_id in came]
    return finished, [r for r in requests if r.request_id not in came]
