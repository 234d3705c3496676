"""Wrong versions of what reads a GPU's memory, and faults of CUDA, for `device_pulls`."""

from __future__ import annotations

from typing import Any

import torch

from specactor.errors import WeightSyncError
from specactor.weights_sync import cuda_ipc, receiver
from specactor.weights_sync.cuda_ipc import Cuda, GpuMemory, OpenedMemory


def no_offset(self: OpenedMemory, at: int) -> tuple[torch.Tensor, int]:
    """A wrong version: the tensor is taken for the whole allocation."""
    part = max((part for part in self._parts if part.at <= at), key=lambda part: part.at)
    return self._allocations[part.allocation], at - part.at


def no_uuid(device: int) -> str:
    raise RuntimeError("CUDA error: unknown error")


def no_chunks(*given: Any) -> Any:
    raise WeightSyncError("a would be written twice from byte 7 on")


def nowhere(self: Cuda, pointer: int) -> tuple[int, int]:
    raise WeightSyncError("cuMemGetAddressRange: it is in no allocation of this process (1)")


WRONG: dict[str, tuple[Any, str, Any]] = {
    "no UUID": (cuda_ipc, "gpu_uuid", no_uuid),
    "refused": (receiver.plan, "chunks", no_chunks),
    "offset ignored": (OpenedMemory, "find", no_offset),
    "nothing closed": (cuda_ipc, "_close", lambda opened, needed: None),
    "not kept": (cuda_ipc.Allocations, "_memory", lambda *given: not_kept(*given)),
}
_memory = cuda_ipc.Allocations._memory


def not_kept(self: Any, own: GpuMemory, device: int) -> Any:
    """A wrong version: what is open is opened again."""
    self._opened.clear()
    return _memory(self, own, device)
