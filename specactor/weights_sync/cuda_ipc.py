"""Memory of a GPU that another process on the same GPU reads. CUDA's handle is of an allocation, of which PyTorch's
tensors are parts; a process opens it once per plan.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import Tensor

from specactor.errors import WeightSyncError
from specactor.parallel.devices import gpu_uuid


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor's first byte in its memory and allocation."""

    at: int
    num_bytes: int
    allocation: int
    offset: int


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What another process on the GPU needs to read a memory whose tensors lie on it."""

    uuid: str
    handles: tuple[bytes, ...]  # of allocations
    parts: tuple[Part, ...]


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class Cuda:
    """CUDA as needed here. Its methods raise WeightSyncError."""

    def __init__(self, runtime: ctypes.CDLL, driver: ctypes.CDLL) -> None:
        """Args: libcudart, as PyTorch has loaded it, and libcuda."""
        self._runtime, self._driver = runtime, driver
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        runtime.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint)

    def allocation(self, pointer: int) -> tuple[int, int]:
        """Return (first byte, bytes) of what a pointer points into."""
        base, size = ctypes.c_void_p(), ctypes.c_size_t()
        code = self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_void_p(pointer))
        if code or base.value is None:
            raise WeightSyncError(f"cuMemGetAddressRange: {pointer:#x} is in no allocation of this process ({code})")
        return base.value, size.value

    def generation(self, base: int) -> int:
        """Return a number that no other allocation of this process has had."""
        number = ctypes.c_ulonglong()
        buffer_id = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
        code = self._driver.cuPointerGetAttribute(ctypes.byref(number), buffer_id, ctypes.c_void_p(base))
        if code:
            raise WeightSyncError(f"cuPointerGetAttribute: no allocation of this process begins at {base:#x} ({code})")
        return number.value

    def handle(self, base: int) -> bytes:
        """Return what opens the allocation at `base` in another process."""
        handle = _Handle()
        self._do("cudaIpcGetMemHandle", EXPANDABLE, ctypes.byref(handle), ctypes.c_void_p(base), otherwise=NO_IPC)
        return bytes(handle)

    def open(self, handle: bytes, device: int) -> int:
        """Map another process's allocation."""
        pointer, peer_access = ctypes.c_void_p(), 1  # cudaIpcMemLazyEnablePeerAccess, which CUDA wants to be given
        with self._current(device):
            opened = ctypes.byref(pointer), _Handle.from_buffer_copy(handle), peer_access
            self._do("cudaIpcOpenMemHandle", APART, *opened, otherwise=NO_IPC)
        return pointer.value or 0

    def close(self, pointer: int, device: int) -> None:
        with self._current(device):
            self._do("cudaIpcCloseMemHandle", "Start the engine again", ctypes.c_void_p(pointer))

    @staticmethod
    def tensor(pointer: int, num_bytes: int, device: int) -> Tensor:
        """Return uint8 [num_bytes], without a copy."""
        layout = {"data": (pointer, False), "shape": (num_bytes,), "typestr": "|u1", "version": 3}
        memory = SimpleNamespace(__cuda_array_interface__=layout)
        try:
            return torch.as_tensor(memory, device=f"cuda:{device}")
        except RuntimeError as error:
            raise WeightSyncError(f"PyTorch makes no tensor of another process's memory: {error}") from error

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        before = ctypes.c_int()
        self._do("cudaGetDevice", SEEN, ctypes.byref(before))
        self._do("cudaSetDevice", SEEN, device)
        try:
            yield
        finally:
            self._do("cudaSetDevice", SEEN, before.value)

    def forget_error(self) -> None:
        """Clear an error that a caller has handled: PyTorch would find it after its next kernel."""
        self._runtime.cudaGetLastError()

    def _do(self, name: str, way_out: str, *arguments: Any, otherwise: str = "") -> None:
        """Call the runtime. `way_out`: of arguments that it takes for invalid; `otherwise`: of other errors."""
        if code := getattr(self._runtime, name)(*arguments):
            self.forget_error()
            # cudaErrorInvalidValue, 1: so CUDA refuses a handle of what cudaMalloc did not make
            way_out = way_out if code == 1 else otherwise or way_out
            raise WeightSyncError(f"{name}: {self._runtime.cudaGetErrorString(code).decode()} ({code}). {way_out}")


