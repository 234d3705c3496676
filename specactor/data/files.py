"""Rows of JSONL and parquet files, each with its place, or with what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from specactor.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a file. Either `columns` or `reason` is meant."""

    where: str
    """``line 3`` of a text file, ``row 3`` of a parquet file; both count from 1."""
    columns: dict[str, Any]
    reason: str = ""
    """Why the row cannot be read; empty for a good one."""


def read_rows(path: Path) -> Iterator[Row]:
    """All rows in order; blank lines are left out. Raises DataError when the file as a whole cannot be read."""
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(f"{path}: got {path.suffix!r}, expected a .jsonl or .parquet file. Convert it.")
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
    """A missing value (null) counts as a missing column."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    columns = {name: value for name, value in values.items() if value is not None}
                    yield Row(where=f"row {number}", columns=columns)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file. Write it again. pyarrow says: {error}.") from error
