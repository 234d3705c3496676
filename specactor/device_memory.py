"""Who has the memory of shared GPUs: engines while they generate, the trainer while it learns. Engines span ranks'
devices, so hand-overs are collective: nobody takes before all have given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specactor.parallel.collective import Collective
from specactor.parallel.devices import return_unused

if TYPE_CHECKING:
    from specactor.rollout.pool import EnginePool
    from specactor.trainer.policy import PolicyTrainer


class DeviceMemory:
    """This rank's engines and trainer, which hand memory over on the same GPUs (`is_shared`). All methods are
    collective."""

    def __init__(self, collective: Collective, engines: EnginePool, *, is_shared: bool) -> None:
        self._collective, self._engines, self._is_shared = collective, engines, is_shared
        self.used_bytes: dict[str, int] = {}
        """Of the GPU at the end of each phase of `planning.memory`, with what torch keeps: nearly the most of it."""

    def _ended(self, phase: str) -> None:
        if self._is_shared:
            self.used_bytes[phase] = in_use()

    def start(
        self, make: Callable[[], PolicyTrainer], *, others: Sequence[tuple[str, Callable[[], None]]] = ()
    ) -> PolicyTrainer:
        """Wait for `others` (name, wait) and engines; return the trainer that `make` makes. It has the memory until
        `to_weights`."""
        trainer = make() if not self._is_shared else None
        for name, wait in (*others, ("engine start", self._engines.wait_ready)):
            self._collective.together(name, wait)
        if trainer is None:
            self._collective.together("release", self._engines.release_memory)
            trainer = make()
        return trainer

    def to_trainer(self, trainer: PolicyTrainer) -> None:
        """Release all of the engines' memory, and bring gradients and optimizer back."""
        self._ended("rollout")
        self._collective.together("release", self._engines.release_memory)
        trainer.reload()

    def to_weights(self, trainer: PolicyTrainer) -> None:
        """Offload gradients and optimizer, and give engines memory for weights, undefined until they are sent."""
        self._ended("train")
        trainer.offload()
        return_unused()
        self._collective.barrier()
        self._collective.together("resume", self._engines.resume_weights)

    def to_engines(self) -> None:
        """Give engines the rest; the trainer's parameters stay, for engines that die."""
        self._ended("sync")
        return_unused()
        self._collective.barrier()
        self._collective.together("resume", self._engines.resume_memory)


def in_use() -> int:
    """Return the bytes of the current GPU that are taken, by whatever process."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


_AS_ASKED = "pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"


def pin_as_asked() -> None:
    """Have PyTorch pin for each tensor what it takes, and give back what none has any more."""
    # It would round up to powers of two, a third more for an expert of 12 MB, and keep what a tensor had, such as a
    # copy of all weights from which `train.optimizer_state host` makes the main ones.
    known = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: _AS_ASKED)()
    if _AS_ASKED not in known:
        with suppress(RuntimeError, ValueError):  # of a version without these settings
            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (known, _AS_ASKED))))


class HostCopies:
    """Main weights and moments stay in pinned host memory: pinning is slow."""

    def __init__(self) -> None:
        self._hosts: dict[tuple[int, str], Tensor] = {}

    def offload(self, optimizers: Sequence[Any], modules: Sequence[torch.nn.Module] = ()) -> None:
        """Move what optimizers have, and buffers of modules."""
        hosts = {}
        for key, tensor, put in _tensors(optimizers, modules):
            if tensor.device.type == "cuda":
                host = self._hosts.get(key)
                if host is None:
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                put(host)
                hosts[key] = host
        self._hosts = hosts
        torch.cuda.synchronize()  # until then nobody may read the copies

    def reload(self, optimizers: Sequence[Any], device: torch.device, modules: Sequence[torch.nn.Module] = ()) -> None:
        for key, _, put in _tensors(optimizers, modules):
            if key in self._hosts:
                put(self._hosts[key].to(device, non_blocking=True))
        torch.cuda.synchronize()  # until then nobody may write the copies


def _tensors(
    optimizers: Sequence[Any], modules: Sequence[torch.nn.Module]
) -> Iterator[tuple[tuple[int, str], Tensor, Callable[[Tensor], None]]]:
    """Yield a key, the tensor, and a function that replaces it."""
    for part in (part for module in modules for part in module.modules()):
        for name, buffer in part.named_buffers(recurse=False):
            yield (id(part), name), buffer, partial(setattr, part, name)
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.data.dtype == torch.float32:  # one of bfloat16 is a view of the model's own, which stays
                yield (id(parameter), "weight"), parameter.data, partial(setattr, parameter, "data")
            state = optimizer.state.get(parameter, {})
            for name, value in [*state.items()]:
                if isinstance(value, Tensor):
                    yield (id(parameter), name), value, partial(state.__setitem__, name)
