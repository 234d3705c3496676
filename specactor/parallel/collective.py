"""What all ranks do together.

Invariants: the process group's timeout bounds every exchange; a busy rank keeps the others alive by a heartbeat; when
one rank fails in a phase, all leave it with an error; no exchange touches a GPU.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from types import GenericAlias
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from specactor.config import ParallelConfig
from specactor.errors import ConfigError, PeerFailedError
from specactor.parallel.layout import Layout, own_device
from specactor.parallel.seals import TAG_BYTES, Seals, job_key
from specactor.waits import LATE_S, LOOK_EVERY_S, RETRY_PAUSE_S, SIGN_OF_LIFE_S

T = TypeVar("T")

SEE_S = 90.0  # longest wait for what another host has made: NFS keeps what it saw of a folder for up to a minute

_MESSAGE_BYTES = 2**24  # each message is waited for with the group's bound
_RUNNING, _DONE, _FAILED = 0, 1, 2


# Nothing else may refer to a group: one that is still there when the process ends aborts it in gloo's threads.
_control: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # the gloo group beside the job's default one
_sealed: dict[dist.ProcessGroup, Seals] = {}  # by the job's default group


def control_group(timeout_s: float | None = None) -> dist.ProcessGroup | None:
    """Return all ranks' gloo group, or None if it is the default one; all make it at the first call. `timeout_s` bounds
    an exchange (None: torch's). NCCL would spin on engines' GPUs, and notice a dead rank only after its timeout."""
    if dist.get_backend() == "gloo":
        return None
    default = dist.group.WORLD
    assert default is not None, "torch.distributed is not initialised"
    if default not in _control:
        timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        _control[default] = dist.new_group(backend="gloo", timeout=timeout)
    return _control[default]


def leave() -> None:
    _control.clear()
    _sealed.clear()
    dist.destroy_process_group()


def init_groups(
    layout: Layout, parallel: ParallelConfig, *, seed: int, local_rank: int, store: Store | None = None
) -> torch.device:
    """Set up groups and seeds of a rank that torchrun started; return its device. Collective. `local_rank` numbers its
    launcher's ranks, and GPUs. Ranks meet in `store`, by default the launcher's, which must be new."""
    from specactor.cpu import megatron as cpu_platform

    cpu_platform.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    gpu = torch.cuda.is_available()
    # a wrong number is refused before anything waits for the other ranks.
    device = torch.device("cuda", own_device(local_rank, torch.cuda.device_count())) if gpu else torch.device("cpu")
    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=parallel.timeout_s)
        if store is not None:
            store.set_timeout(timeout)
        # torch wants both numbers with a store, and neither without
        rank, world = (int(os.environ["RANK"]), layout.world) if store is not None else (-1, -1)
        dist.init_process_group("nccl" if gpu else "gloo", timeout=timeout, store=store, rank=rank, world_size=world)
    control_group(parallel.timeout_s)
    if gpu:
        torch.cuda.set_device(device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=max(1, round(parallel.timeout_s / 60)),
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return device


def destroy_groups(*, keep_process_group: bool = False) -> None:
    """Leave all groups; with `keep_process_group` processes can set up another layout."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if not keep_process_group and dist.is_initialized():
        leave()


def ends_with_peers() -> bool:
    """Return whether this process is in groups that it leaves only together with other ranks: NCCL's."""
    return dist.is_initialized() and dist.get_backend() != "gloo"


def end_in_groups(code: object) -> None:
    """End this process at once if it is still in such groups, since their destructors would wait as well. `code` is
    that of a SystemExit, which may be a text."""
    if ends_with_peers():
        status = code if isinstance(code, int) else int(code is not None)
        if not (code is None or isinstance(code, int)):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def all_come(store: Store, name: str, ranks: int, *, within_s: float = LATE_S) -> bool:
    """Return whether so many ranks call this with a name, new to each, in about that time: who has failed knows so
    whether all have."""
    deadline, come = time.monotonic() + within_s, store.add(name, 1)
    while come < ranks and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
        come = store.add(name, 0)
    return come >= ranks


class Collective:
    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        control_group()

    @property
    def store(self) -> Store:
        """Return where ranks tell each other without waiting."""
        found: Store = dist.distributed_c10d._get_default_store()
        return found

    def gather_bytes(self, payload: bytes, *, only_first: bool = False) -> list[bytes]:
        """Return every rank's payload; with `only_first` on rank 0 alone."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64), group=control_group())
        lengths = [int(size) for size in sizes]
        room = max(1, *lengths)
        mine = torch.zeros(room, dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
        parts = [] if only_first and self.rank else [torch.empty_like(mine) for _ in range(self.world)]
        if only_first:
            dist.gather(mine, parts or None, group=control_group())
        else:
            dist.all_gather(parts, mine, group=control_group())
        return [bytes(part[:n].numpy()) for part, n in zip(parts, lengths, strict=False)]

    def gather(self, value: T, kind: type[T] | GenericAlias, *, only_first: bool = False) -> list[T]:
        """Return every rank's value, by rank. Raises msgspec.ValidationError on foreign data."""
        decoder, own = msgspec.msgpack.Decoder(kind), msgspec.msgpack.encode(value)
        return [decoder.decode(part) for part in self.gather_bytes(own, only_first=only_first)]

    def pass_bytes(
        self, outgoing: Iterable[tuple[torch.Tensor, int]], incoming: Iterable[tuple[torch.Tensor, int]]
    ) -> None:
        """Exchange tensors with ranks, without copies and in order. Collective at its first call, if the job has a key;
        then raises PeerFailedError for what was not sent by a rank with that key. Tensors are uint8 [N] on the host,
        each with its peer."""
        group, seals = control_group(), self._seals()
        coming = [(part, rank) for data, rank in incoming for part in _messages(data)]
        going = [(part, rank) for data, rank in outgoing for part in _messages(data)]
        # Each message is followed by its seal, which is made, and checked, while others are on their way.
        made = [seals.tag(part, rank) if seals is not None else None for part, rank in going]
        arriving = []
        for part, rank in coming:
            tag = None if seals is None else torch.empty(TAG_BYTES, dtype=torch.uint8)
            works = [dist.irecv(each, rank, group=group) for each in (part, tag) if each is not None]
            arriving.append((part, tag, rank, works))
        sent = []
        for (part, rank), sealed in zip(going, made, strict=True):
            sent.append(dist.isend(part, rank, group=group))
            if sealed is not None:
                sent.append(dist.isend(sealed.result(), rank, group=group))
        checked = []
        for part, tag, rank, works in arriving:
            _wait(works)
            if seals is not None and tag is not None:
                checked.append(seals.check(part, tag, rank))
        _wait(sent)
        for check in checked:
            check.result()

    def _seals(self) -> Seals | None:
        """Return None where the job has no key."""
        default, key = dist.group.WORLD, job_key()
        assert default is not None
        if key and default not in _sealed:
            _sealed[default] = Seals(key, self.rank, self.gather_bytes(os.urandom(16)))
        return _sealed[default] if key else None

    def any(self, flag: bool) -> bool:
        total = torch.tensor([int(flag)], dtype=torch.int64)
        dist.all_reduce(total, group=control_group())
        return bool(total.item())

    def barrier(self) -> None:
        self.any(False)

    def together(self, phase: str, work: Callable[[], T]) -> T:
        """Run `work`, which uses no collective, on every rank; return this rank's result when all are done. Busy ranks
        join an exchange every `SIGN_OF_LIFE_S`. An error is raised on its rank, and on others PeerFailedError that
        names rank and cause."""
        own = _in_thread(phase, work)
        while True:
            wait([own], SIGN_OF_LIFE_S)
            state = _RUNNING if not own.done() else _FAILED if own.exception() is not None else _DONE
            states = self.gather(state, int)
            if _FAILED in states:
                self._fail(phase, own)
            if all(state == _DONE for state in states):
                return own.result()

    def path_of_first(self, phase: str, choose: Callable[[], Path | None]) -> Path | None:
        """Return what rank 0 alone chooses, when every rank sees it: a host may know a folder as it was a minute ago.
        Raises ConfigError where a rank does not see it."""
        own = self.together(phase, lambda: str(choose() or "") if self.rank == 0 else "")
        chosen = self.gather(own, str)[0]
        if not chosen:
            return None
        path = Path(chosen)
        self.together(phase, lambda: _see(path, self.rank))
        return path

    def _fail(self, phase: str, own: Future[T]) -> NoReturn:
        error = own.exception() if own.done() else None
        causes = self.gather("" if error is None else f"{type(error).__name__}: {error}", str)
        if error is not None:
            raise error
        rank = next(i for i, cause in enumerate(causes) if cause)
        raise PeerFailedError(f"{phase}: rank {rank} failed: {causes[rank]}")


def _see(path: Path, rank: int) -> None:
    deadline = time.monotonic() + SEE_S
    while not os.path.exists(path):  # False also where NFS has lost its handle
        if time.monotonic() > deadline:
            raise ConfigError.at(
                str(path),
                f"nothing there on {socket.gethostname()} (rank {rank}) after {SEE_S:g} s",
                "what rank 0 sees there",
                "All hosts need the same file system at that path.",
            )
        time.sleep(RETRY_PAUSE_S)
        with suppress(OSError), os.scandir(path.parent):  # opened, it is asked for anew, and with it what is not there
            pass


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _messages(data: torch.Tensor) -> Iterator[torch.Tensor]:
    return (data[start : start + _MESSAGE_BYTES] for start in range(0, len(data), _MESSAGE_BYTES))


def _in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run the work in a daemon thread; an executor's would outlive the process."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised in the caller's thread
            future.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future
