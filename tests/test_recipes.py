"""Recipes: every one loads, round-trips through JSON, and fits its world size."""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor import recipes as recipes_of
from specactor.config import Config
from specactor.errors import ConfigError
from specactor.parallel.layout import ModelShape, check
from specactor.recipes import EXAMPLES, NO_SETTING, USUAL_NAMES, _keys, from_json, load, override, recipes, to_json

NAMES = sorted(recipes())
SHAPES = {
    "qwen3_30b_a3b": ModelShape(
        num_layers=48, num_heads=32, num_kv_heads=4, num_experts=128, vocab_size=151_936, max_position=40_960
    ),
    "qwen3_8b": ModelShape(
        num_layers=36, num_heads=32, num_kv_heads=8, num_experts=0, vocab_size=151_936, max_position=40_960
    ),
}
SHAPES["qwen3_30b_a3b_node"] = SHAPES["qwen3_30b_a3b"]
WORLDS = {"qwen3_30b_a3b": 64, "qwen3_30b_a3b_node": 8, "qwen3_8b": 8}


def shape(config: Config) -> ModelShape:
    tiny = config.model.tiny
    if tiny is None:
        return SHAPES[config.name]
    return ModelShape(
        num_layers=tiny.num_layers,
        num_heads=tiny.num_heads,
        num_kv_heads=tiny.num_kv_heads,
        num_experts=tiny.num_experts,
        vocab_size=96,
        max_position=tiny.max_position,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_named_explained_and_fits_its_world(name: str) -> None:
    config = load([name])
    assert config.name == name
    assert recipes()[name].endswith(".")
    layout = check(config, WORLDS.get(name, 2), shape(config))
    assert layout.world == WORLDS.get(name, 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_survives_json_exactly(name: str) -> None:
    config = load([name])
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_every_family_has_a_recipe() -> None:
    algorithms = [load([name]).algorithm for name in NAMES]
    assert {a.advantage for a in algorithms} == {"grpo", "dr_grpo", "rloo", "reinforce_pp", "gae"}
    assert {a.loss for a in algorithms} == {"ppo_clip", "gspo", "cispo"}
    assert {a.aggregation for a in algorithms} == {"sequence_mean", "token_mean", "fixed_length"}
    assert {a.kl_coef for a in algorithms} >= {0.0, 0.01}
    assert any(a.dynamic_sampling == "unequal" and a.overlong_buffer and a.clip_high > a.clip_low for a in algorithms)


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_a_production_shape_speculates_refreshes_and_corrects_for_mismatch(name: str) -> None:
    config = load([name])
    assert config.rollout.speculation.mode == "auto"
    assert "model" in config.rollout.speculation.drafters
    assert config.distillation.refresh > 0
    assert config.algorithm.correction.level != "off"


def test_overrides_of_every_kind() -> None:
    words = (
        "grpo --rollout.group-size 16 --rollout.prompts_per_step=4 --model.path tiny:2 "
        "--algorithm.correction.level off --checkpoint.export False --warmup.steps 5 6 --data.params max_n=7 "
        "exact=true ratio=0.5 word=a=b "
        "--train.max-logprob-gap inf --rollout.engine.extra-args page_size=1"
    )
    config = load(words.split())
    assert (config.rollout.group_size, config.rollout.prompts_per_step) == (16, 4)
    assert config.model.tiny is not None
    assert config.model.tiny.num_layers == 2
    assert config.algorithm.correction.level == "off"
    assert config.checkpoint.export is False
    assert config.warmup.steps == (5, 6)
    assert config.data.params == {"max_n": 7, "exact": True, "ratio": 0.5, "word": "a=b"}
    assert load(["grpo", "--data.params"]).data.params == {}
    assert config.rollout.engine.extra_args == {"page_size": 1}
    assert math.isinf(config.train.max_logprob_gap)
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_a_model_folder_takes_the_place_of_the_tiny_model() -> None:
    model = load(["quickstart", "--model.path", "/models/x"]).model
    assert (model.path, model.tiny) == ("/models/x", None)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31 - 1), rate=st.floats(1e-9, 1.0), steps=st.integers(0, 10**6))
