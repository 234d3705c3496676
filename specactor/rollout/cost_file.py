"""The file of a cost table: ``specactor profile`` writes it, plans and engines read it.

Invariant: it appears under its name only when it is whole.
"""

from __future__ import annotations

from pathlib import Path

from specactor.errors import DataError
from specactor.rollout.speculation.costs import CostTable


def read(file: str | Path) -> CostTable:
    """Read a table. Raises DataError where there is no file, and PlanError for what is no table."""
    try:
        return CostTable.from_json(Path(file).read_bytes())
    except OSError as error:
        raise DataError(
            f"cost_table: got {str(file)!r}, expected a file that specactor profile wrote ({error.strerror}). "
            "Run specactor profile RECIPE."
        ) from None


def write(file: Path, table: CostTable) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.tmp")
    fresh.write_text(table.to_json() + "\n")
    fresh.replace(file)
