"""A process group of gloo's that stands where NCCL would, and remembers what goes through it, from where and when.

`install` before torch.distributed is initialised: then the job's default group, and every group that is made without
naming a backend, is one. Groups of gloo that are named so stay what they are.
"""

from __future__ import annotations

import datetime
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from tests.lib.simulated_cuda import Simulated

PACKAGE = Path(__file__).parents[2] / "specactor"
_CALLS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "barrier", "reduce", "scatter", "gather", "send", "recv"),
    *("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "recv_anysource"),
)
"""What torch asks of a group."""

calls: Counter[tuple[str, str, bool]] = Counter()
"""(kind of collective, file of this package or library that asked for it, whether an engine generated meanwhile)."""
_busy: list[str] = []
refuses = False
"""Whether a tensor of the host is an error, as in NCCL. It can be told where devices are pretended."""


class Rules(dist.ProcessGroup):
    """Gloo, and the rules."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroup(store, rank, size)
        gloo, kind = dist.ProcessGroupGloo(store, rank, size, timeout=timeout), dist.ProcessGroup.BackendType.GLOO
        self._inner._register_backend(torch.device("cpu"), kind, gloo)
        self._inner._set_default_backend(kind)

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return "rules"


def _passed_on(name: str) -> Any:
    def call(self: Rules, *args: Any, **named: Any) -> Any:
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        if refuses and any(x.device.type != "cuda" for x in tensors):
            raise RuntimeError(f"{name}: No backend type associated with device type cpu")
        calls[name, _asked_by(), bool(_busy)] += 1
        args, named = tree_map(lambda x: x.inner if isinstance(x, Simulated) else x, (args, named))
        return getattr(self._inner, name)(*args, **named)

    return call


for _name in _CALLS:
    setattr(Rules, _name, _passed_on(_name))


def _asked_by() -> str:
    """The innermost file that is neither torch's nor this one."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path == PACKAGE / "cpu/megatron.py":  # which stands before torch's own functions
            continue
        if path.is_relative_to(PACKAGE):
            return str(path.relative_to(PACKAGE))
        if "/torch/" not in frame.filename and path != Path(__file__):
            return path.parent.name
    return "?"


@contextmanager
def generating() -> Iterator[None]:
    """Within, an engine generates."""
    _busy.append("")
    try:
        yield
    finally:
        _busy.pop()


def install() -> None:
    """Take gloo's place as the backend of the default group."""
    dist.Backend.register_backend("rules", Rules, devices=["cpu"])
    real = dist.init_process_group

    def init(backend: str, **named: Any) -> None:
        real("rules" if backend in ("gloo", "nccl") else backend, **named)

    dist.init_process_group = init
