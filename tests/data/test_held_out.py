"""What is held out is never learned from, and what a run does with its data in silence else is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor.config import Config
from specactor.recipes import load, override
from specactor.run import _problems
from tests.data.test_chat import TOKENIZER
from tests.data.test_dataset import GOOD, write_lines

RENDERED = "<|im_start|>user\n7+7=<|im_end|>\n<|im_start|>assistant\n"


def rows(*prompts: str) -> list[dict[str, object]]:
    return [GOOD | {"prompt": prompt} for prompt in prompts]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    train = write_lines(tmp_path / "train.jsonl", *rows("1+1=", "2+2=", "3+3=", "4+4="))
    held_out = write_lines(tmp_path / "eval.jsonl", *rows("2+2=", "5+5=", "3+3="))
    return load(["custom_reward", "--data.train", str(train), "--data.eval", str(held_out)])


def prompts_of(config: Config, problems: int) -> tuple[list[str], list[str], list[str]]:
    """Return prompts that are learned from, those that are evaluated, and notes."""
    notes: list[str] = []
    words = ["--eval.problems", str(problems)]
    learned, held_out = _problems(override(config, words), TOKENIZER, notes.append)
    return [p.prompt for p in learned], [p.prompt for p in held_out["eval"]], notes


def test_rows_of_a_held_out_file_that_are_not_evaluated_are_not_learned_from_either(config: Config) -> None:
    learned, held_out, notes = prompts_of(config, 1)
    assert (learned, held_out) == (["1+1=", "4+4="], ["2+2="])
    assert f"{config.data.eval[0]}: of 3 held-out problems the first 1 are evaluated (eval.problems)." in notes
    learned, held_out, notes = prompts_of(config, 3)
    assert (learned, held_out) == (["1+1=", "4+4="], ["2+2=", "5+5=", "3+3="])
    assert not any("evaluated" in note for note in notes)


@pytest.mark.parametrize(
    ("row", "template", "told"),
    [
        ({"prompt": "7+7="}, True, True),
        ({"prompt": "7+7="}, False, False),
        ({"prompt": RENDERED}, True, False),
        ({"messages": [{"role": "user", "content": "7+7="}]}, True, False),
        ({"prompt": "7+7=", "verifier": "examples.calculator:Calculator"}, True, False),
    ],
)
def test_texts_that_no_chat_template_has_made_are_told_of(
    row: dict[str, object],
    template: bool,
    told: bool,
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not template:
        monkeypatch.setattr(TOKENIZER, "chat_template", None)
    write_lines(tmp_path / "train.jsonl", {"answer": "14", "verifier": "exact"} | row)
    _, _, notes = prompts_of(config, 3)
    assert any("without the model's chat template" in note for note in notes) == told
