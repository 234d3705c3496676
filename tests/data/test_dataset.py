"""Problems of tasks and files; and a table of bad data, each with its one-line error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import reasoning_gym
from transformers import PreTrainedTokenizerBase

from specactor.config import DataConfig, SourceConfig
from specactor.data import dataset
from specactor.data.chat import prompt_ids
from specactor.data.dataset import Dataset, build_dataset
from specactor.data.stream import MixedStream
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.errors import ConfigError, DataError
from specactor.recipes import load
from specactor.run import _problems
from specactor.types import Problem
from tests.data.test_chat import TOKENIZER

GOOD: dict[str, Any] = {"prompt": "2+2=", "answer": "4", "verifier": "exact"}
COUNT_BITS: dict[str, Any] = {"task": "count_bits", "params": {"max_n": 9999}}


def build(tokenizer: PreTrainedTokenizerBase, *, room: int = 100, **source: Any) -> Dataset:
    return build_dataset(SourceConfig(**source), tokenizer, max_prompt_tokens=room)


def write_lines(path: Path, *lines: Mapping[str, object] | str | bytes) -> Path:
    raw = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def write_parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


# Good data


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    row = {"answer": "4", "verifier": "exact", "messages": [{"role": "user", "content": "2+2?"}]}
    path = write_lines(tmp_path / "a.jsonl", row, {**row, "level": 3})
    [first, second] = build(TOKENIZER, path=str(path))
    assert first.prompt == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert first.prompt_ids == second.prompt_ids == prompt_ids(TOKENIZER, row["messages"])  # type: ignore[arg-type]
    assert second.metadata == {"messages": row["messages"], "level": 3}
    [of_parquet] = build(TOKENIZER, path=str(write_parquet(tmp_path / "a.parquet", [row])))
    assert of_parquet == first


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("2+2?", "messages: got '2+2?', expected a list of objects with a role and a content, both texts."),
        (
            [{"role": "user"}],
            "messages: got [{'role': 'user'}], expected a list of objects with a role and a content, ",
        ),
        ([], "messages: got [], expected a list of objects"),
    ],
)
def test_messages_that_are_none(tmp_path: Path, messages: object, message: str) -> None:
    row = {"answer": "4", "verifier": "exact", "messages": messages}
    with pytest.raises(DataError) as caught:
        build(TOKENIZER, path=str(write_lines(tmp_path / "a.jsonl", row)))
    assert f"a.jsonl, line 1: {message}" in str(caught.value)


def test_messages_beside_a_prompt_or_without_a_template(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"answer": "4", "verifier": "exact", "messages": [{"role": "user", "content": "2+2?"}]}
    with pytest.raises(DataError, match="messages: beside a prompt, expected one of the two"):
        build(TOKENIZER, path=str(write_lines(tmp_path / "a.jsonl", {**row, "prompt": "2+2?"})))
    with pytest.raises(
        DataError, match=r"messages: beside data.prompt_template '\{prompt\}=', expected \{prompt\}: the"
    ):
        build(TOKENIZER, path=str(write_lines(tmp_path / "a.jsonl", row)), prompt_template="{prompt}=")
    with pytest.raises(DataError, match="the model's tokenizer has no chat template"):
        build(tokenizer, path=str(write_lines(tmp_path / "a.jsonl", row)))


def test_sets_are_put_one_behind_the_other(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    sets = [
        build(tokenizer, path=str(write_lines(tmp_path / f"{name}.jsonl", *({**GOOD, "prompt": p} for p in name))))
        for name in ("ab", "cde")
    ]
    data = Dataset.of(sets)
    assert [(p.index, p.prompt) for p in data] == list(enumerate("abcde"))
    assert (data.sizes, sets[0].sizes) == ((2, 3), (2,))


def test_a_task_gives_the_problems_of_reasoning_gym(tokenizer: PreTrainedTokenizerBase) -> None:
    data = build(tokenizer, **COUNT_BITS, size=20, seed=5)
    reference = reasoning_gym.create_dataset("count_bits", max_n=9999, size=20, seed=5)
    assert len(data) == 20
    for i, (problem, entry) in enumerate(zip(data, reference, strict=True)):
        assert (problem.index, problem.prompt, problem.answer) == (i, entry["question"], entry["answer"])
        assert problem.verifier == "reasoning-gym"
        assert problem.metadata == {"task": "count_bits", "params": {"max_n": 9999}, "entry": entry}
        assert tokenizer.decode(problem.prompt_ids) == entry["question"]


def test_a_template_may_use_the_metadata_of_a_task(tokenizer: PreTrainedTokenizerBase) -> None:
    data = build(tokenizer, **COUNT_BITS, size=20, prompt_template="{number}=")
    entries = [problem.metadata["entry"] for problem in data]
    assert [problem.prompt for problem in data] == [f"{e['metadata']['number']}=" for e in entries]  # type: ignore[index]


def test_a_task_without_a_single_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    data = build(tokenizer, task="graph_color", size=2, room=5000)
    assert [problem.answer for problem in data] == ["", ""]
    assert [problem.metadata["entry"]["answer"] for problem in data] == [None, None]  # type: ignore[index]


def test_blanks_can_be_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    params = {"operators": "+", "max_digits": 2, "allow_parentheses": False, "allow_negation": False}
    template = {"prompt_template": "{expression:compact}="}
    data = build(tokenizer, task="basic_arithmetic", params=params, size=2, seed=5, **template)
    assert [problem.prompt for problem in data] == ["94+45+88+94+83+67=", "7+4+0+0+2+10="]


def test_columns_of_a_file_go_to_the_metadata_and_into_the_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_lines(tmp_path / "a.jsonl", {**GOOD, "hint": "add {prompt}", "level": 3}, "", {**GOOD, "hint": "x"})
    data = build(tokenizer, path=str(path), prompt_template="{{{hint}}} {prompt}")
    assert [problem.prompt for problem in data] == ["{add {prompt}} 2+2=", "{x} 2+2="]
    assert [problem.metadata for problem in data] == [{"hint": "add {prompt}", "level": 3}, {"hint": "x"}]
    assert [problem.index for problem in data] == [0, 1]
    assert (data[0].answer, data[0].verifier) == ("4", "exact")


def test_parquet_and_jsonl_give_the_same_problems(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "verifier": "number", "level": n % 3} for n in range(1500)]
    lines = write_lines(tmp_path / "a.jsonl", *rows)
    table = write_parquet(tmp_path / "a.parquet", rows)
    from_lines, from_table = build(tokenizer, path=str(lines)), build(tokenizer, path=str(table))
    assert list(from_lines) == list(from_table)
    assert from_lines.digest == from_table.digest
    assert [problem.index for problem in from_table] == list(range(1500))
    assert from_table[1400].prompt == "1400+1="


SAVED = Path(__file__).parent / "saved"
"""Five rows in two files, as datasets 5.2.0 saved them."""


def save_folder(folder: Path, *shards: list[dict[str, object]]) -> Path:
    """A folder as the save_to_disk of datasets writes it; its own are read beside it."""
    folder.mkdir()
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_folder_of_datasets_gives_the_problems_of_its_rows(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "verifier": "number", "level": n % 3} for n in range(5)]
    want = build(tokenizer, path=str(write_lines(tmp_path / "a.jsonl", *rows)))
    ours = save_folder(tmp_path / "ours", rows[:3], rows[3:])
    assert build(tokenizer, path=str(SAVED)).digest == build(tokenizer, path=str(ours)).digest == want.digest


def test_messages_of_a_folder_and_missing_values(tmp_path: Path) -> None:
    row = {"answer": "4", "verifier": "exact", "messages": [{"role": "user", "content": "2+2?"}]}
    [first] = build(TOKENIZER, path=str(save_folder(tmp_path / "a", [row])))
    assert first.prompt_ids == prompt_ids(TOKENIZER, row["messages"])  # type: ignore[arg-type]
    folder = save_folder(tmp_path / "b", [row], [{**row, "answer": None}])
    with pytest.raises(DataError) as caught:
        build(TOKENIZER, path=str(folder))
    assert str(caught.value) == f"{folder}, row 2: answer: missing, expected a text. Add it."


def test_folders_are_mixed_with_files(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    other = write_lines(tmp_path / "b.jsonl", GOOD, GOOD)
    config = DataConfig(train=str(SAVED), eval="e.jsonl", mix={str(other): 0.5})
    sources = (config.train_source, *config.mixed_sources)
    data = Dataset.of([build_dataset(s, tokenizer, max_prompt_tokens=100) for s in sources])
    stream = MixedStream(data.sizes, [1.0, 0.5], 3)
    taken = [problem.prompt for problem in data.drawn(stream.take(9))]
    assert (data.sizes, taken.count("2+2="), len({*taken} - {"2+2="})) == ((5, 2), 3, 5)


def _cut(folder: Path, num_bytes: int) -> Path:
    file = folder / "data-00001-of-00002.arrow"
    file.write_bytes(file.read_bytes()[:-num_bytes])
    return folder


def _with_state(folder: Path, text: str) -> Path:
    (folder / "state.json").write_text(text)
    return folder


def _of_splits(folder: Path) -> Path:
    folder.rename(folder.with_name("train"))
    (folder / "..").resolve().joinpath("dataset_dict.json").write_text('{"splits": ["train"]}')
    return folder.parent


BAD_FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "cut between batches": (lambda f: _cut(f, 8), "pyarrow says: it ends in the middle."),
    "cut in a batch": (lambda f: _cut(f, 100), "data-00001-of-00002.arrow: not a whole Arrow stream. Save the data"),
    "all cut": (lambda f: _cut(f, 10**6), "data-00001-of-00002.arrow: not a whole Arrow stream. Save the data again."),
    "a file is missing": (
        lambda f: (f / "data-00000-of-00002.arrow").unlink() or f,
        "data-00000-of-00002.arrow: not a whole Arrow stream. Save the data again. pyarrow says: [Errno 2]",
    ),
    "another folder": (
        lambda f: (f / "state.json").unlink() or f,
        "got a folder without a readable state.json (FileNotFoundError), expected one that the save_to_disk of Hugging "
        "Face's datasets wrote. Save the data so, or name a .jsonl or .parquet file.",
    ),
    "a broken state": (lambda f: _with_state(f, "{"), "without a readable state.json (JSONDecodeError), expected"),
    "a state of something else": (lambda f: _with_state(f, "{}"), "without a readable state.json (KeyError), expected"),
    "a list for a state": (lambda f: _with_state(f, "[]"), "without a readable state.json (TypeError), expected"),
    "no rows": (lambda f: _with_state(f, '{"_data_files": []}'), "got no rows, expected at least one. Check the path."),
    "chosen rows": (
        lambda f: _with_state(f, '{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}'),
        "has rows chosen by an index, expected plain ones. Call flatten_indices, and save it.",
    ),
    "splits": (_of_splits, "a folder of splits, expected one of them. Name one of "),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_a_bad_folder_is_one_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, spoil: Callable[[Path], Path], message: str
) -> None:
    folder = spoil(save_folder(tmp_path / "rows", [GOOD] * 3, [GOOD] * 4))
    with pytest.raises(DataError) as caught:
        build(tokenizer, path=str(folder))
    assert str(caught.value).startswith(str(folder))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_named_like_a_task(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path / "mathematics", [GOOD])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"got 'mathematics', expected .* A folder is named \./mathematics\."):
        build_dataset(DataConfig(train="mathematics").train_source, tokenizer, max_prompt_tokens=9)
    source = DataConfig(train="./mathematics", eval="e.jsonl").train_source
    assert len(build_dataset(source, tokenizer, max_prompt_tokens=9)) == 1


class Large:
    """A tokenizer whose ids are no small integers, of which Python has one object each anyway."""

    unk_token_id = None

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int("1000"), int("2000")] for _ in texts]}


def test_equal_tokens_of_prompts_are_one_object(tmp_path: Path) -> None:
    """Each has 28 bytes, and a data set may have a thousand million."""
    path = write_lines(tmp_path / "a.jsonl", *[GOOD] * 70)
    problems = build(Large(), path=str(path))  # type: ignore[arg-type]
    assert problems[0].prompt_ids == (1000, 2000)
    assert len({ids for problem in problems for ids in map(id, problem.prompt_ids)}) == 2


def read_by(world: int, *paths: Path) -> list[dataset._Reading]:
    """As so many ranks look at them; a path for each, or one for all."""
    sources = [SourceConfig(path=str(paths[rank % len(paths)])) for rank in range(world)]
    return [dataset._Reading(source, TOKENIZER, 100, rank, world) for rank, source in enumerate(sources)]


@pytest.mark.parametrize("count", [1, 64, 65, 300])
def test_ranks_that_share_the_work_have_what_one_makes_alone(count: int, tmp_path: Path) -> None:
    """Also of bad rows. Each looks at its part alone."""
    rows = [{**GOOD, "prompt": f"{i}+1="} for i in range(count)]
    rows[count // 2] = {"answer": "4", "verifier": "exact", "messages": [{"role": "user", "content": "2+2="}]}
    path = write_lines(tmp_path / "a.jsonl", *rows)
    alone, ranks = build(TOKENIZER, path=str(path)), read_by(3, path)
    parts = [rank.own for rank in ranks]
    assert sum(map(len, parts)) < 2 * len(read_by(1, path)[0].own), "each looked at its own"
    assert [list(rank.dataset(parts)) for rank in ranks] == [list(alone)] * 3
    if count > 64:
        with pytest.raises((AssertionError, StopIteration)):
            assert list(ranks[0].dataset(parts[::-1])) == list(alone)
    path = write_lines(tmp_path / "a.jsonl", *rows, {**GOOD, "answer": ""}, "{")
    said = set()
    for rank in (ranks := read_by(3, path)):
        with pytest.raises(DataError) as caught:
            rank.dataset([other.own for other in ranks])
        said.add(str(caught.value))
    with pytest.raises(DataError) as caught:
        build(TOKENIZER, path=str(path))
    assert said == {str(caught.value)}


def test_ranks_that_read_other_rows_do_not_share_them(tmp_path: Path) -> None:
    one, two = (write_lines(tmp_path / f"{n}.jsonl", *[GOOD] * n) for n in (1, 2))
    ranks = read_by(2, one, two)
    with pytest.raises(DataError, match=r"1\.jsonl: ranks read \[1, 2\] rows\. A function has to return the same rows"):
        ranks[0].dataset([rank.own for rank in ranks])


def test_a_template_makes_texts_of_what_it_names_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of a program have megabytes."""

    class Tests(list):  # type: ignore[type-arg]
        def __str__(self) -> str:
            raise AssertionError("made a text of it")

    monkeypatch.setattr(
        dataset, "read_rows", lambda _: iter([dataset.Row(where="", columns=GOOD | {"tests": Tests()})])
    )
    assert len(build(TOKENIZER, path="a.jsonl")) == 1


