"""What all ranks do together: exchange values, run a phase, fail.

Invariants: every exchange is bounded by the process group's timeout; a rank that is merely busy keeps the others
alive by joining a heartbeat; when one rank fails in a phase, every rank leaves that phase with an error; only typed
msgspec bytes travel, nothing is unpickled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import GenericAlias
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from specactor.errors import PeerFailedError

T = TypeVar("T")

HEARTBEAT_S = 5.0
"""A rank that is busy in `Collective.together` joins an exchange at least this often."""

_RUNNING, _DONE, _FAILED = 0, 1, 2


class Collective:
    """Exchanges over all trainer ranks. `device` is where the backend wants its tensors (cpu for gloo)."""

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._device = device

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank, on every rank."""
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64, device=self._device))
        lengths = [int(size) for size in sizes]
        room = max(1, *lengths)
        mine = torch.zeros(room, dtype=torch.uint8, device=self._device)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return [bytes(part[:n].cpu().numpy()) for part, n in zip(parts, lengths, strict=True)]

    def gather(self, value: T, kind: type[T] | GenericAlias) -> list[T]:
        """Every rank's value of type `kind`, by rank, on every rank. Raises msgspec.ValidationError on foreign data."""
        decoder = msgspec.msgpack.Decoder(kind)
        return [decoder.decode(part) for part in self.gather_bytes(msgspec.msgpack.encode(value))]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        total = torch.tensor([int(flag)], dtype=torch.int64, device=self._device)
        dist.all_reduce(total)
        return bool(total.item())

    def barrier(self) -> None:
        self.any(False)

    def together(self, phase: str, work: Callable[[], T]) -> T:
        """Run `work`, which uses no collective, on every rank; return this rank's result when all are done.

        A rank whose work is long joins an exchange every `HEARTBEAT_S`, so nobody runs into the group's timeout, and
        a rank that dies is noticed at once. Where work fails, its own error is raised there, and PeerFailedError,
        which names the rank and the cause, on the others.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                results.append(work())
            except BaseException as error:  # handed to the caller's thread, which raises it
                errors.append(error)

        worker = threading.Thread(target=call, name=phase, daemon=True)
        worker.start()
        while True:
            worker.join(HEARTBEAT_S)
            state = _RUNNING if worker.is_alive() else _FAILED if errors else _DONE
            states = self._gather_states(state)
            if any(s == _FAILED for s in states):
                break
            if all(s == _DONE for s in states):
                return results[0]
        causes = self.gather(f"{type(errors[0]).__name__}: {errors[0]}" if errors else "", str)
        if errors:
            raise errors[0]
        rank = next(i for i, cause in enumerate(causes) if cause)
        raise PeerFailedError(f"{phase}: rank {rank} failed: {causes[rank]}")

    def _gather_states(self, state: int) -> list[int]:
        parts = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.world)]
        dist.all_gather(parts, torch.tensor([state], dtype=torch.int64, device=self._device))
        return [int(part) for part in parts]
