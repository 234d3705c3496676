"""How gradients become weights: PyTorch's DDP and AdamW, or DeepSpeed ZeRO. Both average over ranks and clip the global
norm.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from specactor.config import DistillationConfig
from specactor.device_memory import HostCopies
from specactor.errors import CheckpointError, ConfigError, SpecActorError

ADAM_BETAS = (0.9, 0.98)  # of AdamW; a shorter memory than usual, since the policy that is followed moves on
GRAD_CLIP = 1.0  # largest global norm of a gradient


def diverged(what: str, value: float) -> SpecActorError:
    return SpecActorError(
        f"draft model: got a {what} of {value}, expected a finite number. Lower distillation.learning_rate, or start "
        "the draft model anew with specactor drafter init."
    )


class PlainUpdater:
    """DistributedDataParallel over `group`."""

    def __init__(self, model: nn.Module, config: DistillationConfig, group: dist.ProcessGroup | None) -> None:
        self._model, self._group = model, group
        self.device = next(model.parameters()).device
        self._copies = HostCopies()
        self._replica: nn.Module | None = None
        self._parameters = dict(model.named_parameters())
        self._adam = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=config.learning_rate,
            betas=ADAM_BETAS,
            weight_decay=0.0,
        )
        self._make_replica(init_sync=True)

    @property
    def replica(self) -> nn.Module:
        """Return what forward passes call for gradients to be reduced."""
        assert self._replica is not None, "it learns where it is not"
        return self._replica

    def offload(self) -> None:
        """Free a GPU's memory: weights, moments, buffers, and DDP's for gradients."""
        self._adam.zero_grad(set_to_none=True)  # of a loss that was not finite, which no step used
        if self.device.type == "cuda":
            self.forget_replica()
            self._copies.offload([self._adam], [self._model])

    def forget_replica(self) -> None:
        self._replica = None
        gc.collect()  # or its hooks would reduce gradients beside those of the next

    def reload(self) -> None:
        """Take it again. Collective: DDP is made here, outside of a micro-batch's time."""
        if self.device.type == "cuda":
            self._copies.reload([self._adam], self.device, [self._model])
        if self._replica is None:
            self._make_replica(init_sync=False)

    def _make_replica(self, *, init_sync: bool) -> None:
        """`init_sync`: rank 0 sends its weights; later all ranks have the same."""
        self._replica = self._model
        if self._group is not None and self._group.size() > 1:
            made = DistributedDataParallel(self._model, process_group=self._group, init_sync=init_sync)
            made.broadcast_buffers = False  # they never change; as an argument torch 2.13 knows another name
            self._replica = made

    def micro_step(self, last: bool) -> AbstractContextManager[Any]:
        """Enclose a micro-batch's forward and backward pass; gradients are reduced in the `last`."""
        if last or not isinstance(self.replica, DistributedDataParallel):
            return nullcontext()
        return self.replica.no_sync()

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Return [B, T, V]."""
        return cast(Tensor, self.replica(input_ids=tokens_BT, use_cache=False).logits)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> float:
        """Make one update; return the global gradient norm before clipping."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), GRAD_CLIP))
        if math.isfinite(norm):
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        if not math.isfinite(norm):  # on all ranks: gradients are averaged
            raise diverged("gradient norm", norm)
        return norm

    def save(self, folder: Path) -> None:
        """Write moments and step counts by ``<kind>.<parameter>``."""
        from safetensors.torch import save_file

        if self._group is None or self._group.size() == 1 or dist.get_rank() == 0:
            state = {name: self._adam.state.get(parameter, {}) for name, parameter in self._parameters.items()}
            flat = {f"{kind}.{name}": value for name, of in state.items() for kind, value in of.items()}
            save_file({key: value.cpu().contiguous() for key, value in flat.items()}, folder / OPTIMIZER)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises CheckpointError for that of another model."""
        from safetensors.torch import load_file

        self._adam.state.clear()
        for key, value in load_file(folder / OPTIMIZER).items():
            kind, _, name = key.partition(".")
            parameter = self._parameters.get(name)
            if parameter is None or value.shape not in (parameter.shape, torch.Size([])):
                raise CheckpointError(
                    f"optimizer state {key}: is of another draft model. Use the one it was saved with."
                )
            device = "cpu" if kind == "step" else parameter.device  # where AdamW keeps it
            self._adam.state[parameter][kind] = value.to(device, copy=True)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, value.detach()) for name, value in self._model.named_parameters())


OPTIMIZER = "optimizer.safetensors"


class ZeroUpdater:
    """DeepSpeed's engine."""

    def __init__(self, model: nn.Module, config: DistillationConfig, device: torch.device) -> None:
        self._model = model
        deepspeed = _deepspeed(device)
        self._stage = config.zero_stage
        if not dist.is_initialized():
            raise ConfigError.at("distillation.zero", config.zero, "off in a single process", "Use torchrun.")
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config=zero_config(config),
            dist_init_required=False,
        )

    def offload(self) -> None:
        """Nothing: DeepSpeed's memory is its own."""

    def reload(self) -> None: ...

    def micro_step(self, last: bool) -> AbstractContextManager[Any]:
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def logits(self, tokens_BT: Tensor) -> Tensor:
        return cast(Tensor, self._engine(input_ids=tokens_BT, use_cache=False).logits)

    def backward(self, loss: Tensor, last: bool) -> None:
        self._engine.backward(loss)
        if not last:
            self._engine.step()

    def step(self, learning_rate: float) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm() or 0.0)
        if not math.isfinite(norm):
            raise diverged("gradient norm", norm)
        return norm

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag="zero")

    def load(self, folder: Path) -> None:
        path, _ = self._engine.load_checkpoint(str(folder), tag="zero")
        if path is None:
            raise CheckpointError(
                f"{folder}: got no ZeRO state of these ranks. Use the ranks and stage it was saved with."
            )

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            if self._stage < 3:
                yield name, parameter.detach()
                continue
            zero = importlib.import_module("deepspeed").zero
            with zero.GatheredParameters([parameter]):
                yield name, parameter.detach().clone()


def _deepspeed(device: torch.device) -> Any:
    if device.type != "cpu":
        return importlib.import_module("deepspeed")
    # it takes torch.cuda for a GPU, which `cpu.megatron` stands in for
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed = importlib.import_module("deepspeed")
    # or it compiles a reduction of its own when first used (25 s, a C++ compiler) whose shared memory outlives ranks
    # that are killed; gloo reduces instead
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def zero_config(config: DistillationConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": GRAD_CLIP,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": config.learning_rate,
                "betas": list(ADAM_BETAS),
                "eps": 1e-8,
                "weight_decay": 0.0,
                "torch_adam": True,
            },
        },
    }


def make_updater(
    model: nn.Module, config: DistillationConfig, group: dist.ProcessGroup | None, device: torch.device
) -> PlainUpdater | ZeroUpdater:
    """Return what `config.zero_stage` asks for. Raises ConfigError where DeepSpeed is missing."""
    if not config.zero_stage:
        return PlainUpdater(model, config, group)
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError.at(
            "distillation.zero",
            config.zero,
            "off without DeepSpeed",
            'Install it with pip install "specactor[deepspeed]", or use off.',
        )
    return ZeroUpdater(model, config, device)
