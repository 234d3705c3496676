"""Hosts that fall silent: one that lost power or its network closes no connection, so nothing else would notice.

Invariants: every wait has a bound, also while a connection hangs; a host that has left in good order is not missed;
time in which this process itself did not run counts against nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from specactor.errors import ConfigError
from specactor.parallel.meeting import Meeting

SILENT_S = 30.0
"""A host that has not been heard of for so long is taken to be lost."""
_BEAT_S = 2.0
_LOOK_S = 0.5
_LEFT = 1 << 40
"""More beats than there will be: the host has left in good order."""


class HostWatch:
    """A context in which this host is heard of, and lost ones are noticed. The first rank of each host does it.

    The host of rank 0, where the launcher's store is, watches all; the others watch whether it answers.
    """

    def __init__(self, meeting: Meeting, rank: int, on_silent: Callable[[str], None]) -> None:
        """
        Args:
            on_silent: is told of a lost host, in a thread; it ends the process.
        """
        firsts = [meeting.machines.index(machine) for machine in dict.fromkeys(meeting.machines)]
        self._meeting, self._rank, self._on_silent = meeting, rank, on_silent
        self._heard_s = dict.fromkeys(firsts[1:] if rank == 0 else firsts[:1], time.monotonic())
        self._beats: dict[int, int] = {}
        self._stop = threading.Event()
        does = (self._beat, self._look) if rank in firsts and len(firsts) > 1 else ()
        self._threads = [threading.Thread(target=each, name=f"hosts-{each.__name__}", daemon=True) for each in does]

    def __enter__(self) -> HostWatch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * _BEAT_S)

    def _beat(self) -> None:
        try:
            store = self._meeting.open_store()
            going = True
            while going:
                going = not self._stop.wait(_BEAT_S)
                store.add(f"beats/{self._rank}", 1 if going else _LEFT)
                for rank in tuple(self._heard_s):
                    beats = store.add(f"beats/{rank}", 0)
                    if rank == 0 or beats != self._beats.get(rank):
                        self._heard_s[rank] = time.monotonic()
                    if beats >= _LEFT:
                        del self._heard_s[rank]
                    self._beats[rank] = beats
        except (RuntimeError, ConfigError):  # the store is gone, and the launcher with it
            return

    def _look(self) -> None:
        before_s = time.monotonic()
        while not self._stop.wait(_LOOK_S):
            now_s = time.monotonic()
            late_s, before_s = now_s - before_s - _LOOK_S, now_s
            for rank, heard_s in tuple(self._heard_s.items()):
                if late_s > _LOOK_S:
                    self._heard_s[rank] = heard_s + late_s
                elif now_s - heard_s > SILENT_S:
                    self._on_silent(
                        f"{self._meeting.hosts[rank]}, the host of rank {rank}, has not answered for {SILENT_S:g} s: "
                        "it died, or the network to it is cut."
                    )
