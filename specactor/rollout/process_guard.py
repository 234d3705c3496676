"""The process around a child that leaves nothing behind. POSIX only.

    python -m specactor.rollout.process_guard MODULE:FUNCTION --fd N

calls the function with the inherited socket N, whose end means stop.

Invariants: an exit of the guard leaves no process, temporary folder or file in /dev/shm; when the owner dies, the child
ends within `GRACE_S`; it ends with the guard.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import importlib
import os
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from specactor.waits import GRACE_S

TEMPORARY = Path("/tmp")  # where temporary folders are made; sockets in them allow no long path
SHARED_FILES = "shared-files"  # lists files in /dev/shm that go with the folder, a path or pattern per line
_SHARED = Path("/dev/shm")
_PREFIX = "specactor-child-"


def run_guarded(connection_fd: int, guarded: Callable[[], None]) -> None:
    """Run `guarded` in a process of its own, guard that, and exit."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=TEMPORARY))
    lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.environ["TMPDIR"] = str(folder)
    guard_pid = os.getpid()
    # a signal must be pending, and not lost, from before the fork on.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})
    guarded_pid = os.fork()
    if guarded_pid == 0:
        os.close(lock)
        _become_guarded(guard_pid)
        guarded()
        sys.stdout.flush()
        os._exit(0)
    try:
        _watch(connection_fd, guarded_pid, folder)
    finally:
        _end_descendants()
        _remove(folder)
    os._exit(0)


def _become_guarded(guard_pid: int) -> None:
    if not die_with(guard_pid):
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tempfile.tempdir = None


def _watch(connection_fd: int, guarded_pid: int, folder: Path) -> None:
    poll = select.poll()
    poll.register(connection_fd, select.POLLRDHUP)
    deadline = None
    noted: set[int] = set()
    while not _exited(guarded_pid):
        if deadline is None and poll.poll(0):
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return
        _note_pids(folder, noted)
        waited = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}, 0.25)
        if waited is not None and waited.si_signo == signal.SIGTERM:
            return


def _note_pids(folder: Path, noted: set[int]) -> None:
    """List files of new descendants: SGLang puts pids into names in /dev/shm."""
    new = set(descendants(os.getpid())) - noted
    if new:
        with suppress(OSError):  # where /tmp is full it is tried again; the guarded process may need none of it
            with open(folder / SHARED_FILES, "a") as file:
                file.write("".join(f"/dev/shm/sgl_shm_*_{pid}_*\n" for pid in sorted(new)))
            noted |= new


def _exited(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _end_descendants() -> None:
    """Kill until there is no child; a subreaper inherits orphans."""
    while True:
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        time.sleep(0.005)


def descendants(pid: int) -> list[int]:
    found = []
    # What ends meanwhile has no children: they become those of the subreaper.
    with suppress(FileNotFoundError, ProcessLookupError):
        tasks = os.listdir(f"/proc/{pid}/task")
        for task in tasks:
            with suppress(FileNotFoundError, ProcessLookupError):
                for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
                    found += [child, *descendants(child)]
    return found


def _remove(folder: Path) -> None:
    try:
        patterns = (folder / SHARED_FILES).read_text().split()
    except FileNotFoundError:
        patterns = []
    for pattern in map(Path, patterns):
        if pattern.parent == _SHARED:
            for file in _SHARED.glob(pattern.name):
                with suppress(OSError):  # it is another user's, or gone: the folder goes nevertheless
                    file.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def sweep(pid: int | None = None) -> None:
    """Remove folders of dead guards: that of `pid`, or all older than a minute."""
    for folder in TEMPORARY.glob(f"{_PREFIX}{'' if pid is None else f'{pid}-'}*"):
        try:
            about = folder.lstat()  # anybody may put a link here, to a folder of this user's
            if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode):
                continue
            # A young one may belong to a guard that has not locked it yet.
            if pid is None and time.time() - about.st_mtime < 60.0:
                continue
            lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def die_with(parent: int) -> bool:
    """Be killed when the parent ends. Returns whether it is still there."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    return os.getppid() == parent


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs a function in a process, and leaves nothing behind.")
    parser.add_argument("run", help="what is run, as in package.module:function")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the owner")
    options = parser.parse_args()
    os.set_inheritable(options.fd, False)

    def guarded() -> None:
        module, _, function = options.run.partition(":")
        getattr(importlib.import_module(module), function)(socket.socket(fileno=options.fd))

    run_guarded(options.fd, guarded)


if __name__ == "__main__":
    main()
