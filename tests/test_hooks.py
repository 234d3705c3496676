"""Every hook from its documented example, in a module outside the package; and bad ones, each with its one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specactor import hooks
from specactor.config import AlgorithmConfig, DataConfig, RolloutConfig, SourceConfig
from specactor.data.dataset import Dataset, build_dataset
from specactor.data.environment import environment_of
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.data.verifiers import get_verifier
from specactor.errors import ConfigError, SpecActorError
from specactor.recipes import load
from specactor.rollout.collector import RolloutCollector
from specactor.rollout.grading import Grading
from specactor.trainer.losses import token_weights
from specactor.trainer.microbatch import Shape, build, items_of
from specactor.trainer.objective import PolicyObjective
from specactor.types import Problem, ScoredGroup, Trajectory
from tests.rollout.driver_cases import FakeEngine
from tests.rollout.test_conversations import rollout
from tests.trainer.policy_cases import VOCAB, sequences

EXAMPLE = Path(__file__).parent.parent / "examples" / "hooks.py"
BAD = """
def rows_that_raise():
    yield {"prompt": "1=", "answer": "1", "verifier": "exact"}
    raise OSError("no such table")
def rows_of_lists():
    return [["1=", "1", "exact"]]
def takes_two(a, b):
    return a
def raises(*arguments):
    raise KeyError("oops")
def too_few(rewards):
    return rewards[:-1]
def nan(rewards):
    return [[float("nan") for _ in group] for group in rewards]
def texts(rewards):
    return "advantages"
def maybe(group):
    return "yes"
def scalar(logprobs, old, advantages):
    return logprobs.sum()
def number(logprobs, old, advantages):
    return 1.0
def infinite(logprobs, old, advantages):
    return logprobs / 0
def nan_reward(response, problem):
    return float("nan")
async def late_nan(response, problem):
    return float("nan")
