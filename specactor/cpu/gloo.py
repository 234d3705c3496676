"""One device for all of a process's gloo groups. torch makes one for each group, with a thread that wakes a hundred
times a second: a rank or engine has 30 to 60 of them, which take 3 to 9 % of a core while it waits.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

_devices: dict[tuple[int, str], list[Any]] = {}  # by process, since a fork has no threads of its parent; and interfaces


@cache  # a second time would wrap it again
def share_device() -> None:
    """Let groups that are made from now on share their process's device."""
    group: Any = dist.ProcessGroupGloo
    make = group.__init__

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta = dist.default_pg_timeout) -> None:
        options = group._Options()
        options._timeout, options._devices = timeout, _own_devices()
        options._threads = 2 * len(options._devices)  # torch's own number
        make(self, store, rank, size, options)

    group.__init__ = init


def _own_devices() -> list[Any]:
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    key = os.getpid(), interfaces
    if key not in _devices:
        create = dist.ProcessGroupGloo.create_device
        names = interfaces.split(",") if interfaces else []
        _devices[key] = [create(interface=name) for name in names] or [dist.ProcessGroupGloo.create_default_device()]
    return _devices[key]