def test_values_reach_the_config_exactly(seed: int, rate: float, steps: int) -> None:
    words = ["--seed", str(seed), "--train.learning_rate", repr(rate), "--train.steps", str(steps)]
    config = override(load(["quickstart"]), words)
    assert (config.seed, config.train.learning_rate, config.train.steps) == (seed, rate, steps)
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\nfrom examples import quickstart\n"
        "def recipe(): return replace(quickstart.recipe(), name='mine')\n"
        "def small(): return replace(recipe(), name='small')\n"
        "def wrong(): return 3\n"
    )
    assert load([str(file)]).name == "mine"
    assert load([f"{file}:small", "--seed", "3"]).seed == 3
    with pytest.raises(ConfigError, match=r"expected a function that returns a Config, not int. Correct it."):
        load([f"{file}:wrong"])
    with pytest.raises(
        ConfigError, match=r"expected a function big\(\) -> Config in .*mine.py. Name it after a colon."
    ):
        load([f"{file}:big"])
    with pytest.raises(ConfigError, match=r"RECIPE: got '.*none.py', expected a file that exists. Check the path."):
        load([str(tmp_path / "none.py")])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("actor_rollout_ref.rollout.n", "rollout.group-size"),
        ("data.max_response_length", "rollout.max-new-tokens"),
        ("trainer.save_freq", "checkpoint.every"),
        ("trainer.test_freq", "eval.every"),
        ("algorithm.adv_estimator", "algorithm.advantage"),
        ("rollout-batch-size", "rollout.prompts-per-step"),
        ("hf-checkpoint", "model.path"),
        ("eps-clip", "algorithm.clip-low"),
        ("kl_loss_coef", "algorithm.kl-coef"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", "train.warmup-steps"),
        ("tensor-model-parallel-size", "parallel.tensor"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "eval.samples"),
        ("rollout.val-kwargs.n", "eval.samples"),
        ("actor_rollout_ref.actor.use_kl_loss", "algorithm.kl-coef"),
        ("num_generations_per_prompt", "rollout.group-size"),
        ("optimizer-cpu-offload", "train.optimizer-state"),
        ("use-tis", "algorithm.correction.level"),
        ("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
        ("critic.optim.lr", "algorithm.critic.learning-rate"),
        ("actor_rollout_ref.actor.optim.lr", "train.learning-rate"),
        ("eval-prompt-data", "data.eval"),
        ("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
    ],
)
def test_names_of_other_systems_lead_to_ours(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf"Did you mean --{ours}\?"):
        load(["grpo", f"--{theirs}", "1"])


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ("actor_rollout_ref.actor.entropy_coeff", "There is no entropy bonus."),
        ("trainer.nnodes", "That is torchrun's --nnodes."),
        ("use-dynamic-bsz", "Sequences are packed: use --train.tokens-per-microbatch."),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "train.updates_per_step counts updates: rollout.prompts_per_step / ppo_mini_batch_size.",
        ),
        ("train-global-batch-size", "train.updates_per_step updates have a step's rollout.prompts_per_step groups."),
        ("wandb-project", "Set WANDB_PROJECT."),
        ("apply-chat-template", "Messages go through the model's chat template, a prompt is taken as it is."),
    ],
)
def test_names_that_nothing_stands_for_say_what_is_there(theirs: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["grpo", f"--{theirs}", "1"])
    assert str(caught.value) == f"unknown setting --{theirs.replace('_', '-')}. {told}"


