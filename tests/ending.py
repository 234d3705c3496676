"""Ending what a test has started, and seeing that it has ended."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any

import psutil


def end_all(process: subprocess.Popen[Any]) -> None:
    """With its descendants, of which ranks of torchrun are in sessions of their own. Harmless when it is gone."""
    if process.poll() is None:
        end_tree(process.pid)
        process.wait()


def end_tree(pid: int) -> None:
    """Kill a process that has not been waited for, and its descendants."""
    parent = psutil.Process(pid)
    for each in [*parent.children(recursive=True), parent]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def still_runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one that ends while it is looked at has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
