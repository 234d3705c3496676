"""Memory that the trainer writes and an engine rank on the same host reads.

It is an anonymous memory file, which engine ranks open through /proc. It has no name, so it cannot be left behind: it
is gone when the last process that holds it is. Where there are GPUs it is host memory all the same, registered with
CUDA by whoever opens it, so that each copies at the speed of its own bus. So no number of a device travels: a process
need not see, and never touches, the devices of others. Addresses are typed msgspec values; nothing is unpickled.

Where parameters lie on GPUs, a trainer rank copies what it hands over to such memory (`SharedCopy`), and each engine
rank copies its parts from there by plan (`pull_on_device`). Each side digests what lies on its own GPU, the source and
what arrived, so both ways over the bus are checked.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt
import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from specactor.errors import WeightSyncError
from specactor.weights_sync.buckets import aligned
from specactor.weights_sync.cuda_ipc import GpuMemory, OpenedMemory, exported
from specactor.weights_sync.digest import device_total, read_totals
from specactor.weights_sync.plan import Chunk, Span


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A memory file of a living process of the same user."""

    pid: int
    fd: int
    inode: int  # tells a new file apart from an old one with the same descriptor
    num_bytes: int
    gpu: GpuMemory | None = None  # where the same bytes lie on a GPU; the file may then lack them


class SharedBuffer:
    """Memory of the sender."""

    def __init__(self, num_bytes: int, *, locked: bool = True) -> None:
        self._fd = os.memfd_create("specactor-bucket")
        os.ftruncate(self._fd, num_bytes)
        self._closed = weakref.finalize(self, os.close, self._fd)
        self._map = mmap.mmap(self._fd, num_bytes)
        self._num_bytes = num_bytes
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)  # uint8, [num_bytes]
        self._locked = False
        if locked:
            self.lock()

    def lock(self) -> None:
        """Register the pages with CUDA, unless they are."""
        if not self._locked:
            register(self.data)
        self._locked = True

    def address(self) -> Address:
        """Return what a reader needs to open it."""
        return Address(pid=os.getpid(), fd=self._fd, inode=os.fstat(self._fd).st_ino, num_bytes=self._num_bytes)

    def close(self) -> None:
        """Give the memory back. Readers that still map it keep their view."""
        if self._locked:
            unregister(self.data)
        self.data = torch.empty(0, dtype=torch.uint8)
        self._closed()
        del self._map


def open_address(address: Address, *, locked: bool = True) -> torch.Tensor:
    """The sender's bytes, uint8 [num_bytes], without a copy; `unregister` them in the end if they are `locked` for this
    process's GPU. Raises OSError when the sender is gone."""
    populate = mmap.MAP_POPULATE if locked else 0
    data = torch.frombuffer(_mapped(address, mmap.PROT_READ | mmap.PROT_WRITE, populate), dtype=torch.uint8)
    if locked:
        register(data)
    return data


def read_only(address: Address) -> npt.NDArray[np.uint8]:
    """Open an address for the processor alone, which cannot write them. Pages that nobody wrote stay unmade."""
    return np.frombuffer(_mapped(address, mmap.PROT_READ, 0), dtype=np.uint8)


def _mapped(address: Address, protection: int, populate: int) -> mmap.mmap:
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


def room_bytes(local_ranks: int) -> int:
    """Return how much host memory one of so many ranks may take for its copy: together they leave half of what is
    free."""
    return int(psutil.virtual_memory().available) // (2 * local_ranks)


class SharedCopy:
    """Tensors one after the other in shared memory. Those of a GPU are copied only if someone reads them there; engines
    on the same GPU read the tensors themselves."""

    def __init__(self, tensors: Sequence[Tensor], gpu_only: Sequence[Tensor] = ()) -> None:
        """Args: gpu_only: those that follow `tensors`, but are never copied."""
        self._tensors = [*tensors, *gpu_only]
        self._on_gpu = any(tensor.device.type != "cpu" for tensor in self._tensors)
        self._copied: Sequence[int] = range(0) if self._on_gpu else range(len(tensors))
        self.starts = list(accumulate((aligned(tensor.nbytes) for tensor in self._tensors), initial=0))
        self.buffer = SharedBuffer(max(1, self.starts[len(tensors)]), locked=False)
        self.gpu, self.refusal = self._exported()

    def address(self) -> Address:
        """Return what a reader needs to open it."""
        return msgspec.structs.replace(self.buffer.address(), gpu=self.gpu)

    def moved(self) -> bool:
        """Return whether a tensor lies elsewhere on the GPU, or its allocation was made anew."""
        return self._exported()[0] != self.gpu

    def _exported(self) -> tuple[GpuMemory | None, str]:
        """Return where the tensors lie on a GPU, or why other processes cannot read them there."""
        if not self._on_gpu:
            return None, ""
        try:
            return exported(self._tensors, self.starts), ""
        except (OSError, WeightSyncError) as error:
            return None, str(error)

    def read_by(self, spans: Iterable[Span]) -> None:
        """Copy from now on what of a GPU's tensors these are of."""
        self._copied = sorted({self._number(span) for span in spans})

    def refresh(self) -> None:
        """Copy the tensors as they are now, and wait until they are written: others may read them then."""
        if self._copied:
            self.buffer.lock()
        for number in self._copied:
            raw = _raw(self._tensors[number])
            self.buffer.data[self.starts[number] :][: raw.numel()].copy_(raw, non_blocking=True)
        for device in {tensor.device for tensor in self._tensors if tensor.device.type != "cpu"}:
            torch.cuda.synchronize(device)

    def digests(self, chunks: Iterable[Sequence[Span]]) -> tuple[int, ...]:
        """Return the digest of the bytes of each chunk, on the device that they are copied from."""
        return read_totals([device_total(_joined(map(self._source, spans))) for spans in chunks])

    def _source(self, span: Span) -> Tensor:
        which = self._number(span)
        return _grid(_raw(self._tensors[which]), span.at - self.starts[which], span.step, span)

    def _number(self, span: Span) -> int:
        return bisect(self.starts, span.at) - 1


def pull_on_device(
    parameters: Mapping[str, Tensor], chunks: Iterable[Chunk], copy_from: Sequence[Tensor | OpenedMemory] | None
) -> tuple[int, ...]:
    """Return each chunk's digest where its bytes go to; with `copy_from`, they are copied from those memories first,
    all before the one wait for the device.

    Args:
        parameters: bytes of each.
    """
    totals = []
    for chunk in chunks:
        targets = []
        for name, block in zip(chunk.parameters, chunk.blocks, strict=True):
            targets.append(_grid(parameters[name], block.to, block.step, block.span))
            if copy_from is not None:
                memory = copy_from[block.span.memory]
                raw, at = memory.find(block.span.at) if isinstance(memory, OpenedMemory) else (memory, block.span.at)
                targets[-1].copy_(_grid(raw, at, block.span.step, block.span), non_blocking=True)
        totals.append(device_total(_joined(targets)))
    return read_totals(totals)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _grid(raw: Tensor, at: int, step: int, span: Span) -> Tensor:
    """Runs as rows, without a copy."""
    return raw.as_strided((span.count, span.length), (step or span.length, 1), raw.storage_offset() + at)


def _joined(grids: Iterable[Tensor]) -> Tensor:
    return torch.cat([grid.reshape(-1) for grid in grids])
