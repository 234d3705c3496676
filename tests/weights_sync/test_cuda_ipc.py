"""What CUDA refuses is said with a way out, and all is closed that can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specactor.errors import WeightSyncError
from specactor.weights_sync import cuda_ipc
from specactor.weights_sync.cuda_ipc import Allocations, Cuda, GpuMemory


class Runtime:
    """CUDA's, of which one call refuses."""

    def __init__(self, refusing: str, code: int) -> None:
        self._refusing, self._code = refusing, code
        self._calls: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            return b"it refuses" if name == "cudaGetErrorString" else self._code if name == self._refusing else 0

        return self._calls.setdefault(name, call)


@pytest.mark.parametrize(
    ("call", "code", "way_out"),
    [
        ("cudaIpcGetMemHandle", 1, "Take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"),
        ("cudaIpcGetMemHandle", 801, "CUDA's IPC is not available here"),
        ("cudaIpcOpenMemHandle", 1, "Run trainer and engines in one container"),
        ("cudaIpcOpenMemHandle", 801, "CUDA's IPC is not available here"),
        ("cudaIpcCloseMemHandle", 1, "Start the engine again"),
        ("cudaIpcCloseMemHandle", 801, "Start the engine again"),
    ],
)
def test_the_way_out_is_that_of_the_error(call: str, code: int, way_out: str) -> None:
    runtime: Any = Runtime(call, code)
    cuda = Cuda(runtime, runtime)
    does = {
        "cudaIpcGetMemHandle": lambda: cuda.handle(0),
        "cudaIpcOpenMemHandle": lambda: cuda.open(bytes(64), 0),
        "cudaIpcCloseMemHandle": lambda: cuda.close(0, 0),
    }
    with pytest.raises(WeightSyncError) as error:
        does[call]()
    assert str(error.value).startswith(f"{call}: it refuses ({code}). {way_out}")


def test_what_pytorch_refuses_to_take_is_an_error_of_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "as_tensor", refuse)
    with pytest.raises(WeightSyncError, match="CUDA error: out of memory"):
        Cuda.tensor(4096, 64, 0)


class Opened:
    """CUDA, which closes all but some, and has one handle that it does not open."""

    def __init__(self, stuck: tuple[int, ...] = ()) -> None:
        self.stuck, self.open_now = stuck, set[int]()

    def open(self, handle: bytes, device: int) -> int:
        if handle == b"\0":
            raise OSError("no such library")
        assert handle[0] not in self.open_now, "CUDA opens nothing twice"
        self.open_now.add(handle[0])
        return handle[0]

    def close(self, pointer: int, device: int) -> None:
        if pointer in self.stuck:
            raise WeightSyncError(f"{pointer} does not close")
        self.open_now.remove(pointer)

    def allocation(self, pointer: int) -> tuple[int, int]:
        return pointer, 0

    def tensor(self, pointer: int, num_bytes: int, device: int) -> torch.Tensor:
        return torch.empty(0)


def memory(*handles: int) -> dict[int, GpuMemory]:
    return {0: GpuMemory(uuid="GPU-0", handles=tuple(bytes([each]) for each in handles), parts=())}


def test_all_is_closed_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not close is not forgotten: it closes later, and nothing is opened meanwhile."""
    made = Opened(stuck=(1, 3))
    monkeypatch.setattr(cuda_ipc, "cuda", lambda: made)
    own = Allocations()
    own.open(memory(1, 2, 3, 4), 0)
    with pytest.raises(WeightSyncError, match="does not close"):
        own.close()
    assert made.open_now == {1, 3}
    for wanted in (memory(1, 3, 5), memory(6)):
        with pytest.raises(WeightSyncError, match="does not close"):
            own.open(wanted, 0)
    assert made.open_now == {1, 3}
    made.stuck = ()
    own.open(memory(6), 0)
    assert made.open_now == {6}
    own.close()
    assert made.open_now == set()


def test_what_was_opened_before_an_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the one that came first."""
    for stuck in ((), (2,)):
        made = Opened(stuck)
        monkeypatch.setattr(cuda_ipc, "cuda", lambda made=made: made)
        own = Allocations()
        with pytest.raises(OSError, match="no such library"):
            own.open(memory(1, 2, 0), 0)
        assert made.open_now == set(stuck)
        made.stuck = ()
        own.close()
