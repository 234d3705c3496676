"""Megatron's data-parallel wrapper and optimizer around the policy's chunks.

Gradients are summed over data-parallel ranks, never averaged: the weights in the loss are those of the whole update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from specactor.config import TrainConfig
from specactor.device_memory import HostCopies
from specactor.trainer.model import DTYPES, Policy
from specactor.weights_sync.digest import digest

DISTRIBUTED = True
"""The optimizer's state is divided among the data-parallel ranks, which costs no time; a plain one is for tests."""
ADAM_EPS = 1e-8
"""Added to Adam's denominator: PyTorch's and Megatron's default."""


def wrap(policy: Policy, train: TrainConfig) -> list[Any]:
    """The chunks in Megatron's DistributedDataParallel, with float32 gradient buffers."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=DISTRIBUTED, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    wrapped = [
        DistributedDataParallel(policy.config, config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(policy.chunks)
    ]
    policy.config.finalize_model_grads_func = _finalize
    return wrapped


def _finalize(chunks: list[Any], num_tokens: object = None, **kwargs: Any) -> None:
    """Reduce gradients; without the division by a token count that Megatron would add."""
    finalize_model_grads(chunks, None, **kwargs)


def make(chunks: list[Any], policy: Policy, train: TrainConfig, dtype: str) -> Any:
    """Megatron's optimizer: Adam with float32 main weights; TransformerEngine's or apex's fused one where present."""
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
        ),
        chunks,
    )
    policy.config.grad_scale_func = optimizer.scale_loss
    for inner in torch_adams(optimizer):
        for group in inner.param_groups:
            group["foreach"], group["fused"] = False, True  # one kernel per tensor instead of eight
    return optimizer


def parts(optimizer: Any) -> list[Any]:
    """Megatron chains one optimizer for the dense part and one for the experts."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]


def torch_adams(optimizer: Any) -> Iterator[Any]:
    """The inner optimizers that are torch's own."""
    return (part.optimizer for part in parts(optimizer) if isinstance(part.optimizer, torch.optim.AdamW))


def set_learning_rate(optimizer: Any, learning_rate: float, weight_decay: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


def reset(optimizer: Any) -> None:
    """Forget moments and step counts."""
    for part in parts(optimizer):
        part.optimizer.state.clear()
        for group in part.optimizer.param_groups:
            group.pop("step", None)  # where the fused Adams count


def fill_state(optimizer: Any) -> None:
    """Give an optimizer that has made no step yet its state, so that it can be saved, or loaded into."""
    for part in parts(optimizer):
        inner = part.optimizer
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if inner.state[parameter]:
                continue
            state = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            if isinstance(inner, torch.optim.AdamW):
                state["step"] = torch.tensor(0.0)
            inner.state[parameter] = state


def digest_of(optimizer: Any) -> int:
    """64-bit digest of this rank's moments and step counts."""
    found: list[object] = []
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state.get(parameter, {})
                found += [digest(state[name]) for name in ("exp_avg", "exp_avg_sq") if name in state]
                found.append(int(state.get("step", group.get("step") or 0)))  # fused Adams count in the group
    return int(xxhash.xxh3_64_intdigest(str(found).encode()))


def offload(chunks: list[Any], optimizer: Any, dtype: str, copies: HostCopies) -> None:
    """Give a GPU's memory of gradients, and of the optimizer, to the rollout. Not run on the CPU.

    In float32 the main weights are views of the model's own, which must stay; only gradients are given up.
    """
    if torch.cuda.is_available():
        for chunk in chunks:
            chunk.offload_grad_buffers()
        if dtype == "bfloat16":
            copies.offload([part.optimizer for part in parts(optimizer)])


def reload(chunks: list[Any], optimizer: Any, dtype: str, copies: HostCopies) -> None:
    """The reverse of `offload`."""
    if torch.cuda.is_available():
        for chunk in chunks:
            chunk.restore_grad_buffers()
        if dtype == "bfloat16":
            device = torch.device("cuda", torch.cuda.current_device())
            copies.reload([part.optimizer for part in parts(optimizer)], device)