@pytest.mark.parametrize("name", NO_SETTING)
def test_each_such_name_is_found_by_itself_and_in_a_section(name: str) -> None:
    config, key = load(["grpo"]), name.replace("*", "enable")
    assert [recipes_of._meaning(of, config) for of in (key, f"theirs.{key}")] == [NO_SETTING[name]] * 2


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "Evaluations are greedy with eval.samples 1;"),
        ("actor_rollout_ref.rollout.val_kwargs.top_p", "Evaluations are greedy with eval.samples 1;"),
        ("eval_temperature", "Evaluations are greedy with eval.samples 1;"),
        ("eval_top_p", "Evaluations are greedy with eval.samples 1;"),
        ("eval_min_new_tokens", "See --help."),
        ("custom_reward_function.path", "Each row of data names its verifier,"),
        ("reward_model.enable", "There is no reward model."),
        ("reward_model.model.path", "There is no reward model."),
        ("critic.model.path", "A critic has the policy's shape"),
        ("data.truncation", "A run with a prompt that is too long does not start"),
        ("data.filter_overlong_prompts", "A run with a prompt that is too long does not start"),
        ("data.shuffle", "Problems are shuffled in every epoch"),
        ("trainer.val_before_train", "Evaluations are before and after RL"),
        ("actor_rollout_ref.rollout.name", "Rollouts are SGLang's."),
    ],
)
def test_no_name_leads_to_a_setting_of_something_else(theirs: str, told: str) -> None:
    """Which would change training. However it is written."""
    for words in ((f"--{theirs}", "1"), (f"{theirs}=1",)):
        with pytest.raises(ConfigError, match=rf"\. {re.escape(told)}") as caught:
            load(["grpo", *words])
        assert "Did you mean" not in str(caught.value)
        assert "two dashes" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("distillation.lr", "--distillation.learning-rate"),
        ("algorithm.critic.lr", "--algorithm.critic.learning-rate"),
        ("actor.optim.lr", "--train.learning-rate"),
        ("eval.n", "--eval.samples"),
    ],
)
def test_a_usual_name_in_a_section_of_ours_is_of_that_section(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"Did you mean {meant}\?"):
        load(["ppo", f"--{key}", "1"])


def test_a_response_length_of_evaluations_leads_to_none_of_training() -> None:
    with pytest.raises(ConfigError, match="See --help"):
        load(["grpo", "--eval.max-response-length", "1"])


def test_all_such_names_are_of_settings() -> None:
    keys = {*_keys(load(["ppo"]))}
    assert {*USUAL_NAMES.values()} <= keys
    told = " ".join(NO_SETTING.values())
    assert {word for word in re.findall(r"[a-z]+(?:\.[a-z_]+)+", told.replace("-", "_"))} <= keys


def test_an_unknown_recipe_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["quikstart"])
    assert str(caught.value) == f"RECIPE: got 'quikstart', expected one of {', '.join(NAMES)}. Did you mean quickstart?"


def test_json_of_an_older_version_gets_the_defaults() -> None:
    config = load(["quickstart"])
    plain = to_json(config)
    del plain["tracking"], plain["train"]["optimizer_state"]
    assert from_json(plain) == config
    assert to_json(from_json(plain)) == to_json(config)


def test_json_that_no_run_wrote() -> None:
    plain = to_json(load(["quickstart"]))
    with pytest.raises(ConfigError, match=r"config: unknown key train.step. Did you mean train.steps\?"):
        from_json(plain | {"train": {"step": 3}})
    with pytest.raises(ConfigError, match=r"config: Expected `int`, got `str` - at `\$.seed`. Correct the file"):
        from_json(plain | {"seed": "x"})
    with pytest.raises(ConfigError, match=r"^seed: got -1, expected 0..2\*\*31-1."):
        from_json(plain | {"seed": -1})


def test_every_field_has_a_meaning_in_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from specactor.recipes import load; load(['quickstart', '--help'])"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    flags = 0
    for line, after in pairwise(lines):
        if line.startswith("│ --"):
            flags += 1
            assert not after.strip("│ ").startswith("(default"), f"no meaning: {line}"
    assert flags == count_leaves(load(["quickstart"]))


def count_leaves(tree: object) -> int:
    assert is_dataclass(tree)
    values = [getattr(tree, item.name) for item in fields(tree)]
    return sum(count_leaves(value) if is_dataclass(value) else 1 for value in values)


def test_the_custom_reward(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(EXAMPLES / "custom_reward.py"), str(tmp_path)], check=True, timeout=60)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    held_out = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out}
    assert rows[0]["answer"] == rows[0]["prompt"][:-1][::-1]
    load(["custom_reward"])
    module_name, function_name = rows[0]["verifier"].split(":")
    score = getattr(importlib.import_module(module_name), function_name)
    from specactor.types import Problem

    problem = Problem(index=0, prompt="37=", prompt_ids=(1,), answer="73", verifier=rows[0]["verifier"], metadata={})
    assert [score(text, problem) for text in ("73", "7", "3", "731", "")] == [1.0, 0.45, 0.0, pytest.approx(0.6), 0.0]
    assert score("2", replace(problem, answer="1")) == 0
