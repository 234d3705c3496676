"""Megatron's data-parallel wrapper and optimizer. Gradients are summed, never averaged, over data-parallel ranks: loss
weights are the whole update's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from specactor.config import TrainConfig
from specactor.device_memory import HostCopies, pin_as_asked
from specactor.trainer.model import DTYPES, Policy, has_transformer_engine
from specactor.weights_sync.digest import digest

MOMENTS = ("exp_avg", "exp_avg_sq")
DISTRIBUTED = True
"""Divides the optimizer's state among the data-parallel ranks; False is for tests."""
OVERLAP = has_transformer_engine()
"""Reduces a bucket's gradients while others are computed. Without TransformerEngine an expert without tokens may have
no gradient, for which its bucket would wait."""
BUCKET_SIZE: int | None = None
"""Parameters per bucket; None: Megatron's choice, at least 40 million."""
ADAM_EPS = 1e-8
"""PyTorch's and Megatron's default."""


def wrap(policy: Policy) -> list[Any]:
    # Without overlap_param_gather: after a step's last update engines read the parameters.
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=DISTRIBUTED,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=OVERLAP,
        bucket_size=BUCKET_SIZE,
    )
    wrapped = [
        DistributedDataParallel(policy.config, config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(policy.chunks)
    ]
    policy.config.finalize_model_grads_func = _finalize
    if OVERLAP:  # no gradient is sent before the last micro-batch has added to it
        waiting = [chunk.no_sync for chunk in wrapped]
        policy.config.no_sync_func = waiting if len(waiting) > 1 else waiting[0]
    return wrapped


def _finalize(chunks: list[Any], num_tokens: object = None, **kwargs: Any) -> None:
    finalize_model_grads(chunks, None, **kwargs)  # None: else Megatron divides by it


def make(chunks: list[Any], policy: Policy, train: TrainConfig, dtype: str) -> Any:
    """Make Adam with float32 main weights."""
    if torch.cuda.is_available():
        pin_as_asked()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=train.learning_rate,
            min_lr=0.0,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_betas[0],
            adam_beta2=train.adam_betas[1],
            adam_eps=ADAM_EPS,
            clip_grad=train.grad_clip,
            bf16=dtype == "bfloat16",
            params_dtype=DTYPES[dtype],
            use_distributed_optimizer=DISTRIBUTED,
            **_state_settings(train.optimizer_state, fused=has_transformer_engine()),
        ),
        chunks,
    )
    policy.config.grad_scale_func = optimizer.scale_loss
    if train.optimizer_state == "bfloat16" and not has_transformer_engine():
        for part in parts(optimizer):
            part.optimizer = RoundedAdamW(part.optimizer.param_groups)
    for part in parts(optimizer):
        for group in part.optimizer.param_groups if train.optimizer_state == "host" else ():
            # Classes, which a checkpoint that is read without unpickling cannot hold; nobody reads them there.
            del group["cpu_optimizer_cls"], group["gpu_optimizer_cls"]
    for inner in torch_adams(optimizer):
        for group in inner.param_groups:
            group["foreach"], group["fused"] = False, True  # one kernel per tensor instead of eight
    return optimizer


def _state_settings(state: str, *, fused: bool) -> dict[str, Any]:
    if state == "host":
        return {
            "use_precision_aware_optimizer": True,  # else the device keeps float32 main weights, too
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    if state == "bfloat16" and fused:
        return {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": torch.bfloat16,
            "exp_avg_sq_dtype": torch.bfloat16,
            # Checkpoints take main weights whole: of their lower halves, which would save 2 bytes, they make no sense.
            "store_param_remainders": False,
        }
    return {}


class RoundedAdamW(torch.optim.AdamW):
    """AdamW in float32 with moments in bfloat16, as TransformerEngine's."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter] or _empty_state(self, parameter)
                state["step"] += 1
                count = float(state["step"])
                first = state["exp_avg"].float().lerp_(parameter.grad, 1 - beta1)
                second = (
                    state["exp_avg_sq"].float().mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                )
                state["exp_avg"].copy_(first)
                state["exp_avg_sq"].copy_(second)
                size = second.div_(1 - beta2**count).sqrt_().add_(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(first, size, value=-group["lr"] / (1 - beta1**count))

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        # Torch gave moments the type of their parameter; these values fit into bfloat16 again without loss.
        for state in self.state.values():
            state |= {name: state[name].bfloat16() for name in MOMENTS if name in state}


def parts(optimizer: Any) -> list[Any]:
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]


def torch_adams(optimizer: Any) -> Iterator[Any]:
    return (part.optimizer for part in parts(optimizer) if isinstance(part.optimizer, torch.optim.AdamW))


def set_rates(optimizer: Any, learning_rate: float, train: TrainConfig) -> None:
    """Give it the step's rate, and what a checkpoint of other settings would keep."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = train.weight_decay * group.get("wd_mult", 1.0)
        group["betas"] = train.adam_betas


def step(optimizer: Any, train: TrainConfig) -> float:
    """Update the parameters; return the norm of the gradients."""
    threads = torch.get_num_threads()
    if train.optimizer_state == "host" and torch.cuda.is_available():
        # Adam runs on the host, on as many cores as this rank's share; torchrun gave it one.
        share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(threads, share))
    try:
        _, grad_norm, _ = optimizer.step()
    finally:
        torch.set_num_threads(threads)
    return float(grad_norm)


