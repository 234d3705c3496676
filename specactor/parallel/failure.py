"""All ranks fail together, with one message that names the rank and the cause.

Invariants: one failure has one report, on stderr, by the first rank with a ticket from the launcher's store (one per
host where that is gone); a rank that fails because of a peer lets it report first; a rank that torchrun ends is gone at
once, over several hosts after `GRACE_S`; after Ctrl-C all are gone in `LATE_S`.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from specactor.errors import PeerFailedError, SpecActorError
from specactor.waits import GRACE_S, LATE_S, LOOK_EVERY_S, MOMENT_S

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

RESUME = "Continue with the same command and --resume auto."

TICKETS = "specactor/failed_ranks"


class View(NamedTuple):
    """Ranks with equal views mean the same device by a number."""

    machine: str
    visible: str | None = None  # devices of the machine that it was given, as CUDA has them; None: all


class Member(msgspec.Struct, frozen=True, kw_only=True):
    machine: str
    pid: int
    visible: str | None = None  # devices of the machine that it was given, as CUDA has them; None: all
    local_rank: int = 0  # its number among the ranks that one launcher started on the machine
    device: int | str = 0  # UUID of its GPU, the same for every process of the machine, or the number of its core

    @classmethod
    def here(cls, local_rank: int = 0, *, gpu: str = "") -> Member:
        """Describe this process; `gpu` is its GPU's UUID, empty without one."""
        return cls(
            machine=_machine(),
            pid=os.getpid(),
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            local_rank=local_rank,
            device=gpu or local_rank,
        )

    @property
    def view(self) -> View:
        return View(self.machine, self.visible)

    def gone(self) -> bool:
        """Say whether it has ended; for members on this machine."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True


def _machine() -> str:
    """Return what processes share that know each other by pid and meet on loopback: containers of one kernel do not."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])


def tell_launcher(message: str) -> None:
    """Have torchrun end its own report with `message`."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):  # the message itself has been printed already
            # Its root cause is the earliest failure in whole seconds; peers end within the same second.
            details = {"py_callstack": message, "timestamp": str(int(time.time()) - 1)}
            Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))


def launcher_store(address: str, port: int) -> Store | None:
    """Return torchrun's store for this start; None where it cannot be reached."""
    import torch.distributed as dist

    # With --max-restarts torchrun keeps its store, and in it the tickets of starts whose ranks failed before they met.
    # Hosts that it restarted unequally often count apart: until they meet one failure may have two reports, or none.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=5))  # type: ignore[attr-defined]
    except RuntimeError:
        return None
    own: Store = dist.PrefixStore(f"specactor/start-{start}", store)  # type: ignore[attr-defined]
    return own


