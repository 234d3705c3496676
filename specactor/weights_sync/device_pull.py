"""Pulls by plan where parameters lie on GPUs: a trainer rank copies what it hands over to locked host memory, and each
engine rank copies its parts from there.

Each side digests what lies on its own GPU, the source and what arrived, so both ways over the bus are checked. No
device's number travels.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from specactor.weights_sync.buckets import aligned
from specactor.weights_sync.digest import device_total, read_totals
from specactor.weights_sync.memory import SharedBuffer
from specactor.weights_sync.plan import Chunk, Span


def room_bytes(local_ranks: int) -> int:
    """Return how much host memory one of so many ranks may take for its copy: together they leave half of what is
    free."""
    return int(psutil.virtual_memory().available) // (2 * local_ranks)


class SharedCopy:
    """Tensors one after the other in shared memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self.starts = list(accumulate((aligned(tensor.nbytes) for tensor in tensors), initial=0))
        self.buffer = SharedBuffer(max(1, self.starts[-1]))

    def refresh(self) -> None:
        """Copy the tensors as they are now."""
        for start, tensor in zip(self.starts, self._tensors, strict=False):
            raw = _raw(tensor)
            self.buffer.data[start : start + raw.numel()].copy_(raw, non_blocking=True)
        for device in {tensor.device for tensor in self._tensors if tensor.device.type != "cpu"}:
            torch.cuda.synchronize(device)

    def digests(self, chunks: Iterable[Sequence[Span]]) -> tuple[int, ...]:
        """Return the digest of the bytes of each chunk, on the device that they are copied from."""
        return read_totals([device_total(_joined(map(self._source, spans))) for spans in chunks])

    def _source(self, span: Span) -> Tensor:
        which = bisect(self.starts, span.at) - 1
        return _grid(_raw(self._tensors[which]), span.at - self.starts[which], span.step, span)


def pull(
    parameters: Mapping[str, Tensor], chunks: Iterable[Chunk], copy_from: Sequence[Tensor] | None
) -> tuple[int, ...]:
    """Return each chunk's digest where its bytes go to; with `copy_from`, they are copied from that host memory first,
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
                source = _grid(copy_from[block.span.memory], block.span.at, block.span.step, block.span)
                targets[-1].copy_(source, non_blocking=True)
        totals.append(device_total(_joined(targets)))
    return read_totals(totals)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _grid(raw: Tensor, at: int, step: int, span: Span) -> Tensor:
    """Runs as rows, without a copy."""
    return raw.as_strided((span.count, span.length), (step or span.length, 1), raw.storage_offset() + at)


def _joined(grids: Iterable[Tensor]) -> Tensor:
    return torch.cat([grid.reshape(-1) for grid in grids])