not_a_function = 3
"""


@pytest.fixture(scope="module", autouse=True)
def _modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`mine`, the documented examples as a user has them, and `bad`."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "mine.py").write_text(EXAMPLE.read_text().replace("examples.hooks", "mine"))
    (folder / "bad.py").write_text(BAD)
    (folder / "forgets_an_import.py").write_text("def score(response: str, problem: Problem) -> float: ...")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name in ("mine", "bad"):  # of another file's tests
            sys.modules.pop(name, None)
        yield
        for name in ("mine", "bad"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("characters")
    make_char_tokenizer(folder)
    return load_tokenizer(folder)


def problem(verifier: str) -> Problem:
    return Problem(index=0, prompt="12=", prompt_ids=(1,), answer="21", verifier=verifier, metadata={})


def group(*scores: float) -> ScoredGroup:
    return ScoredGroup(problem=problem("exact"), trajectories=(), scores=scores, rewards=scores)


def rows_of(name: str, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    source = DataConfig(train=name, eval="another.jsonl").train_source
    assert source == SourceConfig(path=name)
    return build_dataset(source, tokenizer, max_prompt_tokens=20)


def loss_of(name: str) -> tuple[Tensor, Tensor]:
    batch = sequences()[:4]
    generator = torch.Generator().manual_seed(1)
    total = sum(len(s.token_ids) for s in batch)
    logits = torch.randn(1, total, VOCAB, generator=generator).requires_grad_()
    weights = token_weights([s.response_len for s in batch], "token_mean", 32)
    micro = build(items_of(batch, weights, None, None), Shape(1, 0, 1), torch.device("cpu"))
    loss, _ = PolicyObjective(AlgorithmConfig(loss=name, clip_low=0.9, clip_high=9.0), 1.0)(micro, logits)
    return loss, torch.autograd.grad(loss, logits)[0]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_group", lambda: None)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)


def test_the_examples_are_short() -> None:
    definitions = EXAMPLE.read_text().split("\n\n\n")[1:]
    assert len(definitions) == 7
    assert all(len(text.splitlines()) <= 20 for text in definitions)


def test_a_data_source(tokenizer: PreTrainedTokenizerBase) -> None:
    data = rows_of("mine:rows", tokenizer)
    assert [(p.prompt, p.answer) for p in data[:2]] == [("10=", "01"), ("11=", "11")]
    assert len(data) == 90


def test_rewards(tokenizer: PreTrainedTokenizerBase) -> None:
    names = ["mine:close_enough", "mine:asked_elsewhere", "exact"] * 50
    with Grading(timeout_s=120, most=1) as grading:
        verdicts = [grading.submit("20", problem(name)) for name in names]
        assert [verdict.result(240).score for verdict in verdicts] == [0.5, 0.5, 0.0] * 50


def test_an_environment(tokenizer: PreTrainedTokenizerBase) -> None:
    assert environment_of("mine:TwoTries") is not None
    [talked] = rollout([problem("mine:TwoTries")], tokenizer, engines=[FakeEngine(stops_at=lambda t: t % 5 == 1)])
    assert (talked.num_turns, talked.reward, talked.failure) == (2, 0.0, "")
    assert "\nNot " in tokenizer.decode(list(talked.token_ids))


def test_an_advantage() -> None:
    assert hooks.advantages_by("mine:best_of_group", [[1.0, 0.0], [0.5, 0.5, 2.0]]) == [[0.5, -0.5], [-0.5, -0.5, 1.0]]


def response(name: str, reward: float) -> Trajectory:
    return Trajectory(
        request_id=name,
        group_id=0,
        prompt_ids=(1,),
        token_ids=(2,),
        logprobs=(-1.0,),
        finish_reason="stop",
        spans=(),
        reward=reward,
    )


def test_a_filter_of_groups() -> None:
    algorithm = AlgorithmConfig(dynamic_sampling="mine:not_hopeless")
    config = SimpleNamespace(algorithm=algorithm, rollout=RolloutConfig())
    job = cast("Any", SimpleNamespace(config=config, grading=Grading(timeout_s=1)))
    job._group = partial(RolloutCollector._group, job)
    groups = [group(*scores) for scores in ((0, 0), (1, 1))]
    kept = []
    for g in groups:
        own = [response(f"0.0.{i}", score) for i, score in enumerate(g.scores)]
        kept.append(RolloutCollector._teaches(job, g.problem, own))
    assert kept == [(False, 0.0), (True, 1.0)]


def test_a_loss(one_rank: None) -> None:
    """Where nothing is clipped, it is what PPO's is."""
    own, ppo = loss_of("mine:weighted_logprobs"), loss_of("ppo_clip")
    for a, b in zip(own, ppo, strict=True):
        torch.testing.assert_close(a, b)


def test_a_recipe_takes_them_from_the_command_line() -> None:
    words = "--algorithm.advantage mine:best_of_group --rollout.group-size 4 "
    words += "--algorithm.dynamic-sampling mine:not_hopeless --algorithm.loss mine:weighted_logprobs"
    hooks.check(load(["quickstart", *words.split()]))


BAD_SETTINGS = {
    "--algorithm.advantage bad:nobody": "algorithm.advantage: got 'bad:nobody', expected the import path of a function",
    "--algorithm.loss forgets_an_import:score": "algorithm.loss: got 'forgets_an_import:score', expected the import",
    "--algorithm.advantage bad:takes_two": "algorithm.advantage: got 'bad:takes_two', expected a function (rewards)",
    "--algorithm.loss bad:takes_two": "algorithm.loss: got 'bad:takes_two', expected a function (logprobs_T, old",
    "--algorithm.loss bad:not_a_function": "algorithm.loss: got 'bad:not_a_function', expected a function (logprobs_T",
    "--algorithm.dynamic-sampling bad:takes_two": "algorithm.dynamic_sampling: got 'bad:takes_two', expected a func",
    "--algorithm.dynamic-sampling True": "algorithm.dynamic_sampling: got 'True', expected one of off, unequal, or",
    "--algorithm.advantage grop": "algorithm.advantage: got 'grop', expected one of grpo, dr_grpo, rloo, reinforce_pp",
    "--algorithm.loss ppo": "algorithm.loss: got 'ppo', expected one of ppo_clip, gspo, cispo, or module:function",
}