def _is_launcher(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"torchrun" in command or b"torch.distributed.run" in command


class Failures:
    def __init__(self, rank: int, store: Store | None) -> None:
        self.rank = rank
        self._store = store
        self._members: Sequence[Member] = ()
        self._reported = threading.Lock()  # taken for good by the first report of this rank
        self.saw = ""  # what this rank would say of a lost peer that nobody reports
        self._store_is_gone = False
        self._told = False  # whether another rank was seen to have reported
        self.on_end: Callable[[], None] = lambda: None  # called where the process ends without unwinding

    def use(self, store: Store) -> None:
        """Take tickets here, in a store of one start; hosts may count starts differently."""
        self._store = store

    def know(self, members: Sequence[Member]) -> None:
        """Know all ranks, in order, to name one that was killed."""
        self._members = members

    def report(self, message: str, *, trace: str = "", asks: bool = True) -> None:
        """Print, unless a rank has already; `asks`: the store can tell."""
        if self._reported.acquire(blocking=False) and (not asks or self._tickets(1) == 1):
            line = f"specactor: rank {self.rank}: {message}"
            tell_launcher(line)  # first, since torchrun ends this rank as soon as a peer has seen the ticket and left
            with suppress(OSError, ValueError):  # who read it may be gone, and this rank has to end all the same
                print(f"{trace}{line}", file=sys.stderr, flush=True)
        if self.over_hosts():
            # The launcher's store stays with this rank: other hosts' ranks ask it whether someone has reported. Where
            # it is gone, the first rank of a host that is still there reports.
            time.sleep(GRACE_S)

    def on_reported(self, left: threading.Event) -> None:
        """Remember that some rank has reported, in case the store goes; end after LATE_S unless this rank has `left`:
        its main thread may be stuck in a collective, in NCCL's for half an hour."""
        self._told = True
        if not left.wait(LATE_S):
            self._end(1)

    def wait_for_report(self) -> None:
        """Wait until another rank has reported, at most `LATE_S`."""
        deadline = time.monotonic() + LATE_S
        while self._store is not None and time.monotonic() < deadline and self._tickets(0) == 0:
            time.sleep(LOOK_EVERY_S)

    def lost(self) -> str:
        """Return which ranks of this machine are gone, unless another rank has reported."""
        mine = Member.here()
        deadline = time.monotonic() + MOMENT_S  # from a peer's closed connections to its end
        while True:
            gone = [(rank, m.pid) for rank, m in enumerate(self._members) if m.machine == mine.machine and m.gone()]
            told = self.over_hosts() and self._tickets(0) > 0
            if gone or told or not self._members or time.monotonic() > deadline:
                return ", ".join(f"rank {rank} (process {pid})" for rank, pid in gone)
            time.sleep(LOOK_EVERY_S)

    def over_hosts(self) -> bool:
        return len({member.machine for member in self._members}) > 1

    def on_silent(self, what: str) -> None:
        """Report a lost host, and end. Others see rank 0's as a lost store."""
        self.report(f"{what} {RESUME}", asks=self.rank == 0)
        if self.rank != 0:  # torchrun waits for an answer of its store for as long as TCP does: a quarter of an hour
            with suppress(OSError):
                if _is_launcher(os.getppid()):
                    os.kill(os.getppid(), signal.SIGKILL)
        self._end(1)

    def on_lost_folder(self, what: str) -> None:
        self.report(what)
        self._end(1)

    def on_sigterm(self) -> None:
        lost = self.lost()
        ended = "ended by SIGTERM" + (": the launcher of rank 0 is gone" if self._store_is_gone else "")
        self.report(f"{lost} was killed or crashed. {RESUME}" if lost else self.saw or f"{ended}. {RESUME}")
        self._end(128 + signal.SIGTERM)

    def on_sigint(self) -> None:
        """End after LATE_S, since the main thread, which gets KeyboardInterrupt, may be stuck."""
        time.sleep(LATE_S)
        self._end(128 + signal.SIGINT)

    def _end(self, code: int) -> None:
        last = threading.Thread(target=self.on_end, daemon=True)
        last.start()
        last.join(MOMENT_S)  # a disk may hang
        os._exit(code)

    def _tickets(self, more: int) -> int:
        """Add `more` reports; return how many there are."""
        if self._store is None:
            return more
        try:
            found = self._store.add(TICKETS, more)
        except (RuntimeError, OSError):  # the launcher is gone, and so is anyone of its host who could report instead
            self._store_is_gone = True
            return 2 if self._told or (self.over_hosts() and not self._is_first_here()) else 1
        self._told |= found > more
        return found

    def _is_first_here(self) -> bool:
        here = self._members[self.rank].machine
        return all(member.machine != here or member.gone() for member in self._members[: self.rank])


@contextmanager
def failure_guard(rank: int, store: Store | None) -> Iterator[Failures]:
    """Turn any error into one report and exit code 1 (Ctrl-C: 130, SIGTERM: 143)."""
    failures = Failures(rank, store)
    with _signals({signal.SIGTERM: failures.on_sigterm, signal.SIGINT: failures.on_sigint}):
        try:
            yield failures
        except KeyboardInterrupt:
            if rank == 0:
                failures.report(f"interrupted. {RESUME}")
            raise SystemExit(130) from None
        except PeerFailedError as error:
            failures.wait_for_report()
            failures.report(str(error))
            raise SystemExit(1) from None
        except SpecActorError as error:
            failures.report(f"{type(error).__name__}: {error}")
            raise SystemExit(1) from None
        except Exception as error:  # the process boundary: whatever happened must be reported once
            trace = traceback.format_exc()
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and error.errno in _FULL:
                message += f". Free disk space, or quota, where the run's folder and /tmp are. {RESUME}"
            if isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER):
                if failures.over_hosts():  # where it was the only rank, nobody there can report
                    message = f"a rank of another host was killed or crashed, or is cut off ({message}). {RESUME}"
                    failures.saw = message
                if lost := failures.lost():
                    trace, message = "", f"{lost} was killed or crashed. {RESUME}"
                failures.wait_for_report()
            failures.report(message, trace=trace)
            raise SystemExit(1) from None


def is_end_asked() -> bool:
    """Return whether this process was sent SIGUSR1, which its launch has blocked: after the step the run ends, with a
    checkpoint."""
    return signal.SIGUSR1 in signal.sigpending()


@contextmanager
def _signals(actions: dict[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Run a signal's action in a thread, also during library calls. SIGTERM no longer ends the process; SIGINT still
    raises KeyboardInterrupt."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def watch() -> None:
        while numbers := ours.recv(1):
            action = actions.get(signal.Signals(numbers[0]))
            if action is not None:
                action()

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before)
        theirs.close()
        watcher.join(MOMENT_S)
        ours.close()


_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out"),  # gloo
    # NCCL: its own words for ncclRemoteError and for a socket; torch's, after a timeout and after an abort
    *("remote process exited or there was a network error", "ncclRemoteError", "Connection closed by remote peer"),
    *("Watchdog caught collective operation timeout", "NCCL communicator was aborted"),
)
