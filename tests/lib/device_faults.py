"""Wrong versions of what reads a GPU's memory, and faults of CUDA, for `device_pulls`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import msgspec
import torch

from specactor.errors import WeightSyncError
from specactor.weights_sync import cuda_ipc, memory, receiver
from specactor.weights_sync.cuda_ipc import Cuda, GpuMemory, OpenedMemory, Part


def no_offset(self: OpenedMemory, at: int) -> tuple[torch.Tensor, int]:
    """A wrong version: the tensor is taken for the whole allocation."""
    part = max((part for part in self._parts if part.at <= at), key=lambda part: part.at)
    return self._allocations[part.allocation], at - part.at


def no_uuid(device: int) -> str:
    raise RuntimeError("CUDA error: unknown error")


def no_chunks(*given: Any) -> Any:
    raise WeightSyncError("a would be written twice from byte 7 on")


def no_lock(data: torch.Tensor, parts: Any) -> Any:
    raise WeightSyncError("CUDA could not lock 120 bytes of shared memory (error 2)")


def nowhere(self: Cuda, pointer: int) -> tuple[int, int]:
    raise WeightSyncError("cuMemGetAddressRange: it is in no allocation of this process (1)")


def spoiled(gpu: GpuMemory) -> GpuMemory:
    return msgspec.structs.replace(gpu, handles=(gpu.handles[0], b"\1" * 64))


def too_large(gpu: GpuMemory) -> GpuMemory:
    """Its allocations are smaller than what they are said to hold."""
    parts = tuple(Part(part.at, part.num_bytes + 2**20, part.allocation, part.offset) for part in gpu.parts)
    return msgspec.structs.replace(gpu, parts=parts)


WRONG: dict[str, tuple[Any, str, Any]] = {
    "no UUID": (cuda_ipc, "gpu_uuid", no_uuid),
    "refused": (receiver.plan, "chunks", no_chunks),
    "offset ignored": (OpenedMemory, "find", no_offset),
    "nothing closed": (cuda_ipc, "_close", lambda opened: None),
    "closed late": (receiver.Receiver, "check", lambda *given: closed_late(*given)),
    "no lock": (receiver, "lock", no_lock),
    "all locked": (receiver, "lock", lambda data, parts: memory.lock(data, [(0, data.numel())])),
}
_check = receiver.Receiver.check


def closed_late(self: Any, rank: Any, payload: bytes) -> bytes:
    """A wrong version: the old allocations stay open until the next plan."""
    with patch.object(self, "_forget_plan", lambda: None):
        return _check(self, rank, payload)
