"""Who has the memory of the devices: engines while they generate, the trainer while it learns.

Both are on the same GPUs, which do not hold both. An engine's devices are those of several ranks, so every hand-over is
collective: nobody takes before all have given.

    start        engines start alone, since SGLang takes a share of what is free when it looks, and release what they
                 took; then the trainer is made, and gives up what it needs for learning alone
    to_trainer   engines end what runs and release weights and caches; gradients and optimizer come back
    to_engines   gradients and optimizer leave; engines take their memory, with undefined weights until the next sync

Without GPUs memory is the host's and is not handed over: engines start while the trainer is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from specactor.parallel.collective import Collective
from specactor.parallel.devices import return_unused


class Trainer(Protocol):
    """What gives up memory, and takes it again."""

    def offload(self) -> None: ...

    def reload(self) -> None: ...


class Engines(Protocol):
    """Of one rank."""

    def wait_ready(self) -> None: ...

    def release_memory(self) -> None: ...

    def resume_memory(self) -> None: ...


TrainerT = TypeVar("TrainerT", bound=Trainer)


class DeviceMemory:
    """Of this rank's engines and trainer. All methods are collective."""

    def __init__(self, collective: Collective, engines: Engines, *, is_shared: bool) -> None:
        """`is_shared`: engines and trainer are on the same GPUs."""
        self._collective, self._engines, self._is_shared = collective, engines, is_shared

    def start(self, make: Callable[[], TrainerT], *, others: Sequence[tuple[str, Callable[[], None]]] = ()) -> TrainerT:
        """Wait until engines, and before them `others` (name, wait), are ready; return the trainer that `make` makes.
        Engines have the memory."""
        trainer = make() if not self._is_shared else None
        for name, wait in (*others, ("engine start", self._engines.wait_ready)):
            self._collective.together(name, wait)
        if trainer is None:
            self._collective.together("release", self._engines.release_memory)
            trainer = make()
            self.to_engines(trainer)
        return trainer

    def to_trainer(self, trainer: Trainer) -> None:
        """Let the trainer learn, or load a checkpoint; engines are idle, and have nothing."""
        self._collective.together("release", self._engines.release_memory)
        trainer.reload()

    def to_engines(self, trainer: Trainer) -> None:
        """Let engines generate, after a weight sync."""
        trainer.offload()
        return_unused()
        self._collective.barrier()
        self._collective.together("resume", self._engines.resume_memory)
