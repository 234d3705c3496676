"""Memory that the trainer writes and an engine rank on the same host reads.

On the host: an anonymous memory file, which engine ranks open through /proc. It has no name, so it cannot be left
behind: it is gone when the last process that holds it is. On a GPU: a CUDA IPC handle of a device buffer.
Addresses are typed msgspec values; nothing is unpickled.
"""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import msgspec
import torch


class HostAddress(msgspec.Struct, frozen=True, kw_only=True, tag="host"):
    """A memory file of a living process of the same user."""

    pid: int
    fd: int
    inode: int
    """Tells a new file apart from an old one with the same descriptor."""
    num_bytes: int


class CudaAddress(msgspec.Struct, frozen=True, kw_only=True, tag="cuda"):
    """The fields of a CUDA IPC handle, as PyTorch shares a storage."""

    device: int
    handle: bytes
    storage_bytes: int
    storage_offset: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync: bool


Address = HostAddress | CudaAddress


class SharedBuffer(Protocol):
    """A buffer of the sender."""

    data: torch.Tensor
    """uint8, [num_bytes]."""

    def address(self) -> Address:
        """What a reader needs to open it."""
        ...

    def close(self) -> None:
        """Give the memory back. Readers that still map it keep their view."""
        ...


class HostBuffer:
    """Anonymous shared memory on the host."""

    def __init__(self, num_bytes: int) -> None:
        self._fd = os.memfd_create("specactor-bucket")
        os.ftruncate(self._fd, num_bytes)
        self._map = mmap.mmap(self._fd, num_bytes)
        self._num_bytes = num_bytes
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)

    def address(self) -> HostAddress:
        return HostAddress(pid=os.getpid(), fd=self._fd, inode=os.fstat(self._fd).st_ino, num_bytes=self._num_bytes)

    def close(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)
        os.close(self._fd)
        del self._map


class CudaBuffer:
    """A device buffer that is shared by a CUDA IPC handle."""

    def __init__(self, num_bytes: int) -> None:
        self.data = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def address(self) -> CudaAddress:
        torch.cuda.synchronize()  # what was written must be visible to the reader
        fields = self.data.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        device, handle, size, offset, counter, counter_offset, event, event_sync = fields
        return CudaAddress(
            device=device,
            handle=handle,
            storage_bytes=size,
            storage_offset=offset,
            ref_counter=counter,
            ref_counter_offset=counter_offset,
            event=event,
            event_sync=event_sync,
        )

    def close(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)


def allocate(num_bytes: int, *, device: torch.device) -> SharedBuffer:
    """A buffer near `device`."""
    return CudaBuffer(num_bytes) if device.type == "cuda" else HostBuffer(num_bytes)


def open_address(address: Address) -> torch.Tensor:
    """The sender's bytes, uint8 [num_bytes], without a copy. Raises OSError when the sender is gone."""
    if isinstance(address, CudaAddress):
        storage = torch.UntypedStorage._new_shared_cuda(
            address.device,
            address.handle,
            address.storage_bytes,
            address.storage_offset,
            address.ref_counter,
            address.ref_counter_offset,
            address.event,
            address.event_sync,
        )
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{address.device}").set_(storage)
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR)
    try:
        if os.fstat(fd).st_ino != address.inode:
            raise FileNotFoundError(f"process {address.pid} no longer holds this buffer")
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return torch.frombuffer(mmap.mmap(fd, address.num_bytes, flags=flags), dtype=torch.uint8)
    finally:
        os.close(fd)
