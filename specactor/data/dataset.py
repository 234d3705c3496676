"""Problems of a task, a file, a folder of Hugging Face's datasets or a function, checked before training. Columns other
than prompt or ``messages``, answer and verifier go to `Problem.metadata`. reasoning-gym needs ``entry``, and takes
``task`` and ``params``.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, overload

import msgspec
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import xxhash
from transformers import PreTrainedTokenizerBase

from specactor.config import SourceConfig
from specactor.config.data import NOT_DOWNLOADED
from specactor.config.rules import COMPACT
from specactor.data import chat, verifiers
from specactor.data.environment import environment_of
from specactor.data.stream import Visit
from specactor.errors import DataError
from specactor.types import DrawnProblem, Problem

COLUMNS = ("prompt", "answer", "verifier")
_NO_ROWS = "{}: got no rows, expected at least one. Check the path."
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow: a file without it was cut, maybe between two batches


class Dataset(Sequence[Problem]):
    """A sequence of problems, in which problem i has index i."""

    def __init__(self, problems: Iterable[Problem], sizes: Sequence[int] = ()) -> None:
        self._problems = tuple(problems)
        self.sizes = tuple(sizes) or (len(self._problems),)

    @classmethod
    def of(cls, sets: Sequence[Dataset]) -> Dataset:
        together = (problem for part in sets for problem in part)
        return cls((replace(problem, index=i) for i, problem in enumerate(together)), [len(part) for part in sets])

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Problem, ...]: ...
    def __getitem__(self, index: int | slice) -> Problem | tuple[Problem, ...]:
        return self._problems[index]

    def drawn(self, visits: Iterable[Visit]) -> list[DrawnProblem]:
        """Return the problems of these visits."""
        return [DrawnProblem(**vars(self._problems[index]), epoch=epoch) for index, epoch in visits]

    def without(self, held_out: Dataset) -> Dataset:
        """Leave out prompts of `held_out`, and number anew. Raises DataError when none is left."""
        prompts = {problem.prompt_ids for problem in held_out}
        kept = [problem for problem in self._problems if problem.prompt_ids not in prompts]
        if not kept:
            raise DataError(
                f"data.train and data.mix: all {len(self)} prompts of a set are among the {len(held_out)} held out for "
                "evaluation, expected others. Evaluate on other or fewer problems, or learn from a larger set."
            )
        return Dataset(replace(problem, index=index) for index, problem in enumerate(kept))

    @cached_property
    def content(self) -> str:
        """Return a digest of prompts, answers and verifiers; metadata of a function's rows may be any object."""
        found = xxhash.xxh3_128()
        for problem in self._problems:
            text = f"{problem.prompt}\0{problem.answer}\0{problem.verifier}\0"
            found.update(text.encode("utf-8", "surrogatepass"))
        return found.hexdigest()

    @cached_property
    def digest(self) -> str:
        return hashlib.blake2b(msgspec.json.encode(self._problems, order="sorted"), digest_size=16).hexdigest()


def build_dataset(source: SourceConfig, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int) -> Dataset:
    """Check and tokenize all rows. Raises DataError with the number of bad ones and the first; ConfigError for an
    unknown task or parameter."""
    name = f"task {source.task}" if source.task else source.path
    rows = _task_rows(source) if source.task else _file_rows(source, tokenizer)
    problems: list[Problem] = []
    bad: list[str] = []
    num_bad = 0
    known: dict[int, int] = {}
    while together := list(islice(rows, 1024)):  # tokenized in one call
        for row, ids in zip(together, _tokenize(together, tokenizer, known), strict=True):
            problem = _problem(len(problems) + num_bad, row, ids)
            reason = row.reason or _objection(problem, tokenizer, max_prompt_tokens)
            if not reason:
                problems.append(problem)
                continue
            num_bad += 1
            if num_bad <= 5:  # so many are listed; all are counted
                bad.append(f"{name}, {row.where}: {reason}{'' if reason.endswith('?') else '.'}")
    if num_bad:
        raise DataError(_report(name, bad, num_bad, num_bad + len(problems)))
    if not problems:
        raise DataError(_NO_ROWS.format(name))
    return Dataset(problems)


