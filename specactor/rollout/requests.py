"""Which responses to ask for. PURE: problems in, requests out.

A request's seed depends on the run, the step, the problem and the sample alone, so the same step asks for the same
tokens again after a resume, on any number of engines. A problem that a step asks for again gets further samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from specactor.config import RolloutConfig
from specactor.data.stream import request_seed
from specactor.types import Problem, RolloutRequest, SamplingParams


def group_requests(
    problems: Sequence[Problem],
    *,
    config: RolloutConfig,
    run_seed: int,
    step: int,
    earlier: Sequence[Problem] = (),
) -> list[RolloutRequest]:
    """`config.group_size` requests per problem, group by group. `earlier`: what the same step has asked for before."""
    asked = [problem.index for problem in (*earlier, *problems)]
    sampling = SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        frequency_penalty=config.frequency_penalty,
        presence_penalty=config.presence_penalty,
        repetition_penalty=config.repetition_penalty,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
        max_new_tokens=config.max_new_tokens,
    )
    return [
        RolloutRequest(
            request_id=f"{step}.{group}.{sample}",
            prompt_ids=problem.prompt_ids,
            sampling=sampling,
            seed=request_seed(
                run_seed, step, problem.index, sample + config.group_size * asked[:group].count(problem.index)
            ),
            group_id=group,
        )
        for group, problem in enumerate(problems, start=len(earlier))
        for sample in range(config.group_size)
    ]


def greedy_requests(
    problems: Sequence[Problem],
    *,
    max_new_tokens: int,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
) -> list[RolloutRequest]:
    """One greedy request per problem, for evaluation."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, stop=stop, stop_token_ids=stop_token_ids)
    return [
        RolloutRequest(
            request_id=f"eval.{position}", prompt_ids=problem.prompt_ids, sampling=sampling, seed=0, group_id=position
        )
        for position, problem in enumerate(problems)
    ]
