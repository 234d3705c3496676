"""The time of a refresh, on which its ranks agree."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from specactor.trainer.distillation.budget import may_start

Clock = Callable[[], float]
"""Seconds."""


class Watch:
    """Of one refresh, from when it is made: whether it is over, by the clock of any of its ranks."""

    def __init__(
        self,
        clock: Clock,
        limit_s: float,
        expected_s: float,
        group: dist.ProcessGroup | None,
        device: torch.device,
        called: Callable[[], bool] | None = None,
    ) -> None:
        """Args: expected time of the first micro-batch; ranks that learn together (None: one); for a rank that learns
        alone, though there are others, whether they wait for it."""
        self.group, self.alone = group, called is not None
        self.ranks, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        self._clock, self._limit_s, self._called, self._device = clock, limit_s, called, device
        self._start_s, self._longest_s, self._began_s = clock(), expected_s, 0.0
        self.total_s = 0.0
        """Of all micro-batches."""

    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    def over(self, micro_steps: int = 1) -> bool:
        """Whether the next micro-batches, each as long as the longest so far, would not end in time on some rank, or
        those who wait have called."""
        in_time = may_start(self.elapsed_s(), micro_steps * self._longest_s, self._limit_s)
        return self.agreed(not in_time or (self._called is not None and self._called()))

    def reserve(self, seconds: float) -> None:
        """For what comes after the last micro-batch."""
        self._limit_s -= seconds

    def agreed(self, here: bool) -> bool:
        """Whether it is so on some rank. Collective."""
        if self.group is None:
            return here
        flag = torch.tensor([int(here)], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def timed(self) -> Watch:
        return self

    def __enter__(self) -> None:
        self._began_s = self._clock()

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # or only the launches would be timed
        took_s = self._clock() - self._began_s
        self._longest_s = max(self._longest_s, took_s)
        self.total_s += took_s