EXPANDABLE = "Take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF: only what cudaMalloc gave has a handle"
APART = "Run trainer and engines in one container"
NO_IPC = "CUDA's IPC is not available here"
SEEN = "Look at CUDA_VISIBLE_DEVICES"


@cache
def cuda() -> Cuda:
    """Return the CUDA of this process. Raises OSError without one."""
    major = (torch.version.cuda or "").partition(".")[0]
    return Cuda(ctypes.CDLL(f"libcudart.so.{major}"), ctypes.CDLL("libcuda.so.1"))


def uuid_of(device: int) -> str:
    """Return the UUID of a GPU. Raises WeightSyncError."""
    try:
        return gpu_uuid(device)
    except (RuntimeError, AssertionError) as error:  # the latter of a number that PyTorch does not know
        raise WeightSyncError(f"CUDA does not say which GPU number {device} is: {error}") from error


Places = tuple[tuple[Part, ...], tuple[tuple[int, int], ...]]
"""Of tensors, and (first byte, generation) of their allocations in this process."""


def places(tensors: Sequence[Tensor], starts: Sequence[int]) -> Places:
    """Return where tensors lie that begin at `starts`. Raises OSError or WeightSyncError."""
    library, numbers, parts = cuda(), dict[int, int](), []
    for tensor, at in zip(tensors, starts, strict=False):
        if not tensor.is_contiguous():
            raise WeightSyncError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous: engines need a copy")
        base, _ = library.allocation(tensor.data_ptr())
        number = numbers.setdefault(base, len(numbers))
        parts.append(Part(at, tensor.nbytes, number, tensor.data_ptr() - base))
    return tuple(parts), tuple((base, library.generation(base)) for base in numbers)


def exported(device: int, where: Places) -> GpuMemory:
    """Let processes on the same GPU read what lies there. Raises WeightSyncError."""
    parts, allocations = where
    return GpuMemory(uuid=uuid_of(device), handles=tuple(cuda().handle(base) for base, _ in allocations), parts=parts)


class OpenedMemory:
    """A memory of another process, in allocations that are open here."""

    def __init__(self, parts: Sequence[Part], allocations: Sequence[Tensor]) -> None:
        self._parts, self._allocations = parts, allocations
        self._starts = [part.at for part in parts]

    def find(self, at: int) -> tuple[Tensor, int]:
        """Return (allocation, byte of it)."""
        part = self._parts[bisect(self._starts, at) - 1]
        return self._allocations[part.allocation], part.offset + at - part.at


class Allocations:
    """Allocations of other processes that are open here."""

    def __init__(self) -> None:
        self._opened: dict[bytes, tuple[int, int]] = {}  # by handle: pointer, number of the GPU
        self._closed = weakref.finalize(self, _close, self._opened)

    def open(self, memories: Mapping[int, GpuMemory], device: int) -> dict[int, OpenedMemory]:
        """Close what is open, and open what memories need. Raises OSError or WeightSyncError, with all closed
        that can be."""
        try:
            self.close()
            return {number: self._memory(memory, device) for number, memory in memories.items()}
        except (OSError, WeightSyncError):
            with suppress(OSError, WeightSyncError):  # what came first is said
                self.close()
            raise

    def close(self) -> None:
        """Close all. Raises OSError or WeightSyncError."""
        _close(self._opened)

    def _memory(self, memory: GpuMemory, device: int) -> OpenedMemory:
        ends = [0] * len(memory.handles)
        for part in memory.parts:
            ends[part.allocation] = max(ends[part.allocation], part.offset + part.num_bytes)
        tensors = []
        for handle, end in zip(memory.handles, ends, strict=True):
            pointer = cuda().open(handle, device)
            self._opened[handle] = pointer, device
            base, size = cuda().allocation(pointer)
            if base != pointer or size < end:
                raise WeightSyncError(
                    f"the trainer's allocation on {memory.uuid} has {size} bytes, expected at least {end}. It is not "
                    "the one that was handed over: start the engine again"
                )
            tensors.append(cuda().tensor(pointer, size, device))
        return OpenedMemory(memory.parts, tensors)


def _close(opened: dict[bytes, tuple[int, int]]) -> None:
    """Close all. Raises the first error in the end; what did not close is still there."""
    first: OSError | WeightSyncError | None = None
    for handle in [*opened]:
        try:
            cuda().close(*opened[handle])
            del opened[handle]
        except (OSError, WeightSyncError) as error:
            first = first or error
    if first is not None:
        raise first
