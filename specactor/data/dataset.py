"""Problems of a task, a file, a folder of Hugging Face's datasets or a function, checked before training. Columns other
than prompt or ``messages``, answer and verifier go to `Problem.metadata`. reasoning-gym needs ``entry``, and takes
``task`` and ``params``.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, overload

import msgspec
import xxhash
from transformers import PreTrainedTokenizerBase

from specactor.config import SourceConfig
from specactor.config.rules import COMPACT
from specactor.data import chat, verifiers
from specactor.data.environment import environment_of
from specactor.data.rows import Row, called_rows, function_of, read_rows
from specactor.data.stream import Visit
from specactor.errors import DataError
from specactor.types import DrawnProblem, Problem

if TYPE_CHECKING:
    from specactor.parallel.collective import Collective

T = TypeVar("T")
COLUMNS = ("prompt", "answer", "verifier")
SEEN = ("images", "image", "videos", "video", "audios", "audio")  # columns of what no policy here could see
PART = 64  # rows that a rank looks at before another's come, tokenized in one call
SAME_ROWS = "A function has to return the same rows on every rank, and all hosts have to see the same files."
_NO_ROWS = "{}: got no rows, expected at least one. Check the path."


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
        """Leave out problems of `held_out`, and number anew. Raises DataError when none is left."""
        others = {(problem.prompt_ids, _instance(problem)) for problem in held_out}
        kept = [problem for problem in self._problems if (problem.prompt_ids, _instance(problem)) not in others]
        if not kept:
            raise DataError(
                f"data.train and data.mix: all {len(self)} prompts of a set are among the {len(held_out)} held out for "
                "evaluation, expected others. Evaluate on other or fewer problems, or learn from a larger set."
            )
        return Dataset(replace(problem, index=index) for index, problem in enumerate(kept))

    @cached_property
    def content(self) -> str:
        """Return a digest of prompts, answers and verifiers, and of what an environment reads besides."""
        found = xxhash.xxh3_128()
        for problem in self._problems:
            text = f"{problem.prompt}\0{problem.answer}\0{problem.verifier}\0{_instance(problem)}"
            found.update(text.encode("utf-8", "surrogatepass"))
        return found.hexdigest()

    @cached_property
    def digest(self) -> str:
        return hashlib.blake2b(msgspec.json.encode(self._problems, order="sorted"), digest_size=16).hexdigest()


def _instance(problem: Problem) -> str:
    """Return what tells an environment's or agent's problems of one prompt apart; of others the prompt is the problem,
    however it is judged."""
    if environment_of(problem.verifier) is None:
        return ""
    return _canonical({"answer": problem.answer, **problem.metadata})


def _canonical(value: object) -> str:
    """Return a text that equal values share on all ranks, which hold objects at other addresses."""
    if isinstance(value, Mapping):
        return f"{{{','.join(sorted(f'{_canonical(key)}:{_canonical(of)}' for key, of in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{','.join(sorted(map(_canonical, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_canonical, value))}]"
    if hasattr(value, "tolist"):  # NumPy's text leaves out what is long
        return _canonical(value.tolist())
    return repr(value) if isinstance(value, str) else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


class Alone:
    """One process, where a `Collective` would be."""

    rank, world = 0, 1

    def together(self, phase: str, work: Callable[[], T]) -> T:
        return work()

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload]


ALONE = Alone()


def build_datasets(
    sources: Sequence[SourceConfig],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    prompt_limit: str = "",
    collective: Collective | Alone = ALONE,
) -> list[Dataset]:
    """Check and tokenize all rows, a part of them on each rank. Collective. Raises DataError with the number of bad
    ones and the first; ConfigError for an unknown task or parameter. `prompt_limit` says why `max_prompt_tokens`."""
    readings = collective.together(
        "data",
        lambda: [
            _Reading(source, tokenizer, max_prompt_tokens, collective.rank, collective.world, prompt_limit)
            for source in sources
        ],
    )
    parts = [collective.gather_bytes(reading.own) for reading in readings]
    return collective.together("data", lambda: [of.dataset(part) for of, part in zip(readings, parts, strict=True)])


def build_dataset(source: SourceConfig, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int) -> Dataset:
    return build_datasets([source], tokenizer, max_prompt_tokens=max_prompt_tokens)[0]


class _Looked(msgspec.Struct, array_like=True):
    """What is told of a row that was looked at."""

    ids: bytes  # int32
    prompt: str | None  # of messages: the chat template's text
    reason: str


class _Looks(msgspec.Struct, array_like=True):
    num_rows: int  # of all
    own: list[_Looked]


class _Reading:
    """A source's rows. To look at them takes long (a template, the tokenizer, math-verify), so ranks share that."""

    def __init__(
        self,
        source: SourceConfig,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        rank: int,
        world: int,
        prompt_limit: str = "",
    ) -> None:
        self._source, self._tokenizer, self._most = source, tokenizer, (max_prompt_tokens, prompt_limit)
        self._name = f"task {source.task}" if source.task else source.path
        self._rows = list(_task_rows(source) if source.task else _file_rows(source))
        own = [looked for part in self._parts()[rank::world] for looked in self._look(part)]
        self.own = msgspec.msgpack.encode(_Looks(len(self._rows), own))

    def _parts(self) -> list[list[Row]]:
        return [self._rows[start : start + PART] for start in range(0, len(self._rows), PART)]

    def _look(self, rows: Sequence[Row]) -> Iterator[_Looked]:
        seen = [_as_seen(row, self._tokenizer, self._source) for row in rows]
        for row, ids in zip(seen, _tokenize(seen, self._tokenizer), strict=True):
            reason = row.reason or _objection(_problem(0, row, tuple(ids)), self._tokenizer, *self._most)
            told = reason.encode(errors="backslashreplace").decode()
            rendered = row.columns["prompt"] if "messages" in row.columns and not reason else None
            yield _Looked(b"" if reason else array("i", ids).tobytes(), rendered, told)

    def dataset(self, parts: Sequence[bytes]) -> Dataset:
        """Return the problems, by what all ranks have told."""
        looks = [msgspec.msgpack.decode(part, type=_Looks) for part in parts]
        if len(counts := {of.num_rows for of in looks}) > 1:
            raise DataError(f"{self._name}: ranks read {sorted(counts)} rows. {SAME_ROWS}")
        looked, known = [iter(of.own) for of in looks], dict[int, int]()
        problems: list[Problem] = []
        bad: list[str] = []
        num_bad = 0
        for number, row in enumerate(self._rows):
            found = next(looked[number // PART % len(looks)])
            if not found.reason:
                # Equal ones are one object: else each has 28 bytes beside a pointer's 8, on every rank.
                ids = tuple(known.setdefault(token, token) for token in memoryview(found.ids).cast("i"))
                seen = row if found.prompt is None else replace(row, columns=row.columns | {"prompt": found.prompt})
                problems.append(_problem(len(problems), seen, ids))
                continue
            num_bad += 1
            if num_bad <= 5:  # so many are listed; all are counted
                bad.append(f"{self._name}, {row.where}: {found.reason}{'' if found.reason.endswith('?') else '.'}")
        if num_bad:
            raise DataError(_report(self._name, bad, num_bad, len(self._rows)))
        if not problems:
            raise DataError(_NO_ROWS.format(self._name))
        return Dataset(problems)


def check_source(source: SourceConfig) -> None:
    """Look at a task, a function or a file's first row, without a tokenizer. Raises ConfigError, or DataError."""
    if source.task:
        row = next(_task_rows(replace(source, size=1)))
        reason, where = row.reason, row.where
    elif ":" in source.path:
        function_of(source.path)
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


def _file_rows(source: SourceConfig) -> Iterator[Row]:
    """Yield rows with their texts as the template has them; messages are left to `_as_seen`."""
    for row in called_rows(source.path) if ":" in source.path else read_rows(Path(source.path)):
        reason, prompt = row.reason or _wrong_column(row), {}
        if not reason and "messages" not in row.columns:
            text, reason = _prompt(source, row.columns["prompt"], _metadata(row))
            prompt = {"prompt": text}
        yield replace(row, columns={} if reason else row.columns | prompt, reason=reason)


def _as_seen(row: Row, tokenizer: PreTrainedTokenizerBase, source: SourceConfig) -> Row:
    """Return the row with the prompt that the model sees."""
    if row.reason or "messages" not in row.columns:
        return row
    prompt, reason = _of_messages(row.columns["messages"], tokenizer, source.prompt_template)
    return replace(row, columns={} if reason else row.columns | {"prompt": prompt}, reason=reason)


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
        expected = "a list of objects with a role and a content, both texts"
        return "", f"messages: got {messages!r:.80}, expected {expected}. Correct them"
    try:
        return chat.prompt_text(tokenizer, messages), ""
    except DataError as error:
        return "", str(error).removesuffix(".")


def _wrong_column(row: Row) -> str:
    for name in SEEN:
        if not _is_empty(row.columns.get(name)):
            return (
                f"{name}: the policy would not see it, expected texts alone. Leave it out, or rename it for a verifier"
            )
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
        if name == "prompt" and isinstance(value, list):
            return f"prompt: got {value!r:.80}, expected a text, or a column messages with texts. Correct it"
        if not isinstance(value, str):
            return f"{name}: got {str(value)[:80]} ({type(value).__name__}), expected a text. Put it in quotes"
        if not value.strip():
            return f"{name}: got {value!r}, expected a text that is not empty. Remove the row"
    return ""


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, Sized) and len(value) == 0)


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
        return source.prompt_template.format_map(_Texts({**values, "prompt": prompt})), ""
    except KeyError as error:
        known = ", ".join(["prompt", *values])
        return "", f"prompt_template: got {{{error.args[0]}}}, expected one of {known}. Correct data.prompt_template"


