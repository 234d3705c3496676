"""Pretended GPUs with real values: a tensor that says cuda:N is computed on the CPU, at once.

Within `simulated`, as on GPUs:

- an operation on tensors of two devices raises, and so does one on a tensor whose storage was freed;
- reading a value on the host is a wait for the device, and is counted (`Waits.reads`); so is a copy to the device that
  blocks, and an index that the host holds, since either waits for all that was launched before;
- a copy to the host that does not block leaves poison in its target until the device was waited for;
- one to the device takes what its source holds when it is due: a source that was written before raises.

There is one stream. Use it in a process of its own: torch learns of the devices for good.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    import pytest

POISON = 0x5A
"""Every byte of it."""
_HOST_INDICES = ("aten::index.Tensor", "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")
"""Operations that take indices of the host for tensors of a device."""
_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")


def build(folders: pytest.TempPathFactory) -> Path:
    """Compile what makes torch take devices for there; ten seconds, once for the workers of a session."""
    folder = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    library, site = folder / "simulated_cuda.so", Path(torch.__file__).parent
    if library.exists():
        return library
    includes = [f"-I{site / 'include'}", f"-I{site / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    source = Path(__file__).with_suffix(".cpp")
    links = [f"-L{site / 'lib'}", "-lc10"]
    flags = ["-O0", "-fPIC", "-shared", "-std=c++20", abi, *includes]
    made = library.with_suffix(f".{os.getpid()}.so")
    subprocess.run(["c++", *flags, str(source), "-o", str(made), *links], check=True)
    return made.rename(library)  # another worker may have made it meanwhile


@dataclass
class Waits:
    """What the host waited for, and what is due when it waits next."""

    reads: list[str] = field(default_factory=list)
    to_host: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(target, what it will hold)."""
    to_device: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(source, what it held when the copy was asked for)."""

    def settle(self, *_: Any) -> None:
        """All that is due happens."""
        for target, value in self.to_host:
            target.copy_(value)
        changed = [source for source, value in self.to_device if not torch.equal(_bytes(source), _bytes(value))]
        self.to_host, self.to_device = [], []
        if changed:
            raise RuntimeError("a copy to the device was not waited for before its source was written")

    def read(self, what: str) -> None:
        self.reads.append(what)
        self.settle()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class Simulated(torch.Tensor):
    """A tensor of a pretended device; `inner` has its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> Simulated:
        made: Simulated = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Simulated({self.inner!r}, {self.device})"

    def tolist(self) -> Any:
        _waits.read("tolist")
        return self.inner.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of one thread: others enter it again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if _is_cuda(kwargs.get("device")) or any(isinstance(x, Simulated) for x in tree_leaves((args, kwargs))):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


_waits = Waits()


@contextmanager
def simulated(library: Path) -> Iterator[Waits]:
    """Args: library: from `build`."""
    global _waits
    ctypes.CDLL(str(library))
    _waits = Waits()
    cuda = {"_lazy_init": lambda: None, "synchronize": lambda *_: _waits.settle(), "current_device": lambda: 0}
    with patch.multiple(torch.cuda, **cuda), Mode():  # type: ignore[no-untyped-call]
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield _waits
        finally:
            torch._C._set_only_lift_cpu_tensors(False)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _numbered(device: Any) -> torch.device:
    return torch.device("cuda", torch.device(device).index or 0)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, wanted = func._schema.name, kwargs.get("device")
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    devices = {x.device for x in leaves if isinstance(x, Simulated)}
    with_host = any(not isinstance(x, Simulated) and x.dim() > 0 for x in leaves)
    own = next(iter(devices), torch.device("cpu"))
    if any(x.numel() and not x.inner.untyped_storage().nbytes() for x in leaves if isinstance(x, Simulated)):
        raise RuntimeError(f"{name}: memory that was freed")
    later = _is_later(name, args, kwargs)
    if name == "aten::_to_copy":
        target = own if wanted is None else _numbered(wanted) if _is_cuda(wanted) else torch.device("cpu")
    elif name == "aten::copy_":
        target = args[0].device
    elif name in _READS:
        _waits.read(name)
        target = own
    elif _is_cuda(wanted):
        target = _numbered(wanted)
    else:
        if len(devices) > 1 or (devices and with_host and name not in _HOST_INDICES):
            raise RuntimeError(f"{name}: tensors on {sorted(map(str, devices))}{' and the host' * with_host}")
        target = torch.device(wanted) if wanted is not None else own
    if devices and target.type == "cpu" and name in ("aten::_to_copy", "aten::copy_") and not later:
        _waits.read(f"{name} to the host")
    elif target.type == "cuda" and not later and with_host:
        _waits.read(f"{name} to the device")
    return _wrapped(func, args, kwargs, target, later=later)


def _is_later(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it is a copy that does not block."""
    if name == "aten::copy_":
        return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    return name == "aten::_to_copy" and bool(kwargs.get("non_blocking", False))


def _wrapped(func: Any, args: Any, kwargs: dict[str, Any], target: torch.device, *, later: bool) -> Any:
    plain_args, plain = tree_map(lambda x: x.inner if isinstance(x, Simulated) else x, (args, kwargs))
    if _is_cuda(plain.get("device")):
        plain["device"] = torch.device("cpu")
    written = any(r.alias_info and r.alias_info.is_write for r in func._schema.returns)
    writes = written or func._schema.name.endswith("_")
    result = func(*plain_args, **plain)
    if later:
        source = args[1] if func._schema.name == "aten::copy_" else args[0]
        if target.type == "cpu":
            _waits.to_host.append((result, result.clone()))
            _bytes(result).fill_(POISON)
        elif not isinstance(source, Simulated):
            _waits.to_device.append((source, source.clone()))
    if target.type != "cuda":
        return result
    if writes and isinstance(args[0], Simulated):
        return args[0]
    return tree_map(
        lambda x: Simulated(x, target) if isinstance(x, torch.Tensor) and not isinstance(x, Simulated) else x, result
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]))
