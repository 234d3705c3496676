"""A child process with a `guard` around it, behind a socket: what engines and drafters have in common for their owner.

Invariants: the process is a session of its own, so a signal to the owner's terminal does not reach it; its standard
output and error are appended to its log; after `end` nothing of it is left, and no wait in it is unbounded.
"""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from specactor.rollout import process_guard, warm_starter

END_TIMEOUT_S = 10.0
"""Longest wait for each way to end it."""
_SEND_TIMEOUT_S = 60
_LOG_TAIL_LINES = 20


class Guarded:
    """One process."""

    def __init__(self, module: str, *, environment: Mapping[str, str], log_file: str) -> None:
        """Starts ``python -m module --fd N``, or has the warm starter fork the same. The module must call
        `guard.run_guarded` with N, one end of `connection`."""
        self.log_file = log_file
        self.connection, theirs = socket.socketpair()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        with theirs, open(log_file, "ab") as log:
            forked = warm_starter.fork(module, (theirs.fileno(), log.fileno()), environment)
            self._process = forked or subprocess.Popen(
                [sys.executable, "-m", module, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the guard; leader of the session that all its processes are in."""
        return self._process.pid

    @property
    def exited(self) -> bool:
        """Whether the guard, and with it all below it, is gone."""
        return self._process.poll() is not None

    def reap(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Wait for its end, but no longer than this."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return

    def end(self) -> None:
        """Immediate end of everything in it. Harmless when it is gone; the connection is closed by its user."""
        for end in (signal.SIGTERM, signal.SIGKILL):  # the guard ends its tree on SIGTERM
            if not self.exited:
                self._process.send_signal(end)
                self.reap()

    def sweep(self) -> None:
        """Remove what a guard that was killed itself has left."""
        process_guard.sweep(self.pid)

    def log_tail(self) -> str:
        """Last lines of the log."""
        file = Path(self.log_file)
        lines = file.read_text(errors="replace").splitlines() if file.exists() else ["(no log)"]
        return "\n".join(f"  | {line}" for line in lines[-_LOG_TAIL_LINES:])
