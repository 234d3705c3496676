"""Shared buffers: seen by another process, gone with their owner, never mistaken for another."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import WeightSyncError
from specactor.weights_sync import memory
from specactor.weights_sync.cuda_ipc import Cuda
from specactor.weights_sync.memory import LOCKED_BYTES, Address, SharedBuffer, lock, open_address

READER = """
import sys, msgspec, torch
from specactor.weights_sync.memory import Address, open_address
data = open_address(msgspec.json.decode(sys.argv[1], type=Address))
assert data[:3].tolist() == [7, 8, 9], data[:3]
data[3] = 42
"""


def test_another_process_reads_and_writes_the_same_memory() -> None:
    buffer = SharedBuffer(4096)
    buffer.data[:3] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    address = msgspec.json.encode(buffer.address()).decode()
    subprocess.run([sys.executable, "-c", READER, address], check=True, timeout=120)
    assert buffer.data[3] == 42
    buffer.close()


def test_an_address_survives_the_wire() -> None:
    buffer = SharedBuffer(64)
    address = buffer.address()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(address), type=Address) == address
    buffer.close()


def test_a_closed_buffer_cannot_be_opened_nor_mistaken_for_its_successor() -> None:
    first = SharedBuffer(64)
    old = first.address()
    first.close()
    second = SharedBuffer(64)
    assert second.address() != old
    with pytest.raises(OSError):
        open_address(old)
    second.close()


class Gpu:
    """Knows which pages of this process are locked; some cannot be."""

    def __init__(self, data: torch.Tensor, monkeypatch: pytest.MonkeyPatch, bad: int = -1) -> None:
        """Args: bad: a byte whose page cannot be locked."""
        self._data, self._bad, self.parts = data, bad, dict[int, int]()
        monkeypatch.setattr(memory, "register", self._register)
        monkeypatch.setattr(memory, "unregister", lambda part: self.parts.pop(self._at(part)))

    def _at(self, part: torch.Tensor) -> int:
        return part.data_ptr() - self._data.data_ptr()

    def _register(self, part: torch.Tensor) -> None:
        at, end = self._at(part), self._at(part) + part.numel()
        assert all(end <= other or other + size <= at for other, size in self.parts.items()), "CUDA locks nothing twice"
        if at <= self._bad < end:
            raise WeightSyncError("CUDA could not lock")
        self.parts[at] = part.numel()


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8), st.integers(1, 50))
def test_pages_of_what_is_read_are_locked_once(parts: list[tuple[int, int]], size: int) -> None:
    """In pieces of a quarter of the pages here; the last may be cut. Little else is locked."""
    parts = [(start, min(start + length, size)) for start, length in parts if start < size]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(memory, "LOCKED_BYTES", 4)
        buffer = SharedBuffer(size, locked=False)
        gpu = Gpu(buffer.data, monkeypatch)
        locked = lock(buffer.data, parts)
        within = {byte for at, length in gpu.parts.items() for byte in range(at, at + length)}
        read = {byte for start, end in parts for byte in range(start, end)}
        assert within == {byte for byte in range(size) if byte // 4 in {each // 4 for each in read}}
        assert all(at % 4 == 0 for at in gpu.parts)
        assert len(locked) == len(gpu.parts)
        buffer.close()


def test_a_buffer_locks_what_it_is_asked_for_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, piece = SharedBuffer(4 * LOCKED_BYTES, locked=False), LOCKED_BYTES
    gpu = Gpu(buffer.data, monkeypatch, bad=3 * piece)
    buffer.lock([(piece + 1, piece + 2)])
    assert gpu.parts == {piece: piece}
    with pytest.raises(WeightSyncError):
        buffer.lock([(0, 1), (3 * piece, 3 * piece + 1)])
    assert gpu.parts == {}
    buffer.lock([(0, 1), (piece, piece + 1)])
    assert gpu.parts == {0: 2 * piece}
    buffer.lock([])
    assert gpu.parts == {}
    buffer.lock([(0, 1)])
    buffer.close()
    assert gpu.parts == {}


def test_an_error_of_locking_is_cleared_for_who_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2]  # what CUDA would tell after the next kernel
    typed = {name: SimpleNamespace() for name in ("cudaGetErrorString", "cudaIpcOpenMemHandle")}
    runtime: Any = SimpleNamespace(cudaGetLastError=left.clear, **typed)
    driver: Any = None
    monkeypatch.setattr(memory, "cuda", lambda: Cuda(runtime, driver))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: left[0]))
    with pytest.raises(WeightSyncError, match=r"could not lock 64 bytes of shared memory \(error 2\)"):
        memory.register(torch.zeros(64, dtype=torch.uint8))
    assert not left
