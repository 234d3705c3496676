"""torchrun, with ranks that are forked by a process that has imported what they need: a core's work for six seconds.

That process is Python's fork server: the first call starts it, and it ends with the tests. Runs that are struck are
started by torchrun itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.ending import end_tree

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["tests.lib.imports_of_ranks"])


def torchrun(
    world: int, target: str, *arguments: object, folder: Path, limit_s: float = 600.0, **variables: str
) -> tuple[int, str]:
    """Run `world` ranks to their end; returns the exit code and what they said. Nothing that they started is left.

    Args: a module, or a script's path; its arguments; where the log is written; environment variables.
    """
    log = folder / f"torchrun-{uuid.uuid4().hex[:6]}.log"
    launcher = Launcher(world, (target, *map(str, arguments)), {**os.environ, **variables}, log)
    code = -1
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = launcher.wait(limit_s)
    finally:
        if launcher.poll() is None:
            end_tree(launcher.pid)
            launcher.wait()
    return code, log.read_text(errors="replace")


class Launcher:
    """torchrun with ranks that are forked, with methods of `subprocess.Popen`."""

    def __init__(self, world: int, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._process = _FORKED.Process(target=_launch, args=(world, tuple(command), log, dict(environment)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._process.exitcode


def run_ranks(world: int, target: str, *arguments: object, folder: Path) -> str:
    """As `torchrun`; they must end well. Returns what they said."""
    code, output = torchrun(world, target, *arguments, folder=folder)
    assert code == 0, output[-6000:]
    return output


def run_alone(module: str, *arguments: object, limit_s: float = 240.0) -> None:
    """Run a module in a process, which must end well."""
    run_beside([(module, *arguments)], limit_s=limit_s)


def run_beside(commands: Sequence[tuple[object, ...]], *, limit_s: float = 240.0) -> None:
    """Run modules with their arguments side by side, without a launcher; all must end well."""
    named = [tuple(map(str, command)) for command in commands]
    children = [_FORKED.Process(target=_become_rank, args=(command, dict(os.environ))) for command in named]
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(limit_s)
        assert [child.exitcode for child in children] == [0] * len(children), named
    finally:
        for child in children:
            child.kill()
            child.join()


def run_and_read(command: tuple[object, ...], environment: Mapping[str, str], *, limit_s: float) -> str:
    """Run a module, which must end well. Returns what it printed. Args: what is added to the environment."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        arguments = (tuple(map(str, command)), {**os.environ, **environment}, output, errors)
        child = _FORKED.Process(target=_printing, args=arguments)
        try:
            child.start()
            child.join(limit_s)
            assert child.exitcode == 0, f"exit code {child.exitcode}\n{errors.read_text()[-4000:]}"
            return output.read_text()
        finally:
            child.kill()
            child.join()


def run_anew(commands: Sequence[tuple[object, ...]], *, limit_s: float = 240.0) -> None:
    """As `run_beside`, in processes of their own from the start."""
    started = [subprocess.Popen([sys.executable, "-W", "ignore", "-m", *map(str, command)]) for command in commands]
    try:
        assert [process.wait(timeout=limit_s) for process in started] == [0] * len(started), commands
    finally:
        for process in started:
            process.kill()
            process.wait()


def _launch(world: int, command: tuple[str, ...], log: Path, environment: Mapping[str, str]) -> None:
    """The launcher, in a process of its own."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(settings, _become_rank)(command)


def _printing(command: tuple[str, ...], environment: Mapping[str, str], output: Path, errors: Path) -> None:
    for path, descriptor in ((output, 1), (errors, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    _become_rank(command, environment)
    sys.stdout.flush()


def _become_rank(command: tuple[str, ...], environment: Mapping[str, str] | None = None) -> None:
    """What a rank finds in a process of its own."""
    os.environ.update(environment or {})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's are not a rank's
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = list(command)
    try:
        if command[0].endswith(".py"):
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
        else:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:  # else the launcher would wait for a result
            raise
