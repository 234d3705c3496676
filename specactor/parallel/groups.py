"""Process groups of a trainer rank: torch.distributed, Megatron's parallel state, random seeds.

Invariant: every wait in a collective is bounded by ``parallel.timeout_s``.
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from specactor.config import ParallelConfig
from specactor.cpu import megatron as cpu_platform
from specactor.parallel.collective import control_group, leave
from specactor.parallel.layout import Layout, own_device


def init(
    layout: Layout, parallel: ParallelConfig, *, seed: int, local_rank: int, store: Store | None = None
) -> torch.device:
    """Join the job that torchrun started and set up all groups of `layout`; returns this rank's device. Collective.

    The model's tensors go through NCCL with a GPU and gloo without. An existing default process group is used.
    `local_rank` is this rank's number among those of its launcher, and that of its GPU. Ranks find each other in
    `store`, by default the launcher's, which must then be new.
    """
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


def destroy(*, keep_process_group: bool = False) -> None:
    """Leave all groups; with `keep_process_group` another layout can be set up in the same processes."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if not keep_process_group and dist.is_initialized():
        leave()
