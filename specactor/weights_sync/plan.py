"""Which bytes of the trainer's memory go where in an engine rank's parameters. PURE.

Invariants: a host takes every byte of a tensor from one rank, an engine rank from its own GPU if it can; every byte of
a parameter is written once, or only filled, or the plan is refused; a chunk is of one memory and one tensor; equal
layouts have equal chunks.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from specactor.errors import WeightSyncError

PIECE_BYTES = 2**20  # of what is copied at once: it fits a core's second-level cache, so a digest costs no second read
# About that of one digest: all ranks hold the chunks of all hosts, and a GPU's digest takes nine times as much memory.
CHUNK_BYTES = 2**22

Ints = npt.NDArray[np.int64]


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` runs of `length` bytes, `step` bytes apart, from `at` on."""

    memory: int
    at: int
    step: int
    length: int
    count: int

    @property
    def reach(self) -> tuple[int, int]:
        """Return (first byte, end), with what lies between runs."""
        last = self.at + (self.count - 1) * self.step
        return min(self.at, last), max(self.at, last) + self.length


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A span, and where its runs go."""

    span: Span
    to: int
    step: int


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A Hugging Face tensor, or one rank's part of it."""

    name: str
    num_bytes: int  # of the whole tensor
    blocks: tuple[Block, ...]  # to bytes of the tensor


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """What has one digest: bytes in this order."""

    parameters: tuple[str, ...]  # of the engine rank: where each block goes
    blocks: tuple[Block, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(block.span for block in self.blocks)

    @property
    def place(self) -> tuple[object, ...]:
        return (*self.parameters, *map(_place, self.blocks))


class Copy(NamedTuple):
    """What a loader did: a grid copied, or filled."""

    tensor: str  # empty for a fill
    at: int  # first byte in the tensor
    to: int  # first byte in the parameter
    item_bytes: int
    shape: tuple[int, ...]
    at_steps: tuple[int, ...]  # bytes, per dimension
    to_steps: tuple[int, ...]


class _Runs(NamedTuple):
    """Contiguous on both sides; int64 [N] each, bytes."""

    to: Ints
    at: Ints
    length: Ints
    memory: Ints

    def pick(self, which: npt.NDArray[np.generic]) -> _Runs:
        return _Runs(*(column[which] for column in self))


_BASE = 2**15  # of digits, which are int16


class Digit(NamedTuple):
    """One digit of the number of every element of a grid."""

    values: npt.NDArray[np.int16]  # of rows [rows, 1], or of columns [columns]
    weight: int
    step: int  # from a column to the next


class Index(NamedTuple):
    """Runs of elements whose numbers grow by `step`; int64 [N] each."""

    start: Ints  # first element
    number: Ints  # of that element
    step: int
    size: int  # elements of the tensor


def digits(rows: int, columns: int) -> Iterator[Digit]:
    """Yield what adds up to the numbers of a grid's elements, row by row. Converting digits takes two bytes per
    element, or none where all are equal; whole numbers would take eight."""
    for count, unit, step in ((rows, columns, 0), (columns, 1, 1)):
        weight = 1
        while weight == 1 or weight < count:
            values = (np.arange(count) // weight % _BASE).astype(np.int16)
            yield Digit(values if step else values[:, None], weight * unit, step if weight == 1 else 0)
            weight *= _BASE


def index(slices: Iterable[npt.NDArray[np.integer[Any]]], weight: int = 1, step: int = 1) -> Index:
    """Return the runs of a tensor's elements; slices have each one's digit, or number."""
    starts, numbers, size = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for values in slices:
        begins = np.flatnonzero(np.concatenate([[True], np.diff(values) != step])[: len(values)])
        starts.append(begins + size)
        numbers.append(values[begins].astype(np.int64) * weight)
        size += len(values)
    return Index(np.concatenate(starts), np.concatenate(numbers), step * weight, size)


def summed(parts: Sequence[Index]) -> Index:
    """Return the index that digits make."""
    start = np.unique(np.concatenate([part.start for part in parts]))
    number = np.zeros_like(start)
    for part in parts:
        which = np.searchsorted(part.start, start, "right") - 1
        number += part.number[which] + (start - part.start[which]) * part.step
    return Index(start, number, sum(part.step for part in parts), parts[0].size)


def held(index: Index, own: range, *, memory: int, at: int, item_bytes: int) -> tuple[Block, ...]:
    """Return the blocks of a tensor that lie in one shard, whose elements are `own`, at byte `at` of `memory`; `index`
    numbers those of all shards one after the other."""
    first = np.maximum(index.number, own.start)
    end = np.minimum(index.number + np.diff(index.start, append=index.size), own.stop)
    mine = np.flatnonzero(first < end)
    first, to, length = first[mine], (index.start + first - index.number)[mine], (end - first)[mine]
    runs = _Runs(to * item_bytes, at + (first - own.start) * item_bytes, length * item_bytes, np.full_like(to, memory))
    return _blocks(runs)


def merged(parts: Sequence[tuple[int, Sequence[Held]]], hosts: Sequence[int], here: int) -> tuple[Held, ...]:
    """Return all tensors for host `here`: of equal parts its own, else a rank's that has given the fewest bytes.
    `parts` are per rank its number of memories and what it holds. Raises WeightSyncError, on every host alike, where
    one is not whole."""
    first = [0, *accumulate(num_memories for num_memories, _ in parts)]
    copies: dict[tuple[Any, ...], dict[int, Held]] = defaultdict(dict)  # equal parts by rank
    for rank, (_, tensors) in enumerate(parts):
        for tensor in tensors:
            copies[tensor.name, *map(_place, tensor.blocks)][rank] = tensor
    given: dict[tuple[int, bool], int] = defaultdict(int)  # by rank, on its own host or to others
    for host in range(here + 1):  # of those before, what they are given alone: where a part lies differs, and no more
        ranks = [_giver(equal, hosts, host, given) for equal in copies.values()]
    found: dict[str, Held] = {}
    for rank, equal in zip(ranks, copies.values(), strict=True):
        name, num_bytes, blocks = msgspec.structs.astuple(equal[rank])
        moved = tuple(Block(_moved(block.span, first[rank]), block.to, block.step) for block in blocks)
        found[name] = Held(name, num_bytes, (found[name].blocks if name in found else ()) + moved)
    for tensor in found.values():
        _check_once(tensor.name, _expanded(tensor.blocks), tensor.num_bytes, [])
    return tuple(found.values())


def nearer(tensors: Sequence[Held], places: Mapping[int, Mapping[str, int]], memory: int) -> tuple[Held, ...]:
    """Return the tensors, with `memory`'s parts in place of equal ones; `places`: each part's first byte, by memory and
    a name that equal ones share."""
    parts = {number: sorted((at, name) for name, at in of.items()) for number, of in places.items()}
    starts = {number: [at for at, _ in of] for number, of in parts.items()}

    def near(block: Block) -> Block:
        span = block.span
        if span.memory not in parts:
            return block
        start, name = parts[span.memory][bisect(starts[span.memory], span.at) - 1]
        at = places[memory].get(name)
        if at is None:
            return block
        return Block(Span(memory, at + span.at - start, span.step, span.length, span.count), block.to, block.step)

    found = (Held(tensor.name, tensor.num_bytes, tuple(map(near, tensor.blocks))) for tensor in tensors)
    return tuple(one for one, tensor in zip(found, tensors, strict=True) if one != tensor)


def _place(block: Block) -> tuple[int, int, int, int]:
    return block.to, block.step, block.span.length, block.span.count


def _giver(equal: Mapping[int, Held], hosts: Sequence[int], host: int, given: dict[tuple[int, bool], int]) -> int:
    near = [rank for rank in equal if hosts[rank] == host]
    rank = min(near or equal, key=lambda rank: given[rank, bool(near)])
    given[rank, bool(near)] += sum(block.span.length * block.span.count for block in equal[rank].blocks)
    return rank


def covered(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Return (first byte, end) of what spans of one memory cover, in the fewest pieces."""
    runs = _expanded([Block(span, 0, 0) for span in _side_by_side(spans)])
    return list(zip(*(ends.tolist() for ends in _united(runs.at, runs.at + runs.length)), strict=True))


def _side_by_side(spans: Iterable[Span]) -> list[Span]:
    """Join spans that cut the same rows: the columns of all ranks of an engine are whole rows, and those one run."""
    joined: list[Span] = []
    for span in sorted(set(spans), key=lambda span: (span.step, span.count, span.at)):
        memory, at, step, length, count = msgspec.structs.astuple(joined[-1] if joined else span)
        if (step, count, at + length) == (span.step, span.count, span.at):
            joined[-1] = Span(memory, at, step, length + span.length, count)
        else:
            joined.append(span)
    return [Span(s.memory, s.at, 0, s.reach[1] - s.at, 1) if 0 < s.step <= s.length else s for s in joined]


def num_written(own: Copy, written: Iterable[Copy]) -> int:
    """Return how many bytes of one grid others write, each counted once."""
    grids = [_runs_of(copy) for copy in written] or [_NOTHING]
    to = np.concatenate([runs.to for runs in grids])
    start, end = _united(to, to + np.concatenate([runs.length for runs in grids]))
    runs = _runs_of(own)
    ends = np.stack([runs.to, runs.to + runs.length])
    which = np.searchsorted(start, ends, "right")
    before = np.concatenate([[0], np.cumsum(end - start)])[which]
    below = before - np.maximum(0, np.concatenate([[0], end])[which] - ends)  # bytes that are written before each end
    return int(np.sum(below[1] - below[0]))


def _united(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return as few intervals as cover the same, in order."""
    order = np.argsort(start)
    start, end = start[order], np.maximum.accumulate(end[order])
    apart = start[1:] > end[:-1]
    edge = np.ones(min(1, len(start)), bool)
    return start[np.concatenate([edge, apart])], end[np.concatenate([apart, edge])]


def _moved(span: Span, by: int) -> Span:
    return Span(span.memory + by, span.at, span.step, span.length, span.count)


def chunks(
    copies: Mapping[str, Iterable[Copy]], sizes: Mapping[str, int], tensors: Sequence[Held]
) -> tuple[Chunk, ...]:
    """Return the plan of one engine rank from all copies of its loader and whole `tensors`. Raises WeightSyncError
    where parameters would not be written once."""
    every = 1 + max((block.span.memory for tensor in tensors for block in tensor.blocks), default=0)
    numbered = {tensor.name: (number, tensor.blocks) for number, tensor in enumerate(tensors)}
    pieces: list[tuple[str, Block]] = []
    for parameter, num_bytes in sizes.items():
        done = list(copies.get(parameter, ()))
        # Runs of all parameters at once would be gigabytes where many experts' columns are cut.
        sources = {name: _source(*numbered[name], every) for name in {copy.tensor for copy in done} & numbered.keys()}
        joined = [_joined(copy, sources.get(copy.tensor)) for copy in done if copy.tensor]
        runs = _Runs(*(np.concatenate(columns) for columns in zip(*joined, strict=True))) if joined else _NOTHING
        fills = [_runs_of(copy) for copy in done if not copy.tensor]
        _check_once(parameter, runs, num_bytes, fills)
        pieces += [(parameter, piece) for block in _blocks(runs) for piece in cut(block, CHUNK_BYTES)]
    return tuple(_chunk(group, every) for group in _grouped(pieces))


_NOTHING = _Runs(*(np.zeros(0, np.int64) for _ in range(4)))


def _source(number: int, blocks: Sequence[Block], every: int) -> _Runs:
    # A chunk is of one tensor: which tensors one rank has beside each other differs between hosts.
    runs = _expanded(blocks)
    return runs._replace(memory=runs.memory + number * every).pick(np.argsort(runs.to))


def _runs_of(copy: Copy) -> _Runs:
    """Return the runs of a grid, in its order."""
    length = copy.item_bytes
    grid = [axis for axis in zip(copy.shape, copy.to_steps, copy.at_steps, strict=True) if axis[0] != 1]
    while grid and grid[-1][1] == grid[-1][2] == length:
        length *= grid.pop()[0]
    to, at = np.array([copy.to]), np.array([copy.at])
    for size, to_step, at_step in grid:
        to = (to[:, None] + np.arange(size) * to_step).ravel()
        at = (at[:, None] + np.arange(size) * at_step).ravel()
    return _Runs(to, at, np.full_like(to, length), np.zeros_like(to))


def _joined(copy: Copy, source: _Runs | None) -> _Runs:
    """Cut each run of the copy where the tensor's runs end."""
    runs = _runs_of(copy)
    if source is None:
        raise WeightSyncError(f"{copy.tensor} is loaded by the engine and held by no rank of the trainer")
    first = np.searchsorted(source.to, runs.at, "right") - 1
    counts = np.searchsorted(source.to, runs.at + runs.length, "left") - first
    which = np.repeat(np.arange(len(counts)), counts)
    of = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.maximum(runs.at[which], source.to[of])
    end = np.minimum(runs.at[which] + runs.length[which], source.to[of] + source.length[of])
    return _Runs(
        runs.to[which] + start - runs.at[which], source.at[of] + start - source.to[of], end - start, source.memory[of]
    )


def _check_once(name: str, runs: _Runs, num_bytes: int, fills: list[_Runs]) -> None:
    """Raises WeightSyncError unless each byte is written once, or only filled."""
    order = np.argsort(runs.to)
    start, end = runs.to[order], (runs.to + runs.length)[order]
    if np.any(start[1:] < end[:-1]):
        raise WeightSyncError(f"{name} would be written twice from byte {start[1:][start[1:] < end[:-1]][0]} on")
    start = np.concatenate([runs.to, *(fill.to for fill in fills), [num_bytes]])
    end = np.concatenate([runs.to + runs.length, *(fill.to + fill.length for fill in fills), [num_bytes]])
    order = np.argsort(start)
    reached = np.concatenate([[0], np.maximum.accumulate(end[order])[:-1]])
    if np.any(start[order] > reached) or end.max() > num_bytes or start.min() < 0:
        gap = reached[start[order] > reached]
        raise WeightSyncError(f"{name} would not be written whole: byte {gap[0] if len(gap) else num_bytes} of it")


def _expanded(blocks: Sequence[Block]) -> _Runs:
    table = np.array([(*msgspec.structs.astuple(b.span), b.to, b.step) for b in blocks], np.int64).reshape(-1, 7)
    count = table[:, 4]
    memory, at, at_step, length, _, to, to_step = np.repeat(table, count, axis=0).T
    number = np.arange(len(at)) - np.repeat(np.cumsum(count) - count, count)
    return _Runs(to + number * to_step, at + number * at_step, length, memory)


def _blocks(runs: _Runs) -> tuple[Block, ...]:
    """Return the fewest evenly spaced runs, sorted by memory and target."""
    if not len(runs.to):
        return ()
    runs = runs.pick(np.lexsort((runs.to, runs.memory)))
    to, at, length, memory = runs
    follows = (to[1:] == to[:-1] + length[:-1]) & (at[1:] == at[:-1] + length[:-1]) & (memory[1:] == memory[:-1])
    starts = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    to, at, memory, length = to[starts], at[starts], memory[starts], np.add.reduceat(length, starts)
    to_step, at_step = np.diff(to), np.diff(at)
    # On a GPU tensors have no steps back.
    alike = (length[1:] == length[:-1]) & (memory[1:] == memory[:-1]) & (at_step > 0)
    changes = np.ones(len(alike), bool)
    changes[1:] = (to_step[1:] != to_step[:-1]) | (at_step[1:] != at_step[:-1])
    begins = [0]
    for link in np.flatnonzero(changes | ~alike):  # between a run and the next; the first of a block says its steps
        if not alike[link] or begins[-1] != link:
            begins.append(int(link) + 1)
    made = []
    for begin, end in zip(begins, [*begins[1:], len(to)], strict=True):
        several = end - begin > 1
        span = Span(
            int(memory[begin]),
            int(at[begin]),
            int(at_step[begin]) if several else 0,
            int(length[begin]),
            end - begin,
        )
        made.append(Block(span, int(to[begin]), int(to_step[begin]) if several else 0))
    return tuple(made)


def cut(block: Block, most_bytes: int) -> Iterator[Block]:
    """Yield blocks of at most so many bytes, which have the same bytes in the same order."""
    span = block.span
    rows = max(1, most_bytes // span.length)
    for row in range(0, span.count, rows):
        for byte in range(0, span.length, most_bytes):
            length, count = min(most_bytes, span.length - byte), min(rows, span.count - row)
            at, to = span.at + row * span.step + byte, block.to + row * block.step + byte
            yield Block(Span(span.memory, at, span.step, length, count), to, block.step)


def _grouped(pieces: Iterable[tuple[str, Block]]) -> Iterator[list[tuple[str, Block]]]:
    """Groups of about `CHUNK_BYTES`, each of one memory."""
    waiting: dict[int, list[tuple[str, Block]]] = {}
    sizes: defaultdict[int, int] = defaultdict(int)
    for parameter, block in pieces:
        memory = block.span.memory
        waiting.setdefault(memory, []).append((parameter, block))
        sizes[memory] += block.span.length * block.span.count
        if sizes[memory] >= CHUNK_BYTES:
            del sizes[memory]
            yield waiting.pop(memory)
    yield from waiting.values()


def _chunk(group: list[tuple[str, Block]], every: int) -> Chunk:
    number = group[0][1].span.memory
    blocks = (Block(_moved(block.span, number % every - number), block.to, block.step) for _, block in group)
    return Chunk(tuple(parameter for parameter, _ in group), tuple(blocks))
