"""Megatron's distributed checkpoint format: tensors of the model and of the optimizer, in any layout Megatron allows.

All contact with Megatron's checkpoint internals is here. Upstream writes through forked processes and a manager
process that outlives the save, and a killed trainer; here each rank writes its files itself.
"""

from __future__ import annotations

import pickle
import queue
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from specactor.errors import CheckpointError
from specactor.trainer import optimizer as optimizers

_LOAD_ERRORS = (
    CheckpointException,
    CheckpointingException,
    RuntimeError,
    KeyError,
    ValueError,
    OSError,
    EOFError,
    pickle.UnpicklingError,
)


def _write_in_process(
    transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]
) -> None:
    """Stands in for ``write_preloaded_data_multiproc``: the same files, written one after the other by this process."""
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        done: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[int] = queue.Queue()
        count.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, index, bucket, done, count, use_fsync=True, use_msc=use_msc
        )
        _, outcome = done.get_nowait()
        if isinstance(outcome, Exception):
            results.put(outcome)
            return
        written[index] = outcome
    results.put(written)


filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_in_process)
filesystem_async._get_write_results_queue = queue.Queue


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        # Gathered in host memory, on one rank: on GPUs the other way takes 12 bytes per parameter beside live engines.
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded(chunks: list[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    """Return what is saved, with the place of every local tensor in the whole."""
    metadata = _metadata()
    optimizers.fill_state(optimizer)
    keys = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    state: dict[str, Any] = {
        key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in zip(keys, chunks, strict=True)
    }
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=metadata)
    return state


def save(chunks: list[Any], optimizer: Any, folder: Path) -> None:
    """Write model and optimizer into the empty folder. Collective; raises CheckpointError."""
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    try:
        dist_checkpointing.save(_sharded(chunks, optimizer, loading=False), str(folder), strategy)
    except (CheckpointException, CheckpointingException, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder}: could not be written: {error}. Free disk space, or save elsewhere."
        ) from error


def load(chunks: list[Any], optimizer: Any, folder: Path) -> None:
    """Read model and optimizer from a folder that `save` wrote, under this job's layout. Collective."""
    try:
        state = dist_checkpointing.load(_sharded(chunks, optimizer, loading=True), str(folder))
        keys = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
        for key, chunk in zip(keys, chunks, strict=True):
            chunk.load_state_dict(state[key], strict=False)  # TransformerEngine's extra states may be absent
        optimizer.load_state_dict(state["optimizer"])
        optimizers.settle_loaded(optimizer)
    except _LOAD_ERRORS as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{folder}: could not be loaded under this layout: {first}. Use the layout "
            "it was saved with, or an earlier one."
        ) from error