def reset(optimizer: Any) -> None:
    for part in parts(optimizer):
        if _keeps_weights(part):  # in its state, beside the moments
            for state in part.optimizer.state.values():
                for name in (*MOMENTS, "step"):
                    if name in state:
                        state[name].zero_()
        else:
            part.optimizer.state.clear()
        for group in part.optimizer.param_groups:
            group.pop("step", None)  # where the fused Adams count


def fill_state(optimizer: Any) -> None:
    """Give an optimizer without a step its state, to save or load."""
    for part in parts(optimizer):
        inner = part.optimizer
        on_host = isinstance(inner, HybridDeviceOptimizer)
        for own in inner.sub_optimizers if on_host else [inner]:
            for parameter in (p for group in own.param_groups for p in group["params"]):
                if not own.state[parameter]:
                    _empty_state(own, parameter)
        if on_host:
            inner._sync_sub_optimizers_state_to_hdo()


def settle_loaded(optimizer: Any) -> None:
    for part in parts(optimizer):
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            # They are parts of a checkpoint's whole tensors, which would stay in memory.
            for state in part.optimizer.state.values():
                state |= {name: state[name].clone() for name in MOMENTS}
            part.optimizer._sync_sub_optimizers_state_to_hdo()


def _empty_state(inner: Any, parameter: Tensor) -> dict[str, Tensor]:
    if hasattr(inner, "initialize_state"):  # TransformerEngine's, which knows the types
        inner.initialize_state(parameter, False)
        found: dict[str, Tensor] = inner.state[parameter]
        return found
    dtype = torch.bfloat16 if isinstance(inner, RoundedAdamW) else parameter.dtype
    state = {name: torch.zeros_like(parameter, dtype=dtype) for name in MOMENTS}
    if isinstance(inner, torch.optim.AdamW):
        state["step"] = torch.tensor(0.0)
    inner.state[parameter] = state
    return state


def _keeps_weights(part: Any) -> bool:
    """Return whether main weights are the inner optimizer's own."""
    return bool(part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)


def digest_of(optimizer: Any) -> int:
    """Return a 64-bit digest of this rank's moments and step counts."""
    found: list[object] = []
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state.get(parameter, {})
                found += [digest(state[name]) for name in MOMENTS if name in state]
                found.append(int(state.get("step", group.get("step") or 0)))  # fused Adams count in the group
    return int(xxhash.xxh3_64_intdigest(str(found).encode()))


def offload(chunks: list[Any], optimizer: Any, dtype: str, copies: HostCopies) -> None:
    """Free a GPU's memory of gradients and, in bfloat16, optimizer."""
    if torch.cuda.is_available():
        for chunk in chunks:
            chunk.offload_grad_buffers()
        if dtype == "bfloat16":  # in float32 main weights are views of the model's own, which must stay
            copies.offload([part.optimizer for part in parts(optimizer)])


def reload(chunks: list[Any], optimizer: Any, dtype: str, copies: HostCopies) -> None:
    if torch.cuda.is_available():
        for chunk in chunks:
            chunk.restore_grad_buffers()
        if dtype == "bfloat16":
            device = torch.device("cuda", torch.cuda.current_device())
            copies.reload([part.optimizer for part in parts(optimizer)], device)
