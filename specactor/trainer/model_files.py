"""A model in files: Megatron's distributed checkpoint, or a Hugging Face folder.

Invariants of a folder: it appears whole or not at all; memory holds at most one file's tensors; when writing fails on
the one rank that writes, all ranks raise.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItemType

from specactor.errors import CheckpointError
from specactor.parallel.collective import Collective
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


def _plan_file(writer: Any, plan: Any, planner: Any) -> None:
    """Plan the rank's one file."""
    # Upstream copies here whatever is on a GPU or a part of a larger tensor: all of the gathered optimizer once more.
    name = f"{plan.storage_data.prefix}0{filesystem_async.DEFAULT_SUFFIX}"
    parts: tuple[list[Any], list[Any]] = ([], [])
    for item in plan.items:
        parts[item.type != WriteItemType.BYTE_IO].append((item, planner.resolve_data(item)))
    file = os.path.join(writer.checkpoint_dir, name)
    writer.write_buckets = [(file, name, parts)] if plan.items else []
    writer.results_queue = queue.Queue() if plan.items else None


def _own(tensor: Tensor) -> Tensor:
    """Return it in host memory, alone in its storage, all of which is written."""
    own = tensor.detach().cpu()
    return own if own.untyped_storage().nbytes() == own.nbytes else own.clone()


def _write_in_process(
    transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]
) -> None:
    """Write the files of ``write_preloaded_data_multiproc`` in this process, each tensor copied when it is its turn."""
    # Upstream's forked processes and manager outlive the save, and a killed trainer.
    written: dict[int, Any] = {}
    for index, (file, name, (of_bytes, tensors)) in enumerate(buckets):
        bucket = (file, name, (of_bytes, ((item, _own(tensor)) for item, tensor in tensors)))
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


filesystem_async.FileSystemWriterAsync.prepare_write_data = _plan_file
filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_in_process)


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
    metadata = _metadata()
    optimizers.fill_state(optimizer)
    keys = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    state: dict[str, Any] = {
        key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in zip(keys, chunks, strict=True)
    }
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=metadata)
    return state


def save(chunks: list[Any], optimizer: Any, folder: Path) -> None:
    """Write into the empty folder. Collective; raises CheckpointError."""
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    try:
        state = _sharded(chunks, optimizer, loading=False)
        request = dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True)
        write = request.async_fn or (lambda *_: None)  # a rank may have nothing to write
        # With heartbeats: those that have written wait for a slow disk no longer than a group's timeout in Megatron.
        Collective().together("checkpoint", lambda: write(*request.async_fn_args))
        for finalize in request.finalize_fns:
            finalize()
    except (CheckpointException, CheckpointingException, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder}: could not be written: {error}. Free disk space, or save elsewhere."
        ) from error


def load(chunks: list[Any], optimizer: Any, folder: Path) -> None:
    """Read what `save` wrote, under this layout. Collective; raises CheckpointError."""
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


MAX_FILE_BYTES = 4 * 2**30
"""A safetensors file is closed when the next tensor would exceed this."""

T = TypeVar("T")
_WRITE_ERRORS = (OSError, SafetensorError, ValueError)
"""Raised for a full disk, a broken source folder or an unwritable path."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".safetensors.index.json")


class FolderWriter:
    """Writes tensors one by one into a folder that `finish` renames to ``target``."""

    def __init__(self, target: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._target, self._max_file_bytes = target, max_file_bytes
        # Another run may write the same target, on another host or in another container: pids tell nothing apart.
        self._folder = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex}")
        self._files: list[list[str]] = []
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        for left in target.parent.glob(f"{target.name}.tmp-*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > 86_400.0:  # nothing was added for a day: nobody will finish it
                    shutil.rmtree(left, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_file_bytes:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def finish(self, source: Path, dtype: str) -> None:
        self._flush()
        self._name_files()
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name != "config.json":
                shutil.copyfile(file, self._folder / file.name)
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        (self._folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
        replaced = self._target.with_name(self._target.name + ".old")
        shutil.rmtree(replaced, ignore_errors=True)
        if self._target.exists():
            os.rename(self._target, replaced)
        os.rename(self._folder, self._target)
        shutil.rmtree(replaced, ignore_errors=True)

    def _flush(self) -> None:
        if self._pending:
            file = self._folder / f"part-{len(self._files)}"
            save_file(self._pending, file, metadata={"format": "pt"})
            self._files.append(list(self._pending))
            self._pending, self._pending_bytes = {}, 0

    def _name_files(self) -> None:
        total = len(self._files)
        names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
        if total == 1:
            names = ["model.safetensors"]
        else:
            where = {tensor: name for name, tensors in zip(names, self._files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": where}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        for i, name in enumerate(names):
            os.rename(self._folder / f"part-{i}", self._folder / name)


def _tried(write: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return write(), None
    except _WRITE_ERRORS as error:
        return None, error


def export_hf(weights: Iterable[tuple[str, Tensor]], target: Path, *, source: Path, dtype: str) -> None:
    """Write `weights`, which every rank iterates, on rank 0, and all else from `source`. Collective; raises
    CheckpointError."""
    writer, error = None, None
    if dist.get_rank() == 0:
        writer, error = _tried(lambda: FolderWriter(target))
    for name, tensor in weights:  # to the end, whatever happens: it is a collective, and its own errors are no writer's
        if writer is not None and error is None:
            _, error = _tried(partial(writer.add, name, tensor))
    if writer is not None and error is None:
        _, error = _tried(partial(writer.finish, source, dtype))
    if Collective().any(error is not None):
        if writer is not None:
            writer.discard()
        raise CheckpointError(
            f"export to {target}: {error or 'rank 0 could not write'}. Free disk space, or export elsewhere."
        )
