"""What ``torch.cuda`` means on a machine without a GPU, for libraries that assume one.

Three things, for the whole process: the stateful API of ``torch.cuda`` means the CPU (device, random state) or nothing
(streams, events, synchronisation); "cuda" as a device argument means "cpu"; gaps of the gloo backend are filled.
`specactor.cpu.megatron.install` applies it; nothing else should.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")

_FACTORIES = [
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "randint",
    "arange",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "as_tensor",
    "linspace",
    "eye",
]
_METHODS = ["new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"]


def replace(owner: object, name: str, value: object) -> None:
    """Every change to a foreign module goes through here, so that it can be found."""
    setattr(owner, name, value)


def install() -> None:
    """Change torch for this process. Call once, before the library that needs it is imported."""
    importlib.import_module("torch._dynamo")  # it lists torch's functions when imported: before they are wrapped
    replace(torch, "compile", lambda model=None, **_: model if model is not None else (lambda fn: fn))
    _install_state()
    _install_devices()
    _install_gloo()


class Stream:
    """The CPU is synchronous: a stream orders nothing."""

    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    __hash__ = object.__hash__

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    """An event has always happened; two of them measure time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time_s = 0.0

    def record(self, *_: Any) -> None:
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.time_s - self.time_s)


class TypeName(str):
    """``Tensor.type()``: 'torch.FloatTensor' that also equals 'torch.cuda.FloatTensor', which optimizers look for."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or self.replace("torch.", "torch.cuda.", 1).__eq__(other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _nothing(*_: Any, **__: Any) -> None: ...


def _install_state() -> None:
    cuda = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache"):
        replace(cuda, name, _nothing)
    replace(cuda, "current_device", lambda: CPU)
    replace(cuda, "device_count", lambda: 1)
    replace(cuda, "Stream", Stream)
    replace(cuda, "Event", Event)
    for name in ("current_stream", "default_stream"):
        replace(cuda, name, lambda *_: Stream())
    replace(cuda, "stream", lambda _=None: contextlib.nullcontext())
    for name in ("manual_seed", "manual_seed_all"):
        replace(cuda, name, torch.default_generator.manual_seed)
    for module in (cuda, cuda.random):
        replace(module, "get_rng_state", lambda device=None: torch.get_rng_state())
        replace(module, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        replace(cuda, name, lambda *_: 0)
    for name in ("range_push", "range_pop"):
        replace(cuda.nvtx, name, _nothing)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


def _install_devices() -> None:
    tensor = torch.Tensor
    for name in _FACTORIES:
        replace(torch, name, _on_cpu(getattr(torch, name)))
    for name in _METHODS:
        replace(tensor, name, _on_cpu(getattr(tensor, name)))
    move: Callable[..., torch.Tensor] = tensor.to
    type_of: Callable[..., Any] = tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        return move(self, *args, **{name: CPU if _is_cuda(value) else value for name, value in kwargs.items()})

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> object:
        return type_of(self, *args, **kwargs) if args or kwargs else TypeName(type_of(self))

    def itself(self: Any, *_: Any, **__: Any) -> Any:
        return self

    replace(tensor, "to", to)
    replace(tensor, "type", type_name)
    replace(tensor, "cuda", itself)
    replace(tensor, "pin_memory", itself)
    replace(tensor, "record_stream", _nothing)
    replace(torch.nn.Module, "cuda", itself)


def _install_gloo() -> None:
    """gloo refuses an uneven all_gather, and scatters a strided view as if it were contiguous, without an error."""
    all_gather, scatter, barrier = dist.all_gather, dist.scatter, dist.barrier

    @functools.wraps(all_gather)
    def gather(outputs: list[torch.Tensor], mine: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({tuple(output.shape) for output in outputs}) == 1:
            return all_gather(outputs, mine, group=group, async_op=async_op)
        if async_op:
            raise NotImplementedError("all_gather of unequal parts on gloo: async_op is not supported")
        rows = max(output.shape[0] for output in outputs)
        padded = [mine.new_empty((rows, *mine.shape[1:])) for _ in outputs]
        own = mine.new_zeros((rows, *mine.shape[1:]))
        own[: mine.shape[0]] = mine
        all_gather(padded, own, group=group)
        for output, part in zip(outputs, padded, strict=True):
            output.copy_(part[: output.shape[0]])
        return None

    def contiguous_scatter(output: torch.Tensor, parts: list[torch.Tensor] | None = None, *a: Any, **k: Any) -> Any:
        parts = k.pop("scatter_list", parts)
        return scatter(output, [part.contiguous() for part in parts] if parts else None, *a, **k)

    replace(dist, "all_gather", gather)
    replace(dist, "scatter", contiguous_scatter)
    replace(dist, "barrier", lambda group=None, async_op=False, device_ids=None: barrier(group, async_op))