def check_source(source: SourceConfig) -> None:
    """Look at a task, a function or a file's first row, without a tokenizer. Raises ConfigError, or DataError."""
    if source.task:
        row = next(_task_rows(replace(source, size=1)))
        reason, where = row.reason, row.where
    elif ":" in source.path:
        _function_of(source.path)
        return
    else:
        first = next(read_rows(Path(source.path)), None)
        if first is None:
            raise DataError(_NO_ROWS.format(source.path))
        reason, where = first.reason or _wrong_column(first), first.where
        if not reason and "prompt" in first.columns:
            reason = _prompt(source, first.columns["prompt"], _metadata(first))[1]
        reason = reason or _verifier_fault(first.columns["verifier"])
    if reason:
        raise DataError(f"{source.task or source.path}, {where}: {reason}.")


def _report(name: str, bad: Sequence[str], num_bad: int, num_rows: int) -> str:
    if num_bad == 1:
        return bad[0]
    more = [f"and {num_bad - len(bad)} more"] if num_bad > len(bad) else []
    return "\n  ".join([f"{name}: {num_bad} of {num_rows} rows are bad. Correct or remove them.", *bad, *more])


def _task_rows(source: SourceConfig) -> Iterator[Row]:
    from specactor.data import reasoning  # takes two seconds, and files do without it

    task = reasoning.create_task(source.task, source.params, size=source.size, seed=source.seed)
    for i in range(source.size):
        entry = task[i]
        prompt, reason = _prompt(source, entry["question"], entry["metadata"])
        columns = {
            "prompt": prompt,
            "answer": entry["answer"] or "",  # some tasks have no single answer
            "verifier": "reasoning-gym",
            "task": source.task,
            "params": dict(source.params),
            "entry": entry,
        }
        yield Row(where=f"problem {i}", columns=columns, reason=reason)


def _file_rows(source: SourceConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Row]:
    """Yield rows with the prompts that the model sees."""
    for row in called_rows(source.path) if ":" in source.path else read_rows(Path(source.path)):
        reason, prompt = row.reason or _wrong_column(row), ""
        if not reason and "messages" in row.columns:
            prompt, reason = _of_messages(row.columns["messages"], tokenizer, source.prompt_template)
        elif not reason:
            prompt, reason = _prompt(source, row.columns["prompt"], _metadata(row))
        yield replace(row, columns={} if reason else row.columns | {"prompt": prompt}, reason=reason)


def _metadata(row: Row) -> dict[str, object]:
    return {name: value for name, value in row.columns.items() if name not in COLUMNS}


def _of_messages(messages: object, tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, str]:
    """Return the prompt, or its fault."""
    if template != SourceConfig.prompt_template:
        return "", (
            f"messages: beside data.prompt_template {template!r}, expected {SourceConfig.prompt_template}: the model's "
            "chat template makes the prompt. Set it so"
        )
    if not chat.are_messages(messages):
        return "", f"messages: got {messages!r:.80}, expected a list of objects with a role and a content. Correct them"
    try:
        return chat.prompt_text(tokenizer, messages), ""
    except DataError as error:
        return "", str(error).removesuffix(".")


def _wrong_column(row: Row) -> str:
    if {"messages", "prompt"} <= row.columns.keys():
        return "messages: beside a prompt, expected one of the two. Remove the other"
    for name in COLUMNS:
        if name == "prompt" and "messages" in row.columns:
            continue
        if name not in row.columns:
            nearest = difflib.get_close_matches(name, row.columns, n=1)
            hint = f". Did you mean {nearest[0]}? Rename it" if nearest else ". Add it"
            return _of_others(row.columns) or f"{name}: missing, expected a text{hint}"
        value = row.columns[name]
        if name == "prompt" and chat.are_messages(value):
            return _of_others(row.columns) or "prompt: got messages, expected a text. Rename the column to messages"
        if not isinstance(value, str):
            return f"{name}: got {str(value)[:80]} ({type(value).__name__}), expected a text. Put it in quotes"
        if not value.strip():
            return f"{name}: got {value!r}, expected a text that is not empty. Remove the row"
    return ""


