"""One job at a time in a run's folder.

Invariants: rank 0 of a job owns the folder from before it reads or removes anything there until its end; who lives is
judged by whether its file changes while one looks, never by a clock that two hosts would have to share; a job that has
lost the folder ends.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from specactor.errors import ConfigError
from specactor.parallel.failure import Member
from specactor.waits import ANSWER_S, MOMENT_S, SIGN_OF_LIFE_S


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    since: str
    process: Member
    slurm_job: str  # empty: another kind of job
    slurm_start: int  # how often Slurm has requeued it
    token: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def here(cls) -> Owner:
        return cls(
            host=socket.gethostname(),
            since=datetime.now(UTC).isoformat(" ", "seconds"),
            process=Member.here(),
            slurm_job=os.environ.get("SLURM_JOB_ID", ""),
            slurm_start=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        )

    def __str__(self) -> str:
        what = f"Slurm job {self.slurm_job}" if self.slurm_job else f"process {self.process.pid}"
        return f"{what} on {self.host} since {self.since}"

    def is_before(self, other: Owner) -> bool:
        """Say whether it is surely over where `other` begins: a process that is gone, or what Slurm has requeued."""
        if self.process.machine == other.process.machine and self.process.gone():
            return True
        return self.slurm_job == other.slurm_job != "" and self.slurm_start < other.slurm_start


class Seen(NamedTuple):
    owner: Owner | None  # None: not readable, as while it is written
    beat_ns: int

    def __str__(self) -> str:
        return str(self.owner or "another job")


class RunOwner:
    """Owns a folder from `claim` to `close`."""

    def __init__(self, folder: Path, on_lost: Callable[[str], None]) -> None:
        """In a thread, `on_lost` is told that another job has the folder, and ends the process."""
        self._folder, self._file, self._on_lost = folder, folder / "owner.json", on_lost
        self.own = Owner.here()
        self._closed = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="run-owner", daemon=True)

    def claim(self) -> None:
        """Own the folder. Raises ConfigError where another job does; waits for a minute for one that gives no sign."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while not self._created():
            self._wait_for_end()
            fresh = self._file.with_name(f"{self._file.name}.{self.own.token}")
            fresh.write_bytes(msgspec.json.encode(self.own))
            fresh.replace(self._file)
            time.sleep(MOMENT_S)  # another job may take it over at the same time: the last one has it
            if self._is_own():
                break
        self._beats.start()

    def close(self) -> None:
        """Give the folder back; harmless twice."""
        claimed = self._beats.ident is not None and not self._closed.is_set()
        self._closed.set()
        with suppress(OSError):
            if claimed and self._is_own():
                self._file.unlink()

    def _created(self) -> bool:
        try:
            file = self._file.open("xb")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(msgspec.json.encode(self.own))
        except OSError:
            self._file.unlink(missing_ok=True)
            raise
        return True

    def _wait_for_end(self) -> None:
        first = self._look()
        for count in range(round(ANSWER_S / MOMENT_S)):  # looks count, not seconds: a disk may hang for all
            if first is None or (first.owner is not None and first.owner.is_before(self.own)):
                return
            if count == 0:
                waits = f"waiting {ANSWER_S:.0f} s at most for a sign of it"
                print(f"specactor: {self._folder} belongs to {first}; {waits}", file=sys.stderr, flush=True)
            time.sleep(MOMENT_S)
            now = self._look()
            if now is None:
                return
            if now != first:
                raise ConfigError.at(
                    "name",
                    self._folder.name,
                    f"a run that no other job is in: {self._folder} belongs to {now}",
                    "Choose another --name, or end that job.",
                )

    def _beat(self) -> None:
        while not self._closed.wait(SIGN_OF_LIFE_S):
            with suppress(OSError):  # a disk that does not answer now is asked again
                if self._is_own():
                    os.utime(self._file)
                elif not self._closed.is_set():
                    now = self._look()
                    lost = f"is gone from {self._folder}" if now is None else f"says that the folder belongs to {now}"
                    self._on_lost(f"{self._file.name} {lost}, expected this job: two would mix. This one ends.")
                    return

    def _is_own(self) -> bool:
        seen = self._look()
        return seen is not None and seen.owner is not None and seen.owner.token == self.own.token

    def _look(self) -> Seen | None:
        try:
            with self._file.open("rb") as file:  # NFS asks its server when a file is opened
                beat_ns, content = os.fstat(file.fileno()).st_mtime_ns, file.read()
        except FileNotFoundError:
            return None
        try:
            return Seen(msgspec.json.decode(content, type=Owner), beat_ns)
        except msgspec.DecodeError:
            return Seen(None, beat_ns)
