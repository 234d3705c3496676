"""Modules of tests that run in a process of their own, and print what they found as JSON in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.lib.ranks import run_and_read


def found_by(
    module: str, *arguments: object, limit_s: float = 400.0, anew: bool = False, **environment: str
) -> dict[str, Any]:
    """Return what it printed last.

    Args:
        anew: not forked by a process that has imported torch and Triton, for what is read or changed before that.
        environment: what is added to it.
    """
    command = (module, *map(str, arguments))
    if anew:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", *command],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        output = done.stdout
    else:
        output = run_and_read(command, environment, limit_s=limit_s)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found
