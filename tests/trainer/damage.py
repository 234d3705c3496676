"""Copies of a checkpoint, each damaged in one way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def damaged(checkpoint: Path, folder: Path) -> dict[str, str]:
    """Path by kind of damage."""
    paths = {}
    for name in ("truncated", "flipped", "missing file", "no state", "bad json", "other format"):
        paths[name] = folder / name / checkpoint.name
        shutil.copytree(checkpoint, paths[name])
    big = max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size).name
    data = (checkpoint / big).read_bytes()
    (paths["truncated"] / big).write_bytes(data[: len(data) // 2])
    middle = len(data) // 2
    (paths["flipped"] / big).write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    (paths["missing file"] / big).unlink()
    (paths["no state"] / "state.json").unlink()
    (paths["bad json"] / "state.json").write_text('{"format": 1')
    about = json.loads((checkpoint / "state.json").read_text()) | {"format": 99}
    (paths["other format"] / "state.json").write_text(json.dumps(about))
    return {name: str(path) for name, path in paths.items()} | {"no folder": str(folder / "step-000077")}
