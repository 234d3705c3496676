"""Digests of tensors: a flipped bit anywhere changes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from specactor.weights_sync.plan import PIECE_BYTES, Block, Span, cut

_PIECE_BYTES = 256 * 2**10  # fits a core's second-level cache


def digest(tensor: torch.Tensor) -> int:
    """Return the 64-bit digest of a tensor's bytes in row-major order: XXH3 on the host; on a GPU sum of word_i * (2 i
    + 1) modulo 2**64, where a flipped bit, 2**k * odd, shows. The two are not compared."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return digest_of(flat.numpy().data if flat.device.type == "cpu" else flat)


def copy_with_digest(target: torch.Tensor, source: torch.Tensor) -> int:
    """Copy bytes, uint8 [N], and return their `digest`."""
    if source.device.type != "cpu":
        target.copy_(source)
        return digest_of(source)
    to, of = target.numpy(), source.numpy()
    state = xxhash.xxh3_64()
    for start in range(0, len(of), _PIECE_BYTES):  # hashed, then copied out of the cache: memory is read once
        piece = of[start : start + _PIECE_BYTES]
        state.update(piece.data)
        to[start : start + _PIECE_BYTES] = piece
    return int(state.intdigest())


def digest_of(raw: memoryview | torch.Tensor) -> int:
    """Return the digest of a host's memoryview, or a GPU's contiguous uint8 tensor."""
    return int(xxhash.xxh3_64_intdigest(raw)) if isinstance(raw, memoryview) else read_totals([device_total(raw)])[0]


def device_total(flat: torch.Tensor) -> torch.Tensor:
    # A chunk of a plan is often small: what it takes is the start of each kernel.
    totals = list[torch.Tensor]()
    piece = 8 * 2**20  # so words take 64 MiB
    for words in torch.split(flat, piece):
        start = 2 * piece * len(totals) + 1
        odd = torch.arange(start, start + 2 * len(words), 2, device=flat.device, dtype=torch.int64)
        totals.append(odd.mul_(words).sum())
    return totals[0] if len(totals) == 1 else torch.stack(totals).sum()


def read_totals(totals: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return digests that lie on a GPU, in one wait."""
    return tuple(total & (2**64 - 1) for total in torch.stack(list(totals)).tolist()) if totals else ()


Memory = npt.NDArray[np.uint8]


def digest_spans(memories: Mapping[int, Memory], spans: Iterable[Span]) -> int:
    """Return the `digest` of the spans' bytes, one after the other."""
    state = xxhash.xxh3_64()
    for span in spans:
        for piece in cut(Block(span, 0, 0), PIECE_BYTES):
            state.update(_dense(_grid(memories[span.memory], piece.span.at, span.step, piece.span)))
    return int(state.intdigest())


def copy_and_digest(parameters: Iterable[Memory], blocks: Iterable[Block], copy_from: Sequence[Memory] | None) -> int:
    """Return the `digest` of the blocks' bytes in their parameters; with `copy_from`, they are copied first."""
    state = xxhash.xxh3_64()
    for parameter, block in zip(parameters, blocks, strict=True):
        for to, step, span in ((piece.to, piece.step, piece.span) for piece in cut(block, PIECE_BYTES)):
            target = _grid(parameter, to, step, span)
            if copy_from is not None:
                target[...] = _grid(copy_from[span.memory], span.at, span.step, span)
            state.update(_dense(target))  # while it is in the cache
    return int(state.intdigest())


def _grid(memory: Memory, at: int, step: int, span: Span) -> Memory:
    """Return runs as rows, or one as [length], without a copy."""
    if span.count == 1:
        return np.ndarray((span.length,), np.uint8, memory.data, at)
    return np.ndarray((span.count, span.length), np.uint8, memory.data, at, (step, 1))


def _dense(grid: Memory) -> memoryview:
    return np.ascontiguousarray(grid).data