def test_the_content_is_what_is_asked_and_judged(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    def content(**changed: object) -> str:
        return build(tokenizer, path=str(write_lines(tmp_path / "a.jsonl", {**GOOD, "level": 1, **changed}))).content

    assert len({content(), content(prompt="1+2="), content(answer="5"), content(verifier="number")}) == 4
    assert content(level=2) == content()


def test_the_digest_tells_data_apart(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    one = build(tokenizer, path=str(write_lines(tmp_path / "1.jsonl", GOOD)))
    two = build(tokenizer, path=str(write_lines(tmp_path / "2.jsonl", {**GOOD, "answer": "5"})))
    assert one.digest != two.digest


def test_a_prompt_may_be_exactly_as_long_as_there_is_room(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_lines(tmp_path / "a.jsonl", {**GOOD, "prompt": "x" * 7})
    assert len(build(tokenizer, room=7, path=str(path))[0].prompt_ids) == 7


def test_special_tokens_in_a_prompt_are_mere_text(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_lines(tmp_path / "a.jsonl", {**GOOD, "prompt": "<eos>"})
    assert tokenizer.eos_token_id not in build(tokenizer, path=str(path))[0].prompt_ids


# Bad rows: (line, what the error says after "FILE, line 2: ")

MISSING_ANSWER = {"prompt": "2+2=", "verifier": "exact"}
BAD_ROWS: dict[str, tuple[Mapping[str, object] | str | bytes, str]] = {
    "a column is missing": (MISSING_ANSWER, "answer: missing, expected a text. Add it."),
    "verl's": (
        {
            "prompt": [{"role": "user", "content": "2+2="}],
            "data_source": "gsm8k",
            "reward_model": {"style": "rule", "ground_truth": "4"},
        },
        "got the columns of verl, expected messages, answer and verifier. Rename them, or give a function "
        'module:function that returns rows {"messages": row["prompt"], "answer": '
        'row["reward_model"]["ground_truth"], "verifier": "math-verify"}.',
    ),
    "slime's": (
        {"prompt": "2+2=", "label": "4"},
        "got the columns of slime, expected prompt, answer and verifier. Rename them, or give a function "
        'module:function that returns rows {"prompt": row["prompt"], "answer": row["label"], '
        '"verifier": "math-verify"}.',
    ),
    "messages as a prompt": (
        {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "verifier": "exact"},
        "prompt: got messages, expected a text. Rename the column to messages.",
    ),
    **{
        name: (
            {"prompt": "2+2=", "answer": "4", "verifier": name},
            f"verifier: got '{name}', expected an import path. Write mine:score, with its folder on PYTHONPATH.",
        )
        for name in ("./mine.py:score", "mine.py:score", "folder/mine:score")
    },
    "a column is misspelt": (
        {**MISSING_ANSWER, "anwser": "4"},
        "answer: missing, expected a text. Did you mean anwser? Rename it.",
    ),
    "pictures beside messages": (
        {
            **{"answer": "4", "verifier": "exact", "images": ["a.png"]},
            "messages": [{"role": "user", "content": "<image>?"}],
        },
        "images: the policy would not see it, expected texts alone. Leave it out, or rename it for a verifier.",
    ),
    "a prompt in parts": (
        {**GOOD, "prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2="}]}]},
        "prompt: got [{'role': 'user', 'content': [{'type': 'text', 'text': '2+2='}]}], expected a text, or a column "
        "messages with texts. Correct it.",
    ),
    "an answer is a number": ({**GOOD, "answer": 4}, "answer: got 4 (int), expected a text. Put it in quotes."),
    "a prompt is null": ({**GOOD, "prompt": None}, "prompt: got None (NoneType), expected a text. Put it in quotes."),
    "a prompt is empty": ({**GOOD, "prompt": ""}, "prompt: got '', expected a text that is not empty. Remove the row."),
    "a prompt is blank": (
        {**GOOD, "prompt": " \n"},
        "prompt: got ' \\n', expected a text that is not empty. Remove the row.",
    ),
    "a prompt is too long": (
        {**GOOD, "prompt": "x" * 101},
        "prompt: got 101 tokens, expected at most 100.",
    ),
    "a character has no token": (
        {**GOOD, "prompt": "2 × 2 ="},
        "prompt: the tokenizer has no token for '×'. Replace it, or use a model that knows it.",
    ),
    "half a surrogate pair in a prompt": (
        '{"prompt": "\\ud83d", "answer": "4", "verifier": "exact"}',
        "prompt: not a Unicode text (a surrogate without its partner). Correct its \\u escapes.",
    ),
    "half a surrogate pair in an answer": (
        '{"prompt": "2", "answer": "\\ud83d", "verifier": "exact"}',
        "answer: not a Unicode text (a surrogate without its partner). Correct its \\u escapes.",
    ),
    "an unknown verifier": (
        {**GOOD, "verifier": "exakt"},
        "verifier: got 'exakt', expected one of exact, number, math-verify, reasoning-gym, or module:function. "
        "Did you mean exact?",
    ),
    "a verifier's module is missing": (
        {**GOOD, "verifier": "no_such_module:score"},
        "verifier: got 'no_such_module:score', expected the import path of a function. Put its folder on PYTHONPATH. "
        "It failed with: No module named 'no_such_module'.",
    ),
    "a verifier's function is missing": (
        {**GOOD, "verifier": "json:score"},
        "verifier: got 'json:score', expected the import path of a function. Put its folder on PYTHONPATH. "
        "It failed with: module 'json' has no attribute 'score'.",
    ),
    "a verifier is no function": (
        {**GOOD, "verifier": "math:pi"},
        "verifier: got 'math:pi', which is a float, expected a function. Name another.",
    ),
    "an answer is no number": (
        {**GOOD, "verifier": "number", "answer": "four"},
        "answer: got 'four', expected a number. Use the verifier exact for other answers.",
    ),
    "an answer is not mathematical": (
        {**GOOD, "verifier": "math-verify", "answer": "???"},
        "answer: got '???', expected an expression that math-verify can read.",
    ),
    "a reasoning-gym row without its entry": (
        {**GOOD, "verifier": "reasoning-gym"},
        "entry: missing, expected the reasoning-gym entry (question, answer, metadata).",
    ),
    "a reasoning-gym row without its task": (
        {**GOOD, "verifier": "reasoning-gym", "entry": {"question": "q", "answer": "4", "metadata": {}}},
        "task: missing, expected the name of a reasoning-gym task.",
    ),
    "a reasoning-gym row with half an entry": (
        {**GOOD, "verifier": "reasoning-gym", "task": "count_bits", "entry": {"answer": "4", "metadata": {}}},
        "entry: question is missing or of a wrong type. Write the whole reasoning-gym entry.",
    ),
    "broken JSON": (
        '{"prompt": "2+2=" "answer"',
        "broken JSON at position 18: Expecting ',' delimiter. Write one JSON object per line.",
    ),
    "not an object": ('["2+2=", "4"]', 'got list, expected an object. Write {"prompt": ..., "answer": ..., ...}.'),
    "not UTF-8": (b'{"prompt": "\xe9"}', "got byte 0xe9 at position 12, expected UTF-8. Convert the file."),
    "nested too deeply": ("[" * 100_000, "JSON nested too deeply. Write one flat JSON object per line."),
}


