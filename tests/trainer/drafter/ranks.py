"""Two or more ranks as processes of their own, for what they do together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SURROUNDINGS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def run_ranks(script: str, *arguments: object, world: int = 2, limit_s: float = 240) -> None:
    """Each is a module beside this one, with its rank before the arguments; all must end with exit code 0."""
    command = [sys.executable, "-m", f"{__package__}.{script}"]
    ranks = [
        subprocess.Popen([*command, str(rank), *map(str, arguments)], cwd=ROOT, env=os.environ | SURROUNDINGS)
        for rank in range(world)
    ]
    try:
        assert [process.wait(timeout=limit_s) for process in ranks] == [0] * world
    finally:
        for process in ranks:
            process.kill()
            process.wait(timeout=10)
