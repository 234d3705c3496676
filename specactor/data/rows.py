"""Rows of files, folders and functions, as they are there.

Invariant: a part that cannot be read is a row with a reason, or a DataError; nothing is left out in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from specactor.config.data import NOT_DOWNLOADED
from specactor.data import verifiers
from specactor.errors import DataError

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow: a file without it was cut, maybe between two batches


@dataclass(frozen=True, kw_only=True)
class Row:
    where: str  # ``line 3`` of a text file, ``row 3`` of a parquet file or a folder; both count from 1
    columns: dict[str, Any]
    reason: str = ""  # why the row cannot be read; empty for a good one


def called_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a function at ``module:function``, the same on every rank. Raises DataError for none, or its
    error."""
    function = function_of(name)
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


def function_of(name: str) -> Callable[[], Iterable[object]]:
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
