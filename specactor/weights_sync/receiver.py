"""The engine's end of a weight sync: rank calls inside every engine rank.

Invariants: digests are compared with the source's before loading, or else by the sender afterwards; what was loaded is
read back bit for bit; what was copied is answered with its digest; a version is committed only if every element of
every parameter was written.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specactor.errors import WeightSyncError
from specactor.weights_sync import plan
from specactor.weights_sync.buckets import Slot
from specactor.weights_sync.cuda_ipc import Allocations, OpenedMemory, uuid_of
from specactor.weights_sync.digest import Memory, copy_and_digest, digest_of
from specactor.weights_sync.memory import Address, lock, open_address, pull_on_device, read_only, unregister
from specactor.weights_sync.messages import Answer, Bucket, Holding, Pull
from specactor.weights_sync.plan import Held

_COMPARED_BYTES = 2**26
"""What is compared at once: a GPU makes a byte per element, and a copy of what comes from the host."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


@dataclass(eq=False)
class EngineRank:
    """What a receiver uses of a rank. `RankContext` adds SGLang's part; a draft model loads without."""

    model: torch.nn.Module
    tp_rank: int = 0

    def begin_weight_update(self) -> None: ...

    def end_weight_update(self) -> None: ...

    def flush_cache(self) -> None: ...


