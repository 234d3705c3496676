"""The command that prepares draft models offline."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from specactor.errors import ConfigError, DataError
from specactor.run_folder import RunFolder
from specactor.trainer.drafter import acceptance, command, init
from specactor.trainer.drafter.buffer import RolloutLine, TrainingExample, read_rollouts
from specactor.trainer.drafter.init import read_model
from specactor.types import Problem, ScoredGroup, Trajectory
from tests.trainer.drafter.cases import VOCAB, write_rollouts

INIT = ["init", "--target", "a", "--out", "b"]
EVAL = ["eval", "--draft", "a", "--target", "b", "--rollouts", "c"]
TRAIN = ["train", "--draft", "a", "--target", "b", "--rollouts", "c", "--out", "d"]


def sampled(target: Path, count: int) -> list[RolloutLine]:
    """Responses at temperature 1, one token at a time."""
    model, chance = read_model(target), torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (count, 4), generator=chance)
    with torch.no_grad():
        for _ in range(12):
            law = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(law, 1, generator=chance)], dim=1)
    return [RolloutLine(prompt_ids=row[:4], token_ids=row[4:]) for row in ids.tolist()]


@pytest.fixture(autouse=True)
def threads() -> Iterator[int]:
    """Of this process, given back."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def said(words: list[str]) -> str:
    out = io.StringIO()
    command.run(words, Console(file=out, width=200))
    return out.getvalue()


def test_init_train_eval(targets: dict[str, Path], tmp_path: Path) -> None:
    target, rollouts = str(targets["moe"]), tmp_path / "r.jsonl"
    write_rollouts(rollouts, sampled(targets["moe"], 96))
    first, then = str(tmp_path / "first"), str(tmp_path / "then")
    both = ["--target", target, "--rollouts", str(rollouts)]
    assert "a draft model of 0.0" in said(["init", "--target", target, "--out", first])
    train = [
        *both,
        "--updates",
        "40",
        "--distillation.learning-rate",
        "3e-3",
        "--distillation.tokens-per-update",
        "512",
        "--threads",
        "1",
    ]
    for out in (then, str(tmp_path / "again")):
        assert "40 updates on" in said(["train", *train, "--draft", first, "--out", out])
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in ("then", "again")}) == 1
    options = command.parse(["eval", *both, "--draft", then, "--all"])
    assert isinstance(options, command.EvalOptions)
    after = command.evaluate(options)
    words = said(["eval", *both, "--draft", then, "--all"])
    assert f"accept_length {after.accept_length:.2f}\n" in words
    assert f"at most {after.overlap:.3f} (1 - TV)" in words
    before = command.evaluate(command.parse(["eval", *both, "--draft", first, "--all"]))  # type: ignore[arg-type]
    assert after.overlap > before.overlap + 0.02
    assert command.evaluate(command.parse(["eval", *both, "--draft", target, "--all"])).shared == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected init, train or eval"),
        (["init"], "--target"),
        ([*INIT, "--wrong", "1"], "unknown setting --wrong"),
        ([*EVAL, "--window", "x"], "window: got 'x', expected INT"),
        ([*EVAL, "--window", "0"], "expected >= 1"),
        ([*INIT, "start:target-start", "--start.num-layers", "0"], "start.num_layers: got 0, expected > 0"),
        ([*INIT, "start:random-start", "--start.hidden-size", "0"], "start.hidden_size: got 0, expected > 0"),
        ([*TRAIN, "--distillation.learning-rate", "0"], "distillation.learning_rate: got 0.0, expected > 0"),
        ([*EVAL, "--threads", "-1"], "threads: got -1, expected >= 0"),
        ([*TRAIN, "--minutes", "0"], "minutes > 0"),
        ([*TRAIN, "--distillation.zero", "1"], "zero: got '1', expected off in specactor drafter train"),
        (
            [*TRAIN, "--distillation.refresh", "0.03"],
            "refresh: got 0.03, expected 0.0 in specactor",
        ),
        ([*TRAIN, "--distillation.max-updates", "3"], "max_updates: got 3, expected 0 in specactor drafter train"),
    ],
)
def test_a_wrong_command_line_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        command.parse(words)
    assert "\n" not in str(caught.value)


