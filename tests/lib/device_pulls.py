"""Script: a trainer and an engine on one pretended GPU, in two processes with a fake CUDA. Prints JSON.

python -m tests.lib.device_pulls SIMULATED FAKE
python -m tests.lib.device_pulls SIMULATED FAKE engine: it answers rank calls from its standard input.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from specactor.config import WeightsSyncConfig
from specactor.errors import WeightSyncError
from specactor.weights_sync import cuda_ipc, memory, pulls
from specactor.weights_sync.memory import SharedCopy
from specactor.weights_sync.messages import CHECK, COMMIT, LOAD, PLAN, PULL, Holding
from specactor.weights_sync.plan import Held, held, index
from specactor.weights_sync.receiver import Receiver
from specactor.weights_sync.sender import WeightSender
from tests.lib.device_faults import WRONG, no_uuid, nowhere, spoiled, too_large
from tests.lib.fake_cuda import VISIBLE, FakeCuda, world
from tests.lib.simulated_cuda import Mode
from tests.weights_sync.hosts_job import Rank
from tests.weights_sync.test_pull_faults import Alone

A, B, C = (48, 64), (40, 64), (24, 64)
"""Shapes of the trainer's tensors, float32."""
NUMBER = 1
"""Of the GPU as the trainer sees it, which is number 0 to the engine."""
PLACES = {"a": (0, 512), "b": (0, 512 + 4 * 48 * 64), "c": (1, 0)}
"""(allocation, first byte in it)"""


