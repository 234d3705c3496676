"""Which responses are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from specactor.config import RolloutConfig
from specactor.cpu.sglang_ops import sample_with_noise
from specactor.data.stream import PromptStream, request_seed
from specactor.rollout import requests as requests_module
from specactor.rollout.requests import group_requests, held_out_requests
from specactor.types import DrawnProblem

PROBLEMS = [
    DrawnProblem(index=i, prompt=f"{i}=", prompt_ids=(i + 1, 9), answer="1", verifier="exact", metadata={}, epoch=0)
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
    def seeds(
        problems: list[DrawnProblem], run_seed: int, step: int, earlier: Sequence[DrawnProblem] = ()
    ) -> list[int]:
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
    }
    [request, *_] = group_requests(PROBLEMS, config=replace(CONFIG, **options), run_seed=1, step=2)  # type: ignore[arg-type]
    assert {name: getattr(request.sampling, name) for name in options} == options
    [request, *_] = held_out_requests(PROBLEMS, config=replace(CONFIG, **options), run_seed=1, samples=1)  # type: ignore[arg-type]
    assert request.sampling.stop == ("x",)


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


# Noise that is kept for some visits.

VISITS, EPOCHS, MANY = 3, 7, 400
"""`rollout.noise_visits`, epochs, and problems."""
LAW = np.array([0.5, 0.25, 0.15, 0.1])
"""Of one token, the same for all: what depends on what shows in tables of pairs."""
TOO_SMALL = 1e-6
KEPT = replace(CONFIG, noise_visits=VISITS)


def visit_seeds(config: RolloutConfig = KEPT, *, problems: int = MANY, resumed_at: int | None = None) -> NDArray[Any]:
    """Of every epoch, problem and sample, by way of steps that do not divide an epoch; or of a run that is stopped at a
    step and goes on with another stream."""
    stream, seeds = PromptStream(problems, 3), np.zeros((EPOCHS, problems, config.group_size), dtype=np.int64)
    for step in range(EPOCHS * problems // 8):
        if step == resumed_at:
            state, stream = stream.state(), PromptStream(problems, 3)
            stream.restore(state)
        drawn = [replace(PROBLEMS[0], index=index, epoch=epoch) for index, epoch in stream.take(8)]
        asked = iter(group_requests(drawn, config=config, run_seed=1, step=step))
        for problem in drawn:
            seeds[problem.epoch, problem.index] = [next(asked).seed for _ in range(config.group_size)]
    return seeds


def tokens_of(seeds: NDArray[Any]) -> NDArray[Any]:
    """What an engine samples from `LAW` as the first token."""
    logprobs = torch.from_numpy(np.log(LAW)).expand(seeds.size, -1)
    positions = torch.zeros(seeds.size, dtype=torch.int64)
    return sample_with_noise(logprobs, torch.from_numpy(seeds.ravel()), positions).numpy().reshape(seeds.shape)


def wrong(tokens: NDArray[Any]) -> list[str]:
    """What is not as with fresh noise once in `VISITS` visits; nothing for right versions."""
    found = []

    def pairs(a: NDArray[Any], b: NDArray[Any]) -> float:
        """p-value of two tokens' being drawn from the law, each by itself."""
        table = np.zeros((len(LAW), len(LAW)))
        np.add.at(table, (a.ravel(), b.ravel()), 1)
        return float(stats.chisquare(table.ravel(), a.size * np.outer(LAW, LAW).ravel()).pvalue)

    for epoch, of_epoch in enumerate(tokens):
        if stats.chisquare(np.bincount(of_epoch.ravel(), minlength=len(LAW)), of_epoch.size * LAW).pvalue < TOO_SMALL:
            found.append(f"epoch {epoch} is not of the law")
        if any(pairs(of_epoch[:, a], of_epoch[:, b]) < TOO_SMALL for a, b in combinations(range(tokens.shape[2]), 2)):
            found.append(f"samples of a group depend on each other in epoch {epoch}")
        if pairs(of_epoch[::2], of_epoch[1::2]) < TOO_SMALL:
            found.append(f"problems depend on each other in epoch {epoch}")
    for a, b in combinations(range(EPOCHS), 2):
        if a // VISITS == b // VISITS:
            found += [] if (tokens[a] == tokens[b]).all() else [f"epochs {a} and {b} differ"]
        elif pairs(tokens[a], tokens[b]) < TOO_SMALL:
            found.append(f"epoch {b} depends on epoch {a}")
    return found


def test_noise_that_is_kept_for_some_visits_is_fresh_in_each_of_them() -> None:
    """One visit by itself has the law of plain sampling; so have visits with other noise, together."""
    assert wrong(tokens_of(visit_seeds())) == []


@pytest.mark.parametrize(
    ("version", "seen"),
    [
        (lambda run, moment, problem, sample: request_seed(run, 0, problem, sample), "depends on epoch"),
        (lambda run, moment, problem, sample: request_seed(run, moment, problem, 0), "samples of a group"),
        (lambda run, moment, problem, sample: request_seed(run, moment, 0, sample), "problems depend"),
    ],
    ids=["never renewed", "shared in a group", "shared by problems"],
)
def test_wrong_seeds_are_caught(
    monkeypatch: pytest.MonkeyPatch, version: Callable[[int, int, int, int], int], seen: str
) -> None:
    monkeypatch.setattr(requests_module, "request_seed", version)
    found = wrong(tokens_of(visit_seeds()))
    assert any(seen in what for what in found), found


def test_noise_that_is_renewed_too_late_is_caught() -> None:
    assert "epoch 3 depends on epoch 0" in wrong(tokens_of(visit_seeds(replace(KEPT, noise_visits=VISITS + 1))))


def test_with_fresh_noise_seeds_are_those_of_the_step_alone() -> None:
    """Those of runs that were begun before there was a choice."""
    drawn = [replace(problem, epoch=epoch) for epoch, problem in enumerate(PROBLEMS)]
    assert [r.seed for r in group_requests(drawn, config=CONFIG, run_seed=1, step=2)] == [
        request_seed(1, 2, problem.index, sample) for problem in PROBLEMS for sample in range(4)
    ]


def test_kept_noise_depends_on_the_order_of_the_data_alone_and_survives_a_resume() -> None:
    straight = visit_seeds(problems=20)
    for step in range(EPOCHS * 20 // 8):
        assert (visit_seeds(problems=20, resumed_at=step) == straight).all()


def test_a_problem_that_a_step_asks_for_in_two_visits_gets_new_samples_with_kept_noise() -> None:
    twice = [replace(PROBLEMS[0], epoch=epoch) for epoch in (0, 1)]
    assert len({r.seed for r in group_requests(twice, config=KEPT, run_seed=1, step=2)}) == 2 * KEPT.group_size
    held_out = held_out_requests(PROBLEMS, config=KEPT, run_seed=1, samples=4)
    assert not {r.seed for r in held_out} & {r.seed for r in group_requests(PROBLEMS, config=KEPT, run_seed=1, step=1)}
