"""Memory that the trainer writes and engine ranks on the same host read: an anonymous memory file, opened through /proc
and gone with its last holder.

Who has a GPU locks the pages for it; nothing is unpickled. What lies on GPUs is copied there for other GPUs and hosts
(`SharedCopy`); each side digests its own.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specactor.errors import WeightSyncError
from specactor.parallel.devices import free_memory_bytes
from specactor.weights_sync.buckets import Slot, aligned
from specactor.weights_sync.cuda_ipc import GpuMemory, OpenedMemory, cuda, exported, places, uuid_of
from specactor.weights_sync.digest import copy_with_digest, device_total, read_totals
from specactor.weights_sync.plan import Chunk, Span


class Address(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    fd: int
    inode: int  # tells a new file apart from an old one with the same descriptor
    num_bytes: int
    gpu: GpuMemory | None = None  # where the same bytes lie on a GPU; the file may then lack them


class SharedBuffer:
    def __init__(self, num_bytes: int, *, locked: bool = True) -> None:
        self._fd = os.memfd_create("specactor-bucket")
        os.ftruncate(self._fd, num_bytes)
        self._closed = weakref.finalize(self, os.close, self._fd)
        self._map = mmap.mmap(self._fd, num_bytes)
        self._num_bytes = num_bytes
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)  # uint8, [num_bytes]
        self._locked: list[Tensor] = []
        self._pieces: list[tuple[int, int]] = []
        if locked:
            self.lock([(0, num_bytes)])

    def lock(self, parts: Iterable[tuple[int, int]]) -> None:
        """Lock the pages of these parts, (first byte, end), alone. Raises WeightSyncError; then none is."""
        wanted = _pieces(parts, self._num_bytes)
        if wanted != self._pieces:
            self._unlock()
            self._locked = lock(self.data, wanted)
            self._pieces = wanted

    @property
    def locked(self) -> Sequence[tuple[int, int]]:
        """Return the locked parts."""
        return self._pieces

    def _unlock(self) -> None:
        for part in self._locked:
            unregister(part)
        self._locked, self._pieces = [], []

    def address(self) -> Address:
        return Address(pid=os.getpid(), fd=self._fd, inode=os.fstat(self._fd).st_ino, num_bytes=self._num_bytes)

    def close(self) -> None:
        """Give the memory back; readers' mappings keep their view."""
        self._unlock()
        self.data = torch.empty(0, dtype=torch.uint8)
        self._closed()
        del self._map


def pack(tensors: Iterable[tuple[str, Tensor]], room: Callable[[int], Tensor]) -> tuple[Slot, ...]:
    """Copy tensors one after the other, with their digests, into what `room` returns for so many bytes."""
    slots: list[Slot] = []
    used = 0
    for name, tensor in tensors:
        source, offset = _raw(tensor), aligned(used)
        used = offset + source.numel()
        digest = copy_with_digest(room(used)[offset:used], source)
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append(Slot(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset, digest=digest))
    return tuple(slots)


def open_address(address: Address, *, locked: bool = True) -> torch.Tensor:
    """Return the sender's bytes, uint8 [num_bytes], without a copy, to `unregister` if `locked`. Raises OSError when
    the sender is gone."""
    populate = mmap.MAP_POPULATE if locked else 0
    data = torch.frombuffer(_mapped(address, mmap.PROT_READ | mmap.PROT_WRITE, populate), dtype=torch.uint8)
    if locked:
        register(data)
    return data


def read_only(address: Address) -> npt.NDArray[np.uint8]:
    """Return the bytes read-only for the processor; pages that nobody wrote stay unmade."""
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
    """Lock the pages for this process's GPU, which copies others at half the speed."""
    if torch.cuda.is_available():
        failed = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)  # type: ignore[no-untyped-call]
        if int(failed):
            with suppress(OSError):
                cuda().forget_error()  # who reads at half the speed then goes on
            raise WeightSyncError(
                f"CUDA could not lock {data.numel()} bytes of shared memory (error {int(failed)}). Raise the limit of "
                "locked memory (ulimit -l), or lower weights_sync.bucket_bytes."
            )


LOCKED_BYTES = 2 * 2**20
"""Pages are locked in pieces of so many bytes: each is a call, and none may share a page with another."""


