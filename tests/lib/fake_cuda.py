"""CUDA's calls of `fake_cuda.cpp`, for memory that another process reads; a fake GPU's memory is the host's."""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch

from specactor.weights_sync import cuda_ipc, memory, receiver
from specactor.weights_sync.cuda_ipc import Cuda
from tests.lib.simulated_cuda import Simulated, simulated

VISIBLE = "FAKE_CUDA_VISIBLE"
PAGE = 4096


class FakeCuda(Cuda):
    """Memory of a fake GPU is the host's."""

    def __init__(self, fake: Path) -> None:
        self.library = ctypes.CDLL(str(fake))
        self.locked: dict[int, int] = {}  # by first byte: bytes of this process's host memory
        super().__init__(self.library, self.library)

    @staticmethod
    def tensor(pointer: int, num_bytes: int, device: int) -> torch.Tensor:
        inner = torch.frombuffer((ctypes.c_char * num_bytes).from_address(pointer), dtype=torch.uint8)
        return Simulated(inner, torch.device("cuda", device))

    def allocate(self, num_bytes: int, call: str, device: int) -> int:
        pointer = ctypes.c_void_p()
        assert self.library.cudaSetDevice(device) == 0
        assert getattr(self.library, call)(ctypes.byref(pointer), ctypes.c_size_t(num_bytes)) == 0
        return pointer.value or 0

    def counts(self) -> list[int]:
        """(handles given, opened, closed, an error that nobody asked for)"""
        counts = (ctypes.c_int * 4)()
        self.library.fake_counts(counts)
        return list(counts)


def uuid(number: int) -> str:
    return f"GPU-{os.environ[VISIBLE].split(',')[number]}"


def world(library: Path, fake: Path, stack: ExitStack) -> FakeCuda:
    made = FakeCuda(fake)
    for owner, name, value in (
        (cuda_ipc, "cuda", lambda: made),
        (cuda_ipc, "gpu_uuid", uuid),
        (memory, "LOCKED_BYTES", PAGE),
        (memory, "register", lambda data: made.locked.__setitem__(data.data_ptr(), data.numel())),
        (memory, "unregister", lambda data: made.locked.pop(data.data_ptr())),
        (receiver, "unregister", lambda data: made.locked.pop(data.data_ptr())),
    ):
        stack.enter_context(patch.object(owner, name, value))
    stack.enter_context(simulated(library))
    return made