class _WriteAudit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fills: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper would double the cost of every operation

    def take(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
        """Return every copy and fill since the last call."""
        copies, fills = self._copies, self._fills
        self._copies, self._fills = [], []
        return copies, fills

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _COPY:
            self._copies.append((args[0], args[1]))
        elif func in _FILLS:
            self._fills.append(args[0])
        return result


class _Mismatch(Exception):  # noqa: N818
    """What is wrong with a tensor."""


class _Arrived(NamedTuple):
    slot: Slot
    tensor: torch.Tensor
    raw: memoryview | torch.Tensor


def _check(arrived: _Arrived, problem: str = "arrived with a wrong digest") -> None:
    if digest_of(arrived.raw) != arrived.slot.digest:
        raise _Mismatch(f"{arrived.slot.name} {problem}")


_Places = list[tuple[int, int, str]]  # (address, bytes, name) of tensors, sorted


def _places(tensors: Iterable[tuple[str, torch.Tensor]]) -> _Places:
    return sorted((tensor.data_ptr(), tensor.numel() * tensor.element_size(), name) for name, tensor in tensors)


def _place(places: _Places, part: torch.Tensor) -> tuple[str, int]:
    """Return (tensor that this is a part of, or ""; its first byte there)."""
    found = bisect.bisect(places, (part.data_ptr(), 2**63, "")) - 1
    offset = part.data_ptr() - places[found][0]
    return (places[found][2], offset) if found >= 0 and offset < max(1, places[found][1]) else ("", 0)


@dataclass
class _Watched:
    """What the loader did, for the next plan."""

    parameters: _Places
    sources: _Places = field(default_factory=list)  # what is being loaded
    copies: dict[str, dict[plan.Copy, None]] = field(default_factory=dict)
    refusal: str = ""

    def note(self, target: torch.Tensor, source: torch.Tensor | None) -> None:
        parameter, to = _place(self.parameters, target)
        tensor, at = _place(self.sources, source) if source is not None else ("", 0)
        if not target.numel() or (source is None and not parameter):
            return  # nothing of the trainer's
        if source is not None and not tensor:
            self.refusal = self.refusal or f"{parameter or 'something'} is loaded from what the trainer did not send"
        elif not parameter:
            self.refusal = self.refusal or f"{tensor} is loaded into what is no parameter"
        elif source is not None and (source.dtype != target.dtype or source.shape != target.shape):
            self.refusal = self.refusal or f"{tensor} changes its type or shape on the way into {parameter}"
        item = target.element_size()
        to_steps = tuple(step * item for step in target.stride())
        at_steps = to_steps if source is None else tuple(step * item for step in source.stride())
        copy = plan.Copy(tensor, at, to, item, tuple(target.shape), at_steps, to_steps)
        self.copies.setdefault(parameter, {})[copy] = None


@dataclass(frozen=True)
class _Plan:
    key: int
    chunks: tuple[plan.Chunk, ...]
    sizes: dict[str, int]
    memories: list[Memory | torch.Tensor | OpenedMemory | None]
    """On the host, or on this rank's own GPU; None where nothing is taken from."""
    through_host: str
    read: list[tuple[torch.Tensor, list[tuple[int, int]]]] = field(default_factory=list)
    """Host memories with parts, (first byte, end), that this rank's GPU reads and that are not locked yet."""
    locked: list[torch.Tensor] = field(default_factory=list)

    def lock(self) -> None:
        """Lock what is read, which makes the pages: not before the trainer has found room for them."""
        while self.read:
            try:
                self.locked.extend(lock(*self.read.pop()))
            except WeightSyncError as error:
                logging.getLogger(__name__).warning("Weights come at half the speed: %s", error)


class Receiver:
    def __init__(self) -> None:
        self._watched = _Watched([])
        self._plan: _Plan | None = None
        self._pulled = False  # whether the open version came by the plan
        self._views: dict[Address, torch.Tensor] = {}
        self._on_gpu = Allocations()
        self._written = defaultdict[int, dict[plan.Copy, None]](dict)  # by storage
        self._open_version: int | None = None
        self._at = ""  # name of the tensor that is being loaded

    def close(self) -> None:
        """Let go of all buckets."""
        for view in self._views.values():
            unregister(view)
        self._views.clear()

    def check(self, rank: EngineRank, payload: bytes) -> bytes:
        """Say whether the bytes of `Bucket`s have their source's digests."""
        self._forget_plan()  # where parameters moved, their old memory is free only when nobody has it open
        try:
            for bucket in msgspec.msgpack.decode(payload, type=tuple[Bucket, ...]):
                for arrived in self._arrived(rank, bucket):
                    _check(arrived)
        except _Mismatch as mismatch:
            return msgspec.msgpack.encode(Answer(problem=str(mismatch)))
        return msgspec.msgpack.encode(Answer())

    def load(self, rank: EngineRank, payload: bytes) -> bytes:
        """Check each tensor of `Bucket`s, load it, and read it back."""
        for bucket in msgspec.msgpack.decode(payload, type=tuple[Bucket, ...]):
            if self._open_version != bucket.version:
                self._begin(rank, bucket.version)
            self._pulled = False
            tensors = self._arrived(rank, bucket)
            self._watched.sources = _places((arrived.slot.name, arrived.tensor) for arrived in tensors)
            self._at = ""
            try:
                with torch.no_grad(), _WriteAudit() as audit:
                    rank.model.load_weights(self._fed(tensors, audit))  # type: ignore[operator]
                    self._read_back(audit)
            except _Mismatch as mismatch:
                return msgspec.msgpack.encode(Answer(problem=str(mismatch)))
            except Exception as error:  # the model's loader met something that it cannot load, whatever it raises
                return msgspec.msgpack.encode(Answer(problem=f"{self._at}: {type(error).__name__}: {error}"))
        return msgspec.msgpack.encode(Answer())

    def plan(self, rank: EngineRank, payload: bytes) -> bytes:
        """Answer all ranks' `Holding`, after a whole version was loaded: how to copy the next one."""
        message = msgspec.msgpack.decode(payload, type=Holding)
        self.close()  # what was loaded out of buckets is loaded
        on_host = next(rank.model.parameters()).device.type == "cpu"
        try:
            if not message.planned:
                self._forget_plan()
                self._plan = self._planned(rank.model, message)
            if self._plan is None or self._plan.key != message.planned:
                raise WeightSyncError("the engine has no plan that what other hosts send belongs to")
            read = defaultdict[int, list[tuple[int, int]]](list)
            for span in (block.span for chunk in self._plan.chunks for block in chunk.blocks):
                read[span.memory].append(span.reach)
            for number, address in enumerate(message.addresses):
                if address is None or number not in read or self._plan.memories[number] is not None:
                    continue
                if on_host:
                    self._plan.memories[number] = read_only(address)
                else:
                    memory = self._plan.memories[number] = open_address(address, locked=False)
                    self._plan.read.append((memory, read[number]))
        except (OSError, WeightSyncError) as error:
            self._forget_plan()
            return msgspec.msgpack.encode(Answer(refusal=str(error)))
        self._plan = replace(self._plan, key=digest_of(memoryview(payload)))
        if message.planned:
            return msgspec.msgpack.encode(Answer())
        on_gpu = tuple(i for i, memory in enumerate(self._plan.memories) if isinstance(memory, OpenedMemory))
        reply = Answer(chunks=self._plan.chunks, on_gpu=on_gpu, through_host=self._plan.through_host)
        return msgspec.msgpack.encode(reply)

    def _planned(self, model: torch.nn.Module, everything: Holding) -> _Plan:
        """Join what was watched with what the trainer holds."""
        watched = self._watched
        if watched.parameters != _places(model.named_parameters()):
            raise WeightSyncError("the engine's parameters moved while they were loaded")
        if watched.refusal:
            raise WeightSyncError(watched.refusal)
        sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
        _flat(model, sizes)
        on_gpu, near, reason = self._opened_on_gpu(everything, next(model.parameters()).device)
        tensors = {tensor.name: tensor for tensor in (*everything.tensors, *near)}
        chunks = plan.chunks(watched.copies, sizes, tuple(tensors.values()))
        memories = [on_gpu.get(number) for number in range(len(everything.addresses))]
        return _Plan(everything.planned, chunks, sizes, [*memories], reason)

    def _opened_on_gpu(
        self, everything: Holding, device: torch.device
    ) -> tuple[dict[int, OpenedMemory], Sequence[Held], str]:
        """Return this GPU's memories, what is better taken there, and why nothing is."""
        memories = {i: each.gpu for i, each in enumerate(everything.addresses) if each is not None and each.gpu}
        known = device.type == "cuda" and (memories or everything.refusals)
        try:
            uuid = uuid_of(device.index) if known else ""
            own = {number: memory for number, memory in memories.items() if memory.uuid == uuid}
            refusals = everything.refusals if known else {}
            opened = self._on_gpu.open(own, device.index)
            return opened, everything.near.get(uuid, ()), refusals.get(uuid, refusals.get("", ""))
        except (OSError, WeightSyncError) as error:
            return {}, (), str(error)

    def pull(self, rank: EngineRank, payload: bytes) -> bytes:
        """Answer a `Pull`: the parameters' digests, after all were copied."""
        message = msgspec.msgpack.decode(payload, type=Pull)
        if self._plan is None or self._plan.key != message.key:
            return msgspec.msgpack.encode(Answer(unplanned=True))
        if message.copy and self._open_version != message.version:
            self._begin(rank, message.version)
        try:
            if message.copy:
                self._plan.lock()
            digests = self._digests(_flat(rank.model, self._plan.sizes), self._plan, copies=message.copy)
        except (TypeError, ValueError, WeightSyncError) as error:
            return msgspec.msgpack.encode(Answer(problem=str(error)))
        self._pulled = message.copy
        return msgspec.msgpack.encode(Answer(digests=digests))

    @staticmethod
    def _digests(parameters: dict[str, torch.Tensor], own: _Plan, *, copies: bool) -> tuple[int, ...]:
        memories: Any = own.memories if copies else None
        if any(raw.device.type != "cpu" for raw in parameters.values()):
            return pull_on_device(parameters, own.chunks, memories)
        flat = {name: raw.numpy() for name, raw in parameters.items()}
        return tuple(
            copy_and_digest([flat[name] for name in chunk.parameters], chunk.blocks, memories) for chunk in own.chunks
        )

    def _forget_plan(self) -> None:
        """Let go of what it reads; what does not close is tried again with the next plan."""
        for part in self._plan.locked if self._plan is not None else ():
            unregister(part)
        self._plan = None
        with contextlib.suppress(OSError, WeightSyncError):
            self._on_gpu.close()

    def commit(self, rank: EngineRank, payload: bytes) -> bytes:
        """Say whether the whole model is at this version. Drops old caches."""
        version = msgspec.msgpack.decode(payload, type=int)
        if self._open_version != version:
            return msgspec.msgpack.encode(Answer(problem=f"version {version} was never loaded"))
        problem = "" if self._pulled else self._unwritten(rank.model)
        if not self._pulled:
            self.close()  # what other hosts sent may take as much memory as the model
        rank.end_weight_update()
        rank.flush_cache()
        self._open_version = None
        self._written.clear()
        return msgspec.msgpack.encode(Answer(problem=problem))

    def _begin(self, rank: EngineRank, version: int) -> None:
        if self._open_version is None:
            rank.begin_weight_update()
        self._open_version = version
        self._written.clear()
        self._pulled = False
        self._watched = _Watched(_places(rank.model.named_parameters()))

    def _arrived(self, rank: EngineRank, bucket: Bucket) -> list[_Arrived]:
        data = self._open(bucket.address)
        if bucket.of_gpu:  # of several hosts' buckets each is used in part
            data = data[: max(slot.offset + slot.num_bytes for slot in bucket.slots)]
            data = data.to(next(rank.model.parameters()).device)
        host = data.numpy().data if data.device.type == "cpu" else None
        arrived = []
        for slot in bucket.slots:
            end = slot.offset + slot.num_bytes
            if slot.num_bytes < 0 or end > data.numel():
                raise _Mismatch(f"{slot.name} of shape {slot.shape} does not fit its bucket")
            raw = data[slot.offset : end]
            tensor = raw.view(getattr(torch, slot.dtype)).view(slot.shape)
            arrived.append(_Arrived(slot, tensor, raw if host is None else host[slot.offset : end]))
        return arrived

    def _fed(self, tensors: list[_Arrived], audit: _WriteAudit) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand them to the loader, each checked just before, and read back and checked just after."""
        for arrived in tensors:
            _check(arrived)
            self._at = arrived.slot.name
            yield arrived.slot.name, arrived.tensor
            self._read_back(audit)
            _check(arrived, "changed while it was loaded")

    def _open(self, address: Address) -> torch.Tensor:
        if address not in self._views:
            # More than two buckets of each rank and `sender.MOST_KEPT` mirrors: some are of senders that are gone.
            if len(self._views) >= 1024:
                self.close()
            self._views[address] = open_address(address)
        return self._views[address]

    def _read_back(self, audit: _WriteAudit) -> None:
        copies, fills = audit.take()
        for target, source in copies:
            if not _same_bits(target, source):
                raise _Mismatch(f"{self._at}: a region of shape {tuple(target.shape)} is not what was loaded into it")
            self._watched.note(target, source)
        for target in fills:
            self._watched.note(target, None)
        for region in [target for target, _ in copies] + fills:
            self._written[region.untyped_storage().data_ptr()][_grid(region)] = None

    def _unwritten(self, model: torch.nn.Module) -> str:
        for name, parameter in model.named_parameters():
            # Regions may overlap, and a storage may have several parameters: no sum of sizes shows a hole.
            regions = self._written[parameter.untyped_storage().data_ptr()]
            count = plan.num_written(_grid(parameter), regions) // parameter.element_size()
            if count < parameter.numel():
                return f"{name} was written in {count} of {parameter.numel()} elements: the trainer sent too little"
        return ""


def _grid(region: torch.Tensor) -> plan.Copy:
    """Return where it lies in its storage, as if it were filled."""
    item = region.element_size()
    steps = tuple(step * item for step in region.stride())
    return plan.Copy("", 0, int(region.storage_offset()) * item, item, tuple(region.shape), steps, steps)


def _same_bits(target: torch.Tensor, source: torch.Tensor) -> bool:
    """The source is brought to the target's device, type and shape in parts."""
    if not target.dim():
        target, source = target[None], source.view(1)
    source, item = source.expand_as(target), target.element_size()
    rows = max(1, _COMPARED_BYTES // max(1, target.shape[1:].numel() * item))
    parts = zip(torch.split(target, rows), torch.split(source, rows), strict=True)
    return all(_equal(mine, other.to(mine.device, mine.dtype)) for mine, other in parts)


def _equal(target: torch.Tensor, source: torch.Tensor) -> bool:
    if target.device.type == "cpu" and target.is_contiguous() and source.is_contiguous():
        num_bytes = target.numel() * target.element_size()
        return bool(_libc.memcmp(target.data_ptr(), source.data_ptr(), num_bytes) == 0)
    bits = _INTEGERS[target.element_size()]  # of floats 0.0 is equal to -0.0, and NaN is not to itself
    return torch.equal(target.view(bits), source.view(bits))


def _flat(model: torch.nn.Module, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Raises WeightSyncError where bytes do not lie as the plan has them."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous() or parameter.numel() * parameter.element_size() != sizes.get(name):
            raise WeightSyncError(f"{name} of shape {tuple(parameter.shape)} does not lie in memory as it was loaded")
        found[name] = parameter.detach().view(-1).view(torch.uint8)
    return found