def _pieces(parts: Iterable[tuple[int, int]], num_bytes: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    size = LOCKED_BYTES
    for start, end in sorted((start // size * size, -(-end // size) * size) for start, end in parts):
        joins = found and start <= found[-1][1]
        first, last = found.pop() if joins else (start, end)
        found.append((first, max(last, end)))
    return [(start, min(end, num_bytes)) for start, end in found]


def lock(data: torch.Tensor, parts: Iterable[tuple[int, int]]) -> list[torch.Tensor]:
    """Lock the pages of these parts of uint8 [N], (first byte, end); return what to `unregister`. Raises
    WeightSyncError; then none is locked."""
    locked: list[torch.Tensor] = []
    try:
        for start, end in _pieces(parts, data.numel()):
            register(data[start:end])
            locked.append(data[start:end])
    except WeightSyncError:
        for part in locked:
            unregister(part)
        raise
    return locked


def unregister(data: torch.Tensor) -> None:
    if torch.cuda.is_available() and data.numel():
        torch.cuda.cudart().cudaHostUnregister(data.data_ptr())  # type: ignore[no-untyped-call]


def room_bytes(local_ranks: int) -> int:
    """Return the host memory for one of so many ranks' copies: together half of what is free."""
    return free_memory_bytes() // (2 * local_ranks)


class SharedCopy:
    """Tensors one after the other; those of a GPU are copied only if someone reads them here."""

    def __init__(self, tensors: Sequence[Tensor], gpu_only: Sequence[Tensor] = ()) -> None:
        """Args: gpu_only: never copied."""
        self._tensors = [*tensors, *gpu_only]
        self._on_gpu = any(tensor.device.type != "cpu" for tensor in self._tensors)
        self._copied: Sequence[int] = range(0) if self._on_gpu else range(len(tensors))
        self._made: set[int] = set()  # whose copies have their memory
        self.starts = list(accumulate((aligned(tensor.nbytes) for tensor in self._tensors), initial=0))
        self.buffer = SharedBuffer(max(1, self.starts[len(tensors)]), locked=False)
        self.gpu: GpuMemory | None = None
        self.refusals: dict[str, str] = {}
        """By GPU: why no other process can read its tensors there."""
        if self._on_gpu:
            try:
                self._places = places(self._tensors, self.starts)
                self.gpu = exported(self._tensors[0].device.index, self._places)
            except (OSError, WeightSyncError) as error:
                self.refusals = {_uuid_or_none(self._tensors[0]): str(error)}

    def address(self) -> Address:
        return msgspec.structs.replace(self.buffer.address(), gpu=self.gpu)

    def moved(self) -> bool:
        """Return whether a tensor that others read on the GPU lies elsewhere, in another allocation, or nowhere that
        could be told."""
        try:
            return self.gpu is not None and places(self._tensors, self.starts) != self._places
        except (OSError, WeightSyncError):  # who then makes a copy anew is told so, and goes on without the GPU's
            return True

    def read_by(self, spans: Iterable[Span]) -> None:
        """Copy from now on only what these are of."""
        self._copied = sorted({self._number(span) for span in spans})

    def lacking_bytes(self) -> int:
        """Return how much more host memory the copies will take."""
        return sum(aligned(self._tensors[number].nbytes) for number in set(self._copied) - self._made)

    def refresh(self) -> None:
        """Copy the tensors as they are now, and wait."""
        self.buffer.lock((self.starts[n], self.starts[n] + self._tensors[n].nbytes) for n in self._copied)
        self._made |= set(self._copied)
        for number in self._copied:
            raw = _raw(self._tensors[number])
            self.buffer.data[self.starts[number] :][: raw.numel()].copy_(raw, non_blocking=True)
        for device in {tensor.device for tensor in self._tensors if tensor.device.type != "cpu"}:
            torch.cuda.synchronize(device)

    def digests(self, chunks: Iterable[Sequence[Span]]) -> tuple[int, ...]:
        """Return each chunk's digest, on its device."""
        return read_totals([device_total(_joined(map(self._source, spans))) for spans in chunks])

    def _source(self, span: Span) -> Tensor:
        which = self._number(span)
        return _grid(_raw(self._tensors[which]), span.at - self.starts[which], span.step, span)

    def _number(self, span: Span) -> int:
        return bisect(self.starts, span.at) - 1


def pull_on_device(
    parameters: Mapping[str, Tensor], chunks: Iterable[Chunk], copy_from: Sequence[Tensor | OpenedMemory] | None
) -> tuple[int, ...]:
    """Return each chunk's digest in `parameters`; with `copy_from`, that host memory is copied there first. It waits
    for the device once."""
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


def _uuid_or_none(tensor: Tensor) -> str:
    try:
        return uuid_of(tensor.device.index)
    except WeightSyncError:
        return ""


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _grid(raw: Tensor, at: int, step: int, span: Span) -> Tensor:
    return raw.as_strided((span.count, span.length), (step or span.length, 1), raw.storage_offset() + at)


def _joined(grids: Iterable[Tensor]) -> Tensor:
    return torch.cat([grid.reshape(-1) for grid in grids])