def _of_others(columns: Mapping[str, object]) -> str:
    """Return what to do with the columns of verl or slime, or nothing."""
    judged = columns.get("reward_model")
    if "answer" in columns:
        return ""
    if isinstance(judged, Mapping) and "ground_truth" in judged:
        whose, answer = "verl", 'row["reward_model"]["ground_truth"]'
    elif "label" in columns:
        whose, answer = "slime", 'row["label"]'
    else:
        return ""
    said = "prompt" if isinstance(columns.get("prompt"), str) else "messages"
    return (
        f"got the columns of {whose}, expected {said}, answer and verifier. Rename them, or give a function "
        f'module:function that returns rows {{"{said}": row["prompt"], "answer": {answer}, "verifier": "math-verify"}}'
    )


def _prompt(source: SourceConfig, prompt: str, values: Mapping[str, object]) -> tuple[str, str]:
    """Return the prompt, or its fault."""
    try:
        texts = {name: _Text(value) for name, value in {**values, "prompt": prompt}.items()}
        return source.prompt_template.format_map(texts), ""
    except KeyError as error:
        known = ", ".join(["prompt", *values])
        return "", f"prompt_template: got {{{error.args[0]}}}, expected one of {known}. Correct data.prompt_template"


class _Text(str):
    def __format__(self, spec: str) -> str:
        return self.replace(" ", "") if spec == COMPACT else str(self)


def _tokenize(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, known: dict[int, int]) -> list[tuple[int, ...]]:
    """Return the rows' tokens. Equal ones are one object of `known`: else each has 28 bytes beside a pointer's 8, in
    millions of prompts on every rank."""
    prompts = ["" if row.reason or not _is_unicode(row.columns["prompt"]) else row.columns["prompt"] for row in rows]
    # A chat template made the prompt of messages: its marks are special tokens, and it is whole.
    is_rendered = ["messages" in row.columns for row in rows]
    plain = ["" if rendered else prompt for rendered, prompt in zip(is_rendered, prompts, strict=True)]
    found = [
        chat.rendered_ids(tokenizer, prompt) if rendered else ids
        for rendered, prompt, ids in zip(is_rendered, prompts, tokenizer(plain)["input_ids"], strict=True)
    ]
    return [tuple(map(known.setdefault, ids, ids)) for ids in found]


def _problem(index: int, row: Row, prompt_ids: tuple[int, ...]) -> Problem:
    texts = {name: row.columns.get(name, "") for name in COLUMNS}
    return Problem(index=index, prompt_ids=prompt_ids, metadata=_metadata(row), **texts)


