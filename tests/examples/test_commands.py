"""The commands of the examples' docstrings: what they name is there, and their problems can be learned from."""

from __future__ import annotations

import ast
import json
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from examples import custom_reward, sokoban
from specactor import run
from specactor.config import Config, TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from specactor.data.tokenizer import load_tokenizer
from specactor.errors import ConfigError, DataError
from specactor.recipes import EXAMPLES, load
from specactor.trainer.warmup import find_solver

SHAPE = TinyModelConfig(num_layers=1, hidden_size=32, expert_size=16)
NOT_HERE = "qwen3"  # examples with files of a cluster


def commands(text: str) -> list[list[str]]:
    """The arguments of launch/train_moe.py, a list per command."""
    joined = re.sub(r" *\\\n *", " ", text)
    found = re.findall(r"train_moe\.py ([a-z][^\n]*)", joined)
    return [shlex.split(line) for line in found if " [--" not in line]


COMMANDS = {
    f"{file.stem} {i}": words
    for file in sorted(EXAMPLES.glob("*.py"))
    if not file.stem.startswith(NOT_HERE)
    for i, words in enumerate(commands(ast.get_docstring(ast.parse(file.read_text())) or ""))
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with room for long texts, in a folder where the problems of `custom_reward` lie."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model(SHAPE, 0, tmp_path / "model")
    shape = tmp_path / "model/config.json"
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"max_position_embeddings": 4096}))
    for name in ("train", "eval"):
        custom_reward.write_problems(Path("problems"), name, list(range(100, 400) if name == "train" else range(99)))
    boards = sokoban.problems
    monkeypatch.setattr(sokoban, "problems", lambda seed, count: boards(seed, 20))  # which takes a minute for all
    return tmp_path / "model"


def check(config: Config, model: Path) -> None:
    """As a run does before it starts an engine, and with the first worked solution."""
    if "size" in config.data.params:
        config = replace(config, data=replace(config.data, params=config.data.params | {"size": 300}))
    run._checked(config, 2)
    problems, held_out = run._problems(config, load_tokenizer(model))
    assert set(held_out) == {"eval"}
    if config.warmup.solver:
        assert find_solver(config.warmup.solver)(problems[0], random.Random(0), 0)


def test_there_are_such_commands() -> None:
    assert {"sokoban 0", "custom_reward 0", "custom_drafter 0", "calculator 0", "quickstart 0"} <= COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_finds_its_problems(name: str, model: Path) -> None:
    check(load([str(model) if word == "FOLDER" else word for word in COMMANDS[name]]), model)


def test_sokoban_on_a_recipe_of_another_task_is_caught(model: Path) -> None:
    words = ["grpo", *COMMANDS["sokoban 0"][1:]]
    with pytest.raises((ConfigError, DataError), match=r"prompt_template|warmup.solver"):
        check(load([str(model) if word == "FOLDER" else word for word in words]), model)
