"""Modules of tests that run in a process of their own, and print what they found as JSON in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def found_by(module: str, *arguments: object, limit_s: float = 400.0, **environment: str) -> dict[str, Any]:
    """Return what it printed last. Args: what is added to the environment."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