def _objection(problem: Problem, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> str:
    """Return why a problem cannot be used; empty when it can."""
    ids = problem.prompt_ids
    if not _is_unicode(problem.prompt):
        return "prompt: not a Unicode text (a surrogate without its partner). Correct its \\u escapes"
    if not _is_unicode(problem.answer):
        return "answer: not a Unicode text (a surrogate without its partner). Correct its \\u escapes"
    if not ids:
        return f"prompt: got {problem.prompt!r}, which has no tokens. Remove the row"
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        unknown = _unknown(problem.prompt, tokenizer)
        return f"prompt: the tokenizer has no token for {unknown}. Replace it, or use a model that knows it"
    if len(ids) > max_prompt_tokens:
        return (
            f"prompt: got {len(ids)} tokens, expected at most {max_prompt_tokens} (the model's context less "
            "rollout.max_new_tokens). Shorten it, or lower rollout.max_new_tokens"
        )
    return _verifier_fault(problem.verifier) or verifiers.unscorable(problem) or ""


def _verifier_fault(name: str) -> str:
    try:
        if not environment_of(name):
            verifiers.get_verifier(name)
    except DataError as error:
        return f"verifier: {str(error).removesuffix('.')}"
    return ""


def _unknown(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the first character that alone becomes the unknown token, or the text."""
    alone = (c for c in text if tokenizer.unk_token_id in tokenizer.encode(c, add_special_tokens=False))
    return repr(next(alone, text[:80]))


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Row:
    where: str  # ``line 3`` of a text file, ``row 3`` of a parquet file or a folder; both count from 1
    columns: dict[str, Any]
    reason: str = ""  # why the row cannot be read; empty for a good one


def called_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a function at ``module:function``, the same on every rank. Raises DataError for none, or its
    error."""
    function = _function_of(name)
    number = 0
    try:
        for number, columns in enumerate(function(), start=1):
            if isinstance(columns, Mapping):
                yield Row(where=f"row {number}", columns=dict(columns))
            else:
                yield Row(where=f"row {number}", columns={}, reason=f"got {type(columns).__name__}, expected a mapping")
    except Exception as error:  # code of others
        raise DataError(
            f"data source {name}: after {number} rows it raised {type(error).__name__}: {error}. Correct the function; "
            "it takes no argument and returns rows."
        ) from error


def _function_of(name: str) -> Callable[[], Iterable[object]]:
    function = verifiers.find(name)
    if not callable(function):
        raise DataError(f"data source {name}: a {type(function).__name__}, expected a function without arguments.")
    return function


def read_rows(path: Path) -> Iterator[Row]:
    """Read a file or folder. Raises DataError when any part is unreadable."""
    if path.is_dir():
        return _folder_rows(path)
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(
            f"{path}: got {path.suffix!r}, expected a .jsonl or .parquet file, or a folder that is there. Convert it. "
            f"{NOT_DOWNLOADED}"
        )
    if not path.is_file():
        raise DataError(f"{path}: no such file. Check the path; it is relative to the folder where the run starts.")
    return readers[path.suffix](path)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _jsonl_row(f"line {number}", line)


def _jsonl_row(where: str, line: bytes) -> Row:
    try:
        columns = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        reason = f"got byte 0x{line[error.start]:02x} at position {error.start}, expected UTF-8. Convert the file"
        return Row(where=where, columns={}, reason=reason)
    except json.JSONDecodeError as error:
        reason = f"broken JSON at position {error.pos}: {error.msg}. Write one JSON object per line"
        return Row(where=where, columns={}, reason=reason)
    except RecursionError:
        return Row(where=where, columns={}, reason="JSON nested too deeply. Write one flat JSON object per line")
    if not isinstance(columns, dict):
        reason = f'got {type(columns).__name__}, expected an object. Write {{"prompt": ..., "answer": ..., ...}}'
        return Row(where=where, columns={}, reason=reason)
    return Row(where=where, columns=columns)


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _rows_of(file.iter_batches(batch_size=1024), 0)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file. Write it again. pyarrow says: {error}.") from error


def _folder_rows(path: Path) -> Iterator[Row]:
    """Read what datasets' save_to_disk wrote: Arrow streams, named in state.json."""
    number = 0
    for file in _arrow_files(path):
        try:
            with pyarrow.memory_map(str(file)) as mapped:
                mapped.seek(max(0, mapped.size() - len(END_OF_STREAM)))
                if mapped.read() != END_OF_STREAM:
                    raise pyarrow.ArrowInvalid("it ends in the middle")
                mapped.seek(0)
                for row in _rows_of(pyarrow.ipc.open_stream(mapped), number):
                    number += 1
                    yield row
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{file}: not a whole Arrow stream. Save the data again. pyarrow says: {error}.") from error


def _arrow_files(path: Path) -> list[Path]:
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(str(entry.parent) for entry in path.glob("*/state.json")))
        raise DataError(f"{path}: a folder of splits, expected one of them. Name one of {splits}.")
    try:
        state = json.loads((path / "state.json").read_text("utf-8"))
        files = [path / entry["filename"] for entry in state["_data_files"]]
        chosen = state.get("_indices_data_files")
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(
            f"{path}: got a folder without a readable state.json ({type(error).__name__}), expected one that the "
            "save_to_disk of Hugging Face's datasets wrote. Save the data so, or name a .jsonl or .parquet file."
        ) from error
    if chosen:
        raise DataError(f"{path}: has rows chosen by an index, expected plain ones. Call flatten_indices, and save it.")
    return files


def _rows_of(batches: Iterable[pyarrow.RecordBatch], number: int) -> Iterator[Row]:
    """Count a missing value (null) as a missing column."""
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            columns = {name: value for name, value in values.items() if value is not None}
            yield Row(where=f"row {number}", columns=columns)