class Model:
    """Of the engine: one parameter is the trainer's `a`, transposed, the other its `b` and `c` together."""

    def __init__(self) -> None:
        self.a = torch.zeros(A[1], A[0], device="cuda:0")
        self.bc = torch.zeros(B[0] + C[0], 64, device="cuda:0")

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter((self.a, self.bc))

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter({"a": self.a, "bc": self.bc}.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            {"a": self.a, "b": self.bc[: B[0]], "c": self.bc[B[0] :]}[name].copy_(tensor)


class OnlyC(Model):
    """Of an engine that takes one of the trainer's tensors, the last."""

    def __init__(self) -> None:
        self.c = torch.zeros(C, device="cuda:0")

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter((self.c,))

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter({"c": self.c}.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "c":
                self.c.copy_(tensor)


class Served:
    """An engine rank; the process has one after the other."""

    def __init__(self, made: FakeCuda, payload: bytes = b"[]") -> None:
        """Args: payload: the GPUs that it sees, and which wrong version it is, or which fault it has."""
        visible, wrong, only_c = msgspec.json.decode(payload) or ("", "", False)
        os.environ[VISIBLE] = visible
        self.made, self._stack = made, ExitStack()
        if wrong in WRONG:
            self._stack.enter_context(patch.object(*WRONG[wrong]))
        nothing = {"begin_weight_update": lambda: None, "end_weight_update": lambda: None, "flush_cache": lambda: None}
        self.rank: Any = SimpleNamespace(model=OnlyC() if only_c else Model(), tp_rank=0, **nothing)
        made.locked.clear()  # of the engine before, whose memory is gone
        self._own = Receiver()
        self._before = made.counts()

    def answer(self, name: str, payload: bytes) -> bytes:
        own = self._own
        calls = {CHECK: own.check, LOAD: own.load, COMMIT: own.commit, PLAN: own.plan, PULL: own.pull}
        if name in calls:
            return calls[name](self.rank, payload)
        if name == "end":
            del own, calls, self._own
            gc.collect()
            self._stack.close()
        if name == "values":
            found: Any = [tensor.cpu().flatten().tolist() for tensor in self.rank.model.parameters()]
        elif name == "locked":
            found = sum(self.made.locked.values())
        elif name == "ordinals":
            found = refused_ordinals(self.made, payload)
        else:
            found = [now - before for now, before in zip(self.made.counts(), self._before, strict=True)]
        return msgspec.json.encode(found)


def serve(library: Path, fake: Path) -> None:
    """Answer rank calls; "begin" is for a new engine."""
    read, write = sys.stdin.buffer, sys.stdout.buffer
    with ExitStack() as stack:
        made = world(library, fake, stack)
        own = Served(made)
        while header := read.read(8):
            name, payload = (read.read(length) for length in struct.unpack("<II", header))
            if name == b"begin":
                own, reply = Served(made, payload), b"0"
            else:
                reply = own.answer(name.decode(), payload)
            write.write(struct.pack("<I", len(reply)) + reply)
            write.flush()


def refused_ordinals(made: FakeCuda, handle: bytes) -> list[Any]:
    """What opening on GPUs that this process does not see says; then the current device, and what nobody asked for."""
    found: list[Any] = []
    for device in (1, -1):
        try:
            made.open(handle, device)
        except WeightSyncError as error:
            found.append(str(error))
    current = ctypes.c_int(7)
    made.library.cudaGetDevice(ctypes.byref(current))
    return [*found, current.value, made.counts()[3]]


class Engine:
    """The trainer's end of the engine's process."""

    index = 0

    def __init__(self, library: Path, fake: Path) -> None:
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, str(library), str(fake), "engine"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.killed, self.after_check = False, list[list[int]]()

    def rank_call(self, name: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(struct.pack("<II", len(name), len(payload)) + name.encode() + payload)
        self._process.stdin.flush()
        (length,) = struct.unpack("<I", self._process.stdout.read(4))
        reply = self._process.stdout.read(length)
        if name == CHECK:
            self.after_check.append(self.ask("counts")[1:3])
        return [reply]

    def ask(self, name: str, payload: bytes = b"") -> Any:
        return msgspec.json.decode(self.rank_call(name, payload, timeout_s=60)[0])

    def begin(self, visible: str, wrong: str, *, only_c: bool = False) -> None:
        """Be a new engine."""
        self.killed, self.after_check = False, []
        self.ask("begin", msgspec.json.encode((visible, wrong, only_c)))

    @property
    def alive(self) -> bool:
        return not self.killed

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self._process.communicate(timeout=60)


_alone = threading.Lock()
"""The pretended devices know one list of copies that are due, and nothing of threads."""


class Source:
    """Tensors that are parts of two allocations."""

    hosts: tuple[int, ...] = (0,)

    def __init__(self, made: FakeCuda, call: str = "cudaMalloc", *, number: int = NUMBER, gives: str = "abc") -> None:
        """Args: number: of the GPU; gives: what no equal rank hands over to the host."""
        self.made, self._number, self._gives = made, number, gives
        self.pointers = [made.allocate(2**16, call, number), made.allocate(2**14, call, number)]
        self.tensors = {name: self._at(*PLACES[name], shape) for name, shape in (("a", A), ("b", B), ("c", C))}
        self.set(1)
        self._holding: Holding | None = None
        self.on_device: SharedCopy = None  # type: ignore[assignment]

    def _at(self, allocation: int, offset: int, shape: tuple[int, int]) -> torch.Tensor:
        raw = self.made.tensor(self.pointers[allocation], (2**16, 2**14)[allocation], self._number)
        return raw[offset : offset + 4 * shape[0] * shape[1]].view(torch.float32).view(shape)

    def set(self, version: int) -> None:
        with _alone:
            for number, tensor in enumerate(self.tensors.values()):
                tensor.copy_(torch.arange(tensor.numel()).float().view(tensor.shape) * version + number)

    def expected(self) -> list[list[float]]:
        with _alone:
            a, b, c = (tensor.cpu() for tensor in self.tensors.values())
        return [a.t().flatten().tolist(), torch.cat([b, c]).flatten().tolist(), c.flatten().tolist()]

    def make_anew(self, *, in_place: bool = False) -> None:
        """Free the first allocation, and have its tensors in another, which may begin where it began."""
        old = ctypes.c_void_p(self.pointers[0])
        if in_place:
            assert self.made.library.cudaFree(old) == 0
            self.made.library.fake_place(old)
        self.pointers[0] = self.made.allocate(2**16, "cudaMalloc", self._number)
        self.tensors |= {name: self._at(0, PLACES[name][1], shape) for name, shape in (("a", A), ("b", B))}
        self.on_device._tensors[:] = self.tensors.values()
        assert (self.pointers[0] == old.value) == in_place
        assert in_place or self.made.library.cudaFree(old) == 0

    def rounds(self, capacity_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        a, b, c = self.tensors.values()
        yield [pair for pair in (("a", a.t()), ("b", b), ("c", c)) if pair[0] in self._gives]

    def held(self, capacity_bytes: int) -> Holding:
        if self._holding is None or self.on_device.moved():
            given = {name: tensor for name, tensor in self.tensors.items() if name in self._gives}
            equal = {name: tensor for name, tensor in self.tensors.items() if name not in given}
            self.on_device = SharedCopy([*given.values()], [*equal.values()])
            tensors = []
            for (name, tensor), start in zip(given.items(), self.on_device.starts, strict=False):
                numbers = torch.arange(tensor.numel()).view(tensor.shape)
                in_order = (numbers.t() if name == "a" else numbers).flatten().numpy()
                blocks = held(index([in_order]), range(tensor.numel()), memory=0, at=start, item_bytes=4)
                tensors.append(Held(name, tensor.nbytes, blocks))
            places = dict(zip(given | equal, self.on_device.starts, strict=False))
            self._holding = Holding(
                addresses=(self.on_device.address(),),
                tensors=tuple(tensors),
                places=places,
                refusals=self.on_device.refusals,
            )
        with _alone:
            self.on_device.refresh()
        return self._holding


def pushes(source: Source, engine: Engine, change: dict[int, Callable[[], None]]) -> dict[str, Any]:
    """What came of six pushes, or of as many as went well; before one of them something may change."""
    sender, found = WeightSender(WeightsSyncConfig(), Alone()), dict[str, Any]()  # type: ignore[arg-type]
    for name in ("right", "rounds", "opened, closed", "reasons", "notes"):
        found[name] = []
    for version in range(1, 7):
        change.get(version, lambda: None)()
        source.set(version)
        try:
            report = sender.push(source, [engine], version=version)  # type: ignore[list-item]
        except WeightSyncError as error:
            found["error"] = str(error)
            break
        values, expected = engine.ask("values"), source.expected()
        found["right"].append(values == expected[:2] or values == expected[2:])
        found["rounds"].append(report.num_rounds)
        found["reasons"].append(report.through_host)
        found["notes"].append(report.note)
        found["opened, closed"].append(engine.ask("counts")[1:3])
    found["host bytes"] = int(source.on_device.buffer.data.ne(0).sum())
    found["locked"] = [sum(part.numel() for part in source.on_device.buffer._locked), engine.ask("locked")]
    found["after checks"] = engine.after_check
    found["killed"], found["errors left"] = engine.killed, source.made.counts()[3]
    sender.close()
    found["at the end"] = engine.ask("end")
    return found


def equal_ranks(made: FakeCuda, engine: Engine) -> dict[str, Any]:
    """Two ranks on two GPUs with equal tensors, of which each hands over some; the engine is on the second one's."""
    job: Any = SimpleNamespace(met=threading.Barrier(2), box=[b""] * 2, longest_s=60.0)
    sources = [Source(made, number=0, gives="ab"), Source(made, number=1, gives="c")]
    reports: list[list[Any]] = [[], []]

    def one(rank: int) -> None:
        sources[rank].hosts = (0, 0)
        sender = WeightSender(WeightsSyncConfig(), Rank(job, rank))  # type: ignore[arg-type]
        with Mode():  # type: ignore[no-untyped-call]
            for version in range(1, 4):
                sources[rank].set(version)
                report = sender.push(sources[rank], [engine] * rank, version=version)  # type: ignore[list-item]
                right = engine.ask("values") == sources[rank].expected()[:2] if rank else True
                reports[rank].append([right, report.num_rounds, report.through_host])
        sender.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    host = [int(source.on_device.buffer.data.ne(0).sum()) for source in sources]
    return {"reports": reports, "host bytes": host, "at the end": engine.ask("end")}


def main(library: Path, fake: Path) -> None:
    os.environ[VISIBLE] = "5,2"
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        made = world(library, fake, stack)
        engine = stack.enter_context(closing(Engine(library, fake)))

        def run(
            name: str,
            *,
            visible: str = "2",
            call: str = "cudaMalloc",
            anew: bool | None = None,
            only_c: bool = False,
        ) -> None:
            """Args: anew: whether in its place; None: not at all."""
            source = Source(made, call)
            made.locked.clear()
            engine.begin(visible, name, only_c=only_c)
            change = {} if anew is None else {4: partial(source.make_anew, in_place=anew)}
            found[name] = pushes(source, engine, change)

        run("same GPU")
        for name in ("another GPU", "no lock"):
            run(name, visible="7")
        for name in ("one tensor", "all locked"):
            run(name, visible="7", only_c=True)
        with patch.object(pulls, "room_bytes", lambda local_ranks: 4 * (48 + 40 + 24) * 64 - 1):
            run("no room", visible="7")
            run("same GPU, no room")
            run("one tensor, no room for all", visible="7", only_c=True)
        run("mapped", call="fake_map")
        run("mapped, another GPU", call="fake_map", visible="7")
        run("no UUID")
        run("refused")
        with patch.object(cuda_ipc, "gpu_uuid", no_uuid):
            run("no UUID of the trainer")
        source = Source(made)
        engine.begin("2", "lost")
        with ExitStack() as lost:
            later = {4: lambda: lost.enter_context(patch.object(FakeCuda, "allocation", nowhere))}
            found["lost"] = pushes(source, engine, later)
        for name in ("made anew", "nothing closed", "closed late"):
            run(name, anew=False)
        run("made anew in its place", anew=True)
        run("offset ignored")
        with patch.object(SharedCopy, "moved", lambda self: False):
            run("not looked at", anew=False)
        with patch.object(FakeCuda, "generation", lambda self, base: 0):
            run("generation ignored", anew=True)
        right = cuda_ipc.exported
        for name, change in {"does not open": spoiled, "too small": too_large}.items():
            with patch.object(memory, "exported", lambda *given, change=change: change(right(*given))):
                run(name)
        for name, visible in {"equal ranks": "2", "equal ranks, another GPU": "7"}.items():
            engine.begin(visible, name)
            found[name] = equal_ranks(made, engine)
        source = Source(made)
        source.held(0)
        assert source.on_device.gpu is not None
        engine.begin("2", "")
        found["ordinals"] = engine.ask("ordinals", source.on_device.gpu.handles[0])
    print(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        serve(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