class _Texts(dict[str, object]):
    """Values as texts, once they are asked for: tests of a program have megabytes."""

    def __getitem__(self, name: str) -> str:
        return _Text(super().__getitem__(name))


class _Text(str):
    def __format__(self, spec: str) -> str:
        return self.replace(" ", "") if spec == COMPACT else str(self)


def _tokenize(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Sequence[int]]:
    prompts = ["" if row.reason or not _is_unicode(row.columns["prompt"]) else row.columns["prompt"] for row in rows]
    # A chat template made the prompt of messages: its marks are special tokens, and it is whole.
    is_rendered = ["messages" in row.columns for row in rows]
    plain = ["" if rendered else prompt for rendered, prompt in zip(is_rendered, prompts, strict=True)]
    return [
        chat.rendered_ids(tokenizer, prompt) if rendered else ids
        for rendered, prompt, ids in zip(is_rendered, prompts, chat.text_ids(tokenizer, plain), strict=True)
    ]


def _problem(index: int, row: Row, prompt_ids: tuple[int, ...]) -> Problem:
    texts = {name: row.columns.get(name, "") for name in COLUMNS}
    return Problem(index=index, prompt_ids=prompt_ids, metadata=_metadata(row), **texts)


def _objection(problem: Problem, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int, limit: str) -> str:
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
        return f"prompt: got {len(ids)} tokens, expected at most {max_prompt_tokens} {limit}".rstrip()
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
