"""Memory that the trainer writes and an engine rank on the same host reads.

It is an anonymous memory file, which engine ranks open through /proc. It has no name, so it cannot be left behind: it
is gone when the last process that holds it is. Where there are GPUs it is host memory all the same, registered with
CUDA by whoever opens it, so that each copies at the speed of its own bus. So no number of a device travels: a process
need not see, and never touches, the devices of others. Addresses are typed msgspec values; nothing is unpickled.
"""

from __future__ import annotations

import mmap
import os
import weakref

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from specactor.errors import WeightSyncError


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A memory file of a living process of the same user."""

    pid: int
    fd: int
    inode: int  # tells a new file apart from an old one with the same descriptor
    num_bytes: int


class SharedBuffer:
    """Memory of the sender."""

    def __init__(self, num_bytes: int) -> None:
        self._fd = os.memfd_create("specactor-bucket")
        os.ftruncate(self._fd, num_bytes)
        self._closed = weakref.finalize(self, os.close, self._fd)
        self._map = mmap.mmap(self._fd, num_bytes)
        self._num_bytes = num_bytes
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)  # uint8, [num_bytes]
        register(self.data)

    def address(self) -> Address:
        """Return what a reader needs to open it."""
        return Address(pid=os.getpid(), fd=self._fd, inode=os.fstat(self._fd).st_ino, num_bytes=self._num_bytes)

    def close(self) -> None:
        """Give the memory back. Readers that still map it keep their view."""
        unregister(self.data)
        self.data = torch.empty(0, dtype=torch.uint8)
        self._closed()
        del self._map


def open_address(address: Address, *, locked: bool = True) -> torch.Tensor:
    """The sender's bytes, uint8 [num_bytes], without a copy; `unregister` them in the end if they are `locked` for this
    process's GPU. Raises OSError when the sender is gone."""
    data = torch.frombuffer(_mapped(address, mmap.PROT_READ | mmap.PROT_WRITE), dtype=torch.uint8)
    if locked:
        register(data)
    return data


def read_only(address: Address) -> npt.NDArray[np.uint8]:
    """Open an address for the processor alone, which cannot write them. Pages that nobody wrote stay unmade."""
    return np.frombuffer(_mapped(address, mmap.PROT_READ, 0), dtype=np.uint8)


def _mapped(address: Address, protection: int, populate: int = mmap.MAP_POPULATE) -> mmap.mmap:
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR)
    try:
        if os.fstat(fd).st_ino != address.inode:
            raise FileNotFoundError(f"process {address.pid} no longer holds this buffer")
        return mmap.mmap(fd, address.num_bytes, flags=mmap.MAP_SHARED | populate, prot=protection)
    finally:
        os.close(fd)


def register(data: torch.Tensor) -> None:
    """Lock the pages for this process's GPU, if it has one, which copies from others at half the speed or less."""
    if torch.cuda.is_available():
        failed = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)  # type: ignore[no-untyped-call]
        if int(failed):
            raise WeightSyncError(
                f"CUDA could not lock {data.numel()} bytes of shared memory (error {int(failed)}). Raise the limit of "
                "locked memory (ulimit -l), or lower weights_sync.bucket_bytes."
            )


def unregister(data: torch.Tensor) -> None:
    """The reverse of `register`."""
    if torch.cuda.is_available() and data.numel():
        torch.cuda.cudart().cudaHostUnregister(data.data_ptr())  # type: ignore[no-untyped-call]
