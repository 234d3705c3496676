"""Every recipe of examples/ runs, and what is special about its algorithm takes part."""

from __future__ import annotations

import pytest

from specactor.metrics import read_metrics
from specactor.recipes import load, recipes
from specactor.rollout.warm_starter import WarmStarter
from tests.end_to_end.recipes_run import FAILING, RESPONSES
from tests.lib.ranks import torchrun

NAMES = sorted(recipes())


@pytest.fixture(scope="module")
def lines(warm_starter: WarmStarter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """The metrics of the two steps of each recipe."""
    folder = tmp_path_factory.mktemp("recipes")
    code, said = torchrun(1, "tests.end_to_end.recipes_run", folder, folder=folder, limit_s=840)
    assert code == 0, said
    return {
        name: [{k: float(str(v)) for k, v in line.items()} for line in read_metrics(folder / "runs" / name)[1:]]
        for name in NAMES
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_takes_two_steps(name: str, lines: dict[str, list[dict[str, float]]]) -> None:
    first, second = lines[name]
    assert [first["weights/version"], second["weights/version"]] == [1, 2]
    if name != "custom_reward":  # an untrained model gets none of its characters right
        assert first["reward/std"] > 0
        assert first["policy/grad_norm"] > 0
    assert max(line["agreement/logprob_gap_max"] for line in (first, second)) < 1e-4
    updates = load([name]).train.updates_per_step
    for line in (first, second):
        assert line["audit/scored"] >= line["rollout/tokens"] / updates / 2, "those of the first update"
        assert line["audit/unpicked"] == 0


def test_a_verifier_with_a_bug_costs_the_responses_that_meet_it(lines: dict[str, list[dict[str, float]]]) -> None:
    for name in NAMES:
        for line in lines[name]:
            failed = line["reward/failed"]
            assert (failed > 0) == (name == FAILING)
            assert line["train/sequences"] <= RESPONSES - failed
            if "reward/drawn_groups" not in line:  # those recipes generate more than they learn from
                assert line["rollout/responses"] == line["train/sequences"]


def test_dapo_draws_further_prompts_for_groups_of_equal_rewards(lines: dict[str, list[dict[str, float]]]) -> None:
    def uninformative(name: str) -> float:
        return sum(line["reward/uninformative_groups"] for line in lines[name])

    assert uninformative("grpo") > 0
    assert uninformative("dapo") < uninformative("grpo")
    assert {name for name in NAMES if "reward/drawn_groups" in lines[name][0]} >= {"dapo"}
    for line in lines["dapo"]:
        size = line["rollout/responses"] / line["reward/drawn_groups"]
        assert line["reward/drawn_groups"] >= line["train/sequences"] / size, "all that were drawn, kept or not"
        assert "reward/drawn_mean" in line


def test_dapo_subtracts_from_the_reward_of_what_is_too_long(lines: dict[str, list[dict[str, float]]]) -> None:
    assert lines["grpo"][0]["response/cut_fraction"] > 0.5
    assert lines["grpo"][0]["reward/mean"] > 0
    assert lines["dapo"][0]["reward/mean"] < 0, "a score is at least 0"


def test_the_reference_is_the_model_that_the_run_started_from(lines: dict[str, list[dict[str, float]]]) -> None:
    first, second = (line["policy/kl"] for line in lines["grpo_kl"])
    assert second > first > 0, "with several updates in a step, the policy has left it within the first"
    assert all(line["policy/kl"] == 0 for line in lines["grpo"])


def test_a_critic_learns_before_the_policy_does(lines: dict[str, list[dict[str, float]]]) -> None:
    first, second = lines["ppo"]
    assert first["policy/learning_rate"] == 0 < second["policy/learning_rate"]
    assert first["critic/explained_variance"] == 0, "it expects nothing yet"
    assert second["critic/explained_variance"] != 0
    assert second["critic/loss"] < first["critic/loss"]
    assert not any(name.startswith("critic/") for name in lines["grpo"][0])


def test_several_updates_per_step_take_part(lines: dict[str, list[dict[str, float]]]) -> None:
    """With one update the policy is that of the rollout in all of a step, and no ratio is clipped."""
    for name in NAMES:
        clipped = any(line["policy/clip_fraction"] > 0 for line in lines[name])
        assert clipped <= (load([name]).train.updates_per_step > 1)
    assert any(line["policy/clip_fraction"] > 0 for line in lines["grpo"])