def test_models_of_other_vocabularies_are_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", [RolloutLine(prompt_ids=[1], token_ids=[2, 3])])
    wide = tmp_path / "wide"
    model = read_model(targets["dense"])
    model.resize_token_embeddings(VOCAB + 8)
    init.write_model(model, wide, tokenizer=targets["dense"])
    words = ["eval", "--draft", str(wide), "--target", str(targets["moe"]), "--rollouts", str(tmp_path / "r.jsonl")]
    with pytest.raises(ConfigError, match=f"draft: got '{VOCAB + 8} tokens', expected the target's {VOCAB} tokens"):
        command.evaluate(command.parse(words))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what there is to learn from, and how long


def train(target: Path, lines: list[RolloutLine], folder: Path, *more: str) -> None:
    """The target itself, into `folder`/out."""
    write_rollouts(folder / "r.jsonl", lines)
    words = ["train", "--draft", str(target), "--target", str(target), "--rollouts", str(folder / "r.jsonl")]
    said([*words, "--out", str(folder / "out"), "--threads", "1", *more])


def line(prompt: int, response: int, temperature: float = 1.0) -> RolloutLine:
    return RolloutLine(prompt_ids=[3] * prompt, token_ids=[4] * response, temperature=temperature)


@pytest.mark.parametrize(
    ("lines", "more", "message"),
    [
        ([line(2, 3)], [], "rollouts: got 1 response to learn from, expected at least 2"),
        ([line(2, 3, 0.0)] * 9, [], r"got greedy responses \(temperature 0\) alone, expected sampled ones"),
        ([line(9, 3)] * 9, ["--distillation.tokens-per-microbatch", "9"], "got 9, expected more tokens than the short"),
        ([line(2, 3)] * 9, ["--minutes", "1e-9"], "minutes: got 1e-09, expected the time of one update .* Nothing was"),
    ],
)
def test_where_nothing_can_be_learned_nothing_is_written(
    targets: dict[str, Path], tmp_path: Path, lines: list[RolloutLine], more: list[str], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        train(targets["dense"], lines, tmp_path, *more)
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_of_long_responses_the_beginning_is_learned_from(targets: dict[str, Path], tmp_path: Path) -> None:
    train(targets["dense"], [line(4, 30)] * 9, tmp_path, "--updates", "1", "--distillation.tokens-per-microbatch", "9")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_laws_are_computed_of_what_fits_the_buffer_alone(
    targets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    with_top_k = acceptance.with_top_k

    def counting(target: Any, examples: list[TrainingExample], **settings: Any) -> list[TrainingExample]:
        asked.extend(example.version for example in examples)
        return with_top_k(target, examples, **settings)

    monkeypatch.setattr(acceptance, "with_top_k", counting)
    lines = [RolloutLine(prompt_ids=[3], token_ids=[4] * 9, version=version) for version in range(20)]
    train(targets["dense"], lines, tmp_path, "--updates", "1", "--distillation.buffer-tokens", "35")
    assert sorted(asked) == [17, 18, 19], "the newest"


def test_threads_are_those_that_were_asked_for(targets: dict[str, Path], tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", [line(2, 3)])
    dense = str(targets["dense"])
    words = ["eval", "--draft", dense, "--target", dense, "--rollouts", str(tmp_path / "r.jsonl")]
    said([*words, "--threads", "3"])
    assert torch.get_num_threads() == 3
    said(words)
    assert torch.get_num_threads() == len(os.sched_getaffinity(0))


def test_the_answers_of_an_evaluation_are_known_to_be_greedy(targets: dict[str, Path], tmp_path: Path) -> None:
    problem = Problem(index=0, prompt="?", prompt_ids=(3, 4), answer="", verifier="", metadata={})
    answer = Trajectory(
        request_id="",
        group_id=0,
        prompt_ids=(3, 4),
        token_ids=(5, 6),
        logprobs=(-1.0, -1.0),
        finish_reason="stop",
        spans=(),
    )
    group = ScoredGroup(problem=problem, trajectories=(answer,), scores=(1.0,), rewards=(1.0,))
    folder = RunFolder(root=tmp_path)
    folder.write_evaluation(1, [group], Decoder())  # type: ignore[arg-type]
    assert read_rollouts([folder.evaluation(1)])[0].temperature == 0
    with pytest.raises(DataError, match="got greedy responses"):
        said(["eval", "--draft", "d", "--target", str(targets["dense"]), "--rollouts", str(folder.evaluation(1))])


class Decoder:
    """Of a tokenizer."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))