@pytest.mark.parametrize(("words", "message"), BAD_SETTINGS.items())
def test_a_hook_of_the_wrong_form_is_found_before_anything_starts(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hooks.check(load(["quickstart", *words.split()]))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


REWARDS = [[1.0, 0.0], [0.5, 0.5]]
BAD_HOOKS: dict[str, tuple[Any, str]] = {
    "raises": (
        lambda t: hooks.advantages_by("bad:raises", REWARDS),
        "algorithm.advantage: bad:raises raised KeyError: 'oops'. Correct it.",
    ),
    "too few": (
        lambda t: hooks.advantages_by("bad:too_few", REWARDS),
        "algorithm.advantage: bad:too_few returned groups of [2], expected [2, 2], as the rewards. Correct it.",
    ),
    "nan": (
        lambda t: hooks.advantages_by("bad:nan", REWARDS),
        "algorithm.advantage: bad:nan returned nan, expected finite numbers. Correct it.",
    ),
    "texts": (
        lambda t: hooks.advantages_by("bad:texts", REWARDS),
        "algorithm.advantage: bad:texts returned 'advantages', expected lists of numbers. Correct it.",
    ),
    "maybe": (
        lambda t: hooks.keeps("bad:maybe", group(1.0)),
        "algorithm.dynamic_sampling: bad:maybe returned 'yes', expected True or False. Correct it.",
    ),
    "filter raises": (
        lambda t: hooks.keeps("bad:raises", group(1.0)),
        "algorithm.dynamic_sampling: bad:raises raised KeyError: 'oops'. Correct it.",
    ),
    "scalar": (
        lambda t: loss_of("bad:scalar"),
        "algorithm.loss: bad:scalar returned a tensor of shape (), expected (",
    ),
    "number": (lambda t: loss_of("bad:number"), "algorithm.loss: bad:number returned 1.0, expected ("),
    "infinite": (
        lambda t: loss_of("bad:infinite"),
        "algorithm.loss: bad:infinite returned values that are not finite, expected finite ones. Correct it.",
    ),
    "rows that raise": (
        lambda t: rows_of("bad:rows_that_raise", t),
        "data source bad:rows_that_raise: after 1 rows it raised OSError: no such table. Correct the function; it",
    ),
    "rows of lists": (
        lambda t: rows_of("bad:rows_of_lists", t),
        "bad:rows_of_lists, row 1: got list, expected a mapping.",
    ),
    "a source with arguments": (
        lambda t: rows_of("bad:takes_two", t),
        "data source bad:takes_two: after 0 rows it raised TypeError: ",
    ),
    "no source": (
        lambda t: rows_of("bad:not_a_function", t),
        "data source bad:not_a_function: a int, expected a function without arguments.",
    ),
    "nan reward": (
        lambda t: get_verifier("bad:nan_reward")("1", problem("bad:nan_reward")),
        "verifier bad:nan_reward: problem 0 (answer '21'): it returned nan",
    ),
    "late nan": (
        lambda t: get_verifier("bad:late_nan")("1", problem("bad:late_nan")),
        "verifier bad:late_nan: problem 0 (answer '21'): it returned nan",
    ),
    "a reward of one argument": (
        lambda t: get_verifier("bad:too_few"),
        "got 'bad:too_few', expected a function (response, problem). It failed with: too many positional arguments.",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD_HOOKS.values(), ids=BAD_HOOKS)
def test_a_bad_hook_is_one_line(call: Any, message: str, tokenizer: PreTrainedTokenizerBase, one_rank: None) -> None:
    with pytest.raises(SpecActorError) as caught:
        call(tokenizer)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_examples_and_ours_have_the_forms_that_are_documented() -> None:
    """Checked by mypy: each name is assigned to its type."""
    from examples import hooks as mine
    from specactor.trainer.advantages import group_advantages

    source: hooks.DataSource = mine.rows
    reward: hooks.Reward = mine.close_enough
    waiting: hooks.AsyncReward = mine.asked_elsewhere
    environment: hooks.Environment = mine.TwoTries()
    advantage: hooks.Advantage = mine.best_of_group
    keep: hooks.GroupFilter = mine.not_hopeless
    loss: hooks.Loss = mine.weighted_logprobs
    ours: hooks.Advantage = lambda rewards: group_advantages(rewards, "grpo")  # noqa: E731
    assert all((source, reward, waiting, environment, advantage, keep, loss, ours))