@pytest.mark.parametrize(("line", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_one_line_with_file_line_field_and_reason(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, line: Mapping[str, object] | str | bytes, message: str
) -> None:
    path = write_lines(tmp_path / "bad.jsonl", GOOD, line, GOOD)
    with pytest.raises(DataError) as caught:
        build(tokenizer, path=str(path))
    assert str(caught.value) == f"{path}, line 2: {message}"


def test_a_bad_row_of_a_parquet_file(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_parquet(tmp_path / "bad.parquet", [GOOD, {**GOOD, "answer": None}])
    with pytest.raises(DataError) as caught:
        build(tokenizer, path=str(path))
    assert str(caught.value) == f"{path}, row 2: answer: missing, expected a text. Add it."


def test_a_name_that_the_template_wants_and_a_row_lacks(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_lines(tmp_path / "a.jsonl", {**GOOD, "hint": "x"}, GOOD)
    with pytest.raises(DataError) as caught:
        build(tokenizer, path=str(path), prompt_template="{hint} {prompt}")
    assert str(caught.value) == (
        f"{path}, line 2: prompt_template: got {{hint}}, expected one of prompt. Correct data.prompt_template."
    )


def test_all_bad_rows_are_counted_and_the_first_are_listed(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    lines = [GOOD if n % 2 else {**GOOD, "answer": n} for n in range(3000)]
    path = write_lines(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(DataError) as caught:
        build(tokenizer, path=str(path))
    head, *listed, rest = str(caught.value).split("\n")
    assert head == f"{path}: 1500 of 3000 rows are bad. Correct or remove them."
    places = [line.strip().partition(": ")[0] for line in listed]
    assert places == [f"{path}, line {n}" for n in (1, 3, 5, 7, 9)]
    assert len(listed) == 5
    assert rest.strip() == "and 1495 more"


# Files and tasks that are bad as a whole


def test_files_that_cannot_be_read(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "torn.parquet").write_bytes(write_parquet(tmp_path / "a.parquet", [GOOD]).read_bytes()[:-20])
    (tmp_path / "table.csv").write_text("prompt,answer\n")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for name, message in {
        "torn.parquet": "torn.parquet: not a readable parquet file. Write it again. pyarrow says: ",
        "table.csv": "table.csv: got '.csv', expected a .jsonl or .parquet file, or a folder that is there.",
        "empty.jsonl": "empty.jsonl: got no rows, expected at least one. Check the path.",
        "missing.jsonl": "missing.jsonl: no such file. Check the path; it is relative to",
    }.items():
        with pytest.raises(DataError) as caught:
            build(tokenizer, path=str(tmp_path / name))
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"task": "count_bitz"},
            "data.train, data.eval: got 'count_bitz', expected the name of a reasoning-gym task. Did you mean "
            "count_bits?",
        ),
        (
            {"task": "count_bits", "params": {"maxn": 9}},
            "data.params: got 'maxn', expected a parameter of count_bits (min_n, max_n, size, seed). "
            "Did you mean max_n?",
        ),
        (
            {"task": "count_bits", "params": {"seed": 9}},
            "data.params: got 'seed', expected a parameter of the task. Leave it out",
        ),
        (
            {"task": "count_bits", "params": {"max_n": -1}},
            "data.params: got {'max_n': -1}, expected values that count_bits accepts. "
            "reasoning-gym says: min_n must be between 1 and max_n.",
        ),
        (
            {"task": "count_bits", "params": {"max_n": "many"}},
            "data.params: got {'max_n': 'many'}, expected values that count_bits accepts.",
        ),
    ],
)
def test_a_task_that_cannot_be_built(tokenizer: PreTrainedTokenizerBase, source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tokenizer, **source, size=3)
    assert str(caught.value).startswith(message)


def test_a_prompt_of_a_task_that_is_too_long(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"(?s)task count_bits: 3 of 3 rows are bad.*problem 0: prompt: got 7\d tokens"):
        build(tokenizer, room=20, **COUNT_BITS, size=3)


def test_a_template_name_that_a_task_lacks(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"problem 0: prompt_template: got \{numbr\}, expected one of prompt, .*number"):
        build(tokenizer, **COUNT_BITS, size=1, prompt_template="{numbr}=")


def test_held_out_prompts_are_left_out_and_the_rest_is_numbered_anew(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": p, "answer": "1", "verifier": "exact"} for p in ("a", "b", "c", "b")]
    train = build(tokenizer, path=str(write_lines(tmp_path / "train.jsonl", *rows)))
    held_out = build(tokenizer, path=str(write_lines(tmp_path / "eval.jsonl", rows[1])))
    assert [(p.index, p.prompt) for p in train.without(held_out)] == [(0, "a"), (1, "c")]
    with pytest.raises(DataError, match=r"all 1 prompts of a set are among the 4 held out"):
        held_out.without(train)


def problems_of(*levels: object) -> Dataset:
    """Of an environment, which makes its prompts of the metadata."""
    name = "tests.rollout.environments:Talks"
    return Dataset(
        Problem(index=i, prompt="a", prompt_ids=(1,), answer="-", verifier=name, metadata={"level": level, "set": {1}})
        for i, level in enumerate(levels)
    )


def test_problems_of_an_environment_are_told_apart_by_what_it_reads() -> None:
    """Wrong: the prompt alone, which may be the same for all."""
    train = problems_of({"b": 2, "a": [1]}, 2, 3, 2)
    assert [p.metadata["level"] for p in train.without(problems_of({"a": [1], "b": 2}, 3))] == [2, 2]
    with pytest.raises(DataError, match=r"all 2 prompts of a set are among the 3 held out"):
        problems_of(2, 3).without(problems_of(3, 2, 1))
    assert len({problems_of(level).content for level in (1, 2, "1", [1], None, np.arange(2000), np.ones(2000))}) == 7


def test_objects_of_a_functions_rows_have_one_content_on_all_ranks() -> None:
    """Each has its own, at other addresses."""
    one, two = (problems_of({"b", "a"}, lambda: 0, Path("x"), object(), np.arange(2000)) for _ in range(2))
    assert one.content == two.content


@pytest.mark.parametrize(
    ("held_out", "told"),
    [("b", ["2 of 4 problems to learn from are among those of eval, and are left out."]), ("d", [])],
)
def test_a_run_tells_how_many_problems_are_left_out(held_out: str, told: list[str], tmp_path: Path) -> None:
    rows = [{"prompt": p, "answer": "1", "verifier": "exact"} for p in ("a", "b", "c", "b", held_out)]
    train, other = write_lines(tmp_path / "train.jsonl", *rows[:4]), write_lines(tmp_path / "eval.jsonl", rows[4])
    make_char_tokenizer(tmp_path)
    config, notes = load(["quickstart_plain"]), list[str]()
    config = replace(config, data=DataConfig(train=str(train), eval=(str(other),)))
    _problems(config, load_tokenizer(tmp_path), notes.append)
    assert notes == told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "",
            "expected at most 446 (the model's context length 512 less rollout.max_new_tokens). Shorten it, or lower "
            "rollout.max_new_tokens.",
        ),
        (
            "--train.tokens-per-microbatch 100",
            "expected at most 35 (train.tokens_per_microbatch x parallel.context less rollout.max_new_tokens). Shorten "
            "it, or lower rollout.max_new_tokens, or raise that limit.",
        ),
    ],
)
def test_a_run_tells_which_limit_a_prompt_exceeds(words: str, told: str, tmp_path: Path) -> None:
    rows = [{**GOOD, "prompt": "1" * 460}, GOOD]
    train, other = (write_lines(tmp_path / f"{i}.jsonl", row) for i, row in enumerate(rows))
    make_char_tokenizer(tmp_path)
    config = load(["quickstart_plain", *words.split()])
    config = replace(config, data=DataConfig(train=str(train), eval=(str(other),)))
    with pytest.raises(DataError, match=re.escape(f"prompt: got 460 tokens, {told}")):
        _problems(config, load_tokenizer(tmp_path))
