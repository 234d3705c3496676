"""A process that has imported what engines import, and forks them, so that one is ready in about a second.

Invariants: it has one thread and touches no device; it dies with its owner, unlike its children; `fork` returns None
where it cannot serve; a child whose caller gave up does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import NoReturn

import msgspec
from setproctitle import setproctitle

from specactor.cpu import sglang as cpu
from specactor.rollout.process_guard import die_with
from specactor.waits import ANSWER_S, MOMENT_S

NAME = "SPECACTOR_STARTER"  # environment variable with the name of the starter's abstract socket
_MODULES = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "specactor.rollout.sglang.engine_server",
    "specactor.rollout.sglang.plugin",
)
_READ_ON_IMPORT = (  # Libraries read these once, so a child must have them as the starter had them.
    "PYTHONPATH",
    "LD_",
    "OMP_",
    "MKL_",
    "CUDA",
    "TORCH",
    "SGLANG_",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
)
# These are read when an engine starts; torch itself sets the last one on import.
_READ_LATE = ("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_EAGER_INPUT_NO_COPY", "TORCHINDUCTOR_CACHE_DIR")
_GO = b"go"  # the caller has the child, which does nothing until then: a caller that gave up starts its own
_Order = tuple[str, tuple[str, ...], dict[str, str], str]  # module, its arguments, environment, working folder


class Forked:
    """A child of the starter, with methods of `subprocess.Popen`."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def __del__(self) -> None:
        os.close(self._pidfd)

    def poll(self) -> int | None:
        """Return 0 when it is gone: its exit code is the starter's to know."""
        return 0 if self._is_gone(0) else None

    def wait(self, timeout: float) -> int:
        if not self._is_gone(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return 0

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _is_gone(self, timeout_s: float) -> bool:
        waiting = select.poll()  # and not `select`, which ends at file 1023
        waiting.register(self._pidfd, select.POLLIN)
        return bool(waiting.poll(1000 * timeout_s))


class WarmStarter(contextlib.AbstractContextManager["WarmStarter"]):
    """The starter, as a context; `fork` finds it by the environment variable `NAME`."""

    def __init__(self, name: str, *, starts: bool = True) -> None:
        """Start it if this process `starts` it; `name` is unique on the machine. Does nothing beside another, or with a
        GPU: a fork cannot use CUDA after its parent."""
        self._process: subprocess.Popen[bytes] | None = None
        if cpu.has_gpu() or os.environ.get(NAME):
            return
        os.environ[NAME] = name
        if not starts:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind("\0" + name)
            except OSError:  # somebody else's: engines are started without it
                del os.environ[NAME]
                return
            listener.listen(256)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, "--fd", str(listener.fileno()), "--owner", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env=cpu.process_environment(()) | {"SGLANG_EAGER_INPUT_NO_COPY": "1"},
                pass_fds=[listener.fileno()],
                start_new_session=True,  # a signal to the terminal is for its owner
            )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, but not its children."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            os.environ.pop(NAME, None)


def fork(
    module: str, arguments: tuple[str, ...], files: tuple[int, int], environment: Mapping[str, str]
) -> Forked | None:
    """Run ``python -m module arguments --fd N``; `files` are N and the output. Returns None without a starter."""
    name = os.environ.get(NAME)
    if not name or cpu.has_gpu():
        return None
    bare = {k: v for k, v in environment.items() if k != NAME}
    order = msgspec.json.encode((module, arguments, bare, os.getcwd()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect("\0" + name)
            if not _is_ours(connection):
                return None
            socket.send_fds(connection, [order], files)
            answer, files_back, _, _ = socket.recv_fds(connection, 64, 1)
            if not files_back:
                return None
            forked = Forked(int(answer), files_back[0])
            connection.send(_GO)
        except TimeoutError:  # it hangs, and would cost every engine as long
            os.environ.pop(NAME, None)
            return None
        except OSError:
            return None
        return forked


def _is_ours(connection: socket.socket) -> bool:
    """Return whether the other end is of this user, and not in another container, whose pids are 0 here."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(pid > 0 and uid == os.getuid())


def _relevant(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(_READ_ON_IMPORT) and k not in _READ_LATE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket that listens")
    parser.add_argument("--owner", type=int, required=True, help="process to die with")
    arguments = parser.parse_args()
    if not die_with(arguments.owner):
        return
    setproctitle("specactor: warm starter")  # finds its place while the environment is still the first one
    listener = socket.socket(fileno=arguments.fd)
    listener.settimeout(MOMENT_S)  # whoever called may have gone before `accept`
    os.set_inheritable(arguments.fd, False)
    settings = _relevant(os.environ)
    _import()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        if poll.poll(200):
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                with connection:
                    _serve(connection, listener, settings)
        _reap()


def _import() -> None:
    import gc
    import importlib
    import logging

    logging.disable(logging.WARNING)  # about models and kernels that this machine cannot run
    with warnings.catch_warnings(action="ignore"):
        for module in _MODULES:
            importlib.import_module(module)
    logging.disable(logging.NOTSET)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("specactor: the warm starter has threads, so nothing can be forked; engines start by themselves")
    gc.collect()
    gc.freeze()  # else a child's first collection writes to every page


def _serve(connection: socket.socket, listener: socket.socket, settings: Mapping[str, str]) -> None:
    connection.settimeout(MOMENT_S)
    files: list[int] = []
    try:
        if not _is_ours(connection):
            return
        body, files, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        order = msgspec.json.decode(body, type=_Order)
        if len(files) != 2 or _relevant(order[2]) != settings:
            return
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _become(order, files[0], files[1], (listener, connection))
        pidfd = os.pidfd_open(pid)  # still valid should it have ended: only this process reaps it
        try:
            socket.send_fds(connection, [str(pid).encode()], [pidfd])
        except OSError:  # the caller has given up, and starts a process itself
            os.kill(pid, signal.SIGKILL)
        finally:
            os.close(pidfd)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # the caller sees the end of the stream
        return
    finally:
        for file in files:
            os.close(file)


def _become(order: _Order, fd: int, log: int, ours: tuple[socket.socket, socket.socket]) -> NoReturn:
    try:
        os.setsid()
        listener, connection = ours
        listener.close()
        connection.settimeout(ANSWER_S)
        if connection.recv(len(_GO)) != _GO:
            os._exit(0)
        connection.close()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        module, arguments, environment, folder = order
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = [module, *arguments, "--fd", str(fd)]
        print(f"specactor: process {os.getpid()}, forked by the warm starter", flush=True)
        setproctitle(f"{sys.executable} -m {' '.join(sys.argv)}")
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # the starter's own import
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.stdout.flush()
        os._exit(0)
    except BaseException:  # the boundary of the process
        traceback.print_exc()
        os._exit(1)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    main()
