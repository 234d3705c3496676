"""Which responses are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specactor.config import RolloutConfig
from specactor.rollout.requests import group_requests, held_out_requests
from specactor.types import Problem

PROBLEMS = [
    Problem(index=i, prompt=f"{i}=", prompt_ids=(i + 1, 9), answer="1", verifier="exact", metadata={})
    for i in (5, 3, 8)
]
CONFIG = RolloutConfig(prompts_per_step=3, group_size=4, temperature=0.7, max_new_tokens=16)


def test_groups_are_whole_and_in_the_order_of_the_problems() -> None:
    requests = group_requests(
        PROBLEMS, config=CONFIG, run_seed=1, step=2, earlier=[replace(PROBLEMS[0], index=i) for i in range(10, 20)]
    )
    assert [r.group_id for r in requests] == [10] * 4 + [11] * 4 + [12] * 4
    assert [r.prompt_ids for r in requests[::4]] == [p.prompt_ids for p in PROBLEMS]
    assert len({r.request_id for r in requests}) == len({r.seed for r in requests}) == 12
    assert {r.sampling.temperature for r in requests} == {0.7}


def test_seeds_depend_on_run_step_problem_and_sample_alone() -> None:
    def seeds(problems: list[Problem], run_seed: int, step: int, earlier: Sequence[Problem] = ()) -> list[int]:
        requests = group_requests(problems, config=CONFIG, run_seed=run_seed, step=step, earlier=earlier)
        return [r.seed for r in requests]

    base = seeds(PROBLEMS, 1, 2)
    assert seeds(PROBLEMS[::-1], 1, 2, [replace(PROBLEMS[0], index=6)]) == base[8:] + base[4:8] + base[:4]
    assert not set(base) & set(seeds(PROBLEMS, 1, 3))
    assert not set(base) & set(seeds(PROBLEMS, 2, 2))
    assert not set(base[:4]) & set(seeds([replace(PROBLEMS[0], index=6)], 1, 2))


def test_a_problem_that_a_step_asks_for_twice_gets_new_samples() -> None:
    problem = PROBLEMS[0]
    once = group_requests([problem], config=CONFIG, run_seed=1, step=2)
    again = group_requests([problem], config=CONFIG, run_seed=1, step=2, earlier=[problem])
    both = group_requests([problem, problem], config=CONFIG, run_seed=1, step=2)
    assert [r.seed for r in both] == [r.seed for r in (*once, *again)]
    assert len({r.seed for r in both}) == 2 * CONFIG.group_size


def test_sampling_options_are_those_of_the_settings() -> None:
    options = {
        "top_p": 0.9,
        "top_k": 5,
        "stop": ("x",),
        "stop_token_ids": (7,),
    }
    [request, *_] = group_requests(PROBLEMS, config=replace(CONFIG, **options), run_seed=1, step=2)  # type: ignore[arg-type]
    assert {name: getattr(request.sampling, name) for name in options} == options
    [request, *_] = held_out_requests(PROBLEMS, config=replace(CONFIG, **options), run_seed=1, samples=1)  # type: ignore[arg-type]
    assert (request.sampling.stop, request.sampling.stop_token_ids) == (("x",), (7,))


def test_evaluation_is_greedy_with_one_response_per_problem() -> None:
    requests = held_out_requests(PROBLEMS, config=replace(CONFIG, max_new_tokens=9), run_seed=1, samples=1)
    assert [(r.sampling.temperature, r.sampling.max_new_tokens, r.group_id) for r in requests] == [
        (0.0, 9, 0),
        (0.0, 9, 1),
        (0.0, 9, 2),
    ]


def test_samples_of_held_out_problems_are_the_same_whenever_they_are_asked_for() -> None:
    requests = held_out_requests(PROBLEMS, config=CONFIG, run_seed=1, samples=4)
    assert [r.group_id for r in requests] == [0] * 4 + [1] * 4 + [2] * 4
    assert {r.sampling.temperature for r in requests} == {0.7}
    assert len({r.request_id for r in requests}) == len({r.seed for r in requests}) == 12
    assert requests == held_out_requests(PROBLEMS, config=CONFIG, run_seed=1, samples=4)
    trained = group_requests(PROBLEMS, config=CONFIG, run_seed=1, step=1)
    assert not {r.seed for r in requests} & {r.seed for r in trained}
