"""Write the policy as a Hugging Face folder: safetensors in bounded files, config, tokenizer.

Invariants: the folder appears whole or not at all; memory holds at most one file's tensors; when writing fails on the
one rank that writes, all ranks raise.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specactor.errors import CheckpointError

MAX_FILE_BYTES = 4 * 2**30
"""A safetensors file is closed when the next tensor would exceed this."""

_WRITE_ERRORS = (OSError, SafetensorError, ValueError)
"""What a full disk, a broken source folder or an unwritable path raise."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".safetensors.index.json")


class FolderWriter:
    """Tensors one by one into a folder beside ``target``; `finish` makes it ``target``."""

    def __init__(self, target: Path, max_file_bytes: int) -> None:
        self._target, self._max_file_bytes = target, max_file_bytes
        self._folder = target.with_name(f"{target.name}.tmp-{os.getpid()}")  # another run may write the same target
        self._files: list[list[str]] = []
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        for left in target.parent.glob(f"{target.name}.tmp-*"):
            if not Path("/proc", left.name.rpartition("-")[2]).exists() or left == self._folder:
                shutil.rmtree(left, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_file_bytes:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def finish(self, source: Path, dtype: str) -> None:
        """Add what is not weights from `source`, then put the folder in its place."""
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
        """Their names hold their number, which is known only now."""
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


def export_hf(
    weights: Iterable[tuple[str, Tensor]],
    target: Path,
    *,
    source: Path,
    dtype: str,
    device: torch.device,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `weights`, which every rank iterates, as Hugging Face folder `target`; rank 0 writes. Collective.

    Everything but weights is taken from the folder `source`. Raises CheckpointError on all ranks if writing failed.
    """
    writes = dist.get_rank() == 0
    error: Exception | None = None
    writer: FolderWriter | None = None
    try:
        writer = FolderWriter(target, max_file_bytes) if writes else None
    except _WRITE_ERRORS as caught:
        error = caught
    for name, tensor in weights:  # to the end, whatever happened: it is a collective
        if writer is not None and error is None:
            try:
                writer.add(name, tensor)
            except _WRITE_ERRORS as caught:
                error = caught
    if writer is not None and error is None:
        try:
            writer.finish(source, dtype)
        except _WRITE_ERRORS as caught:
            error = caught
    failed = torch.tensor([int(error is not None)], device=device)
    dist.all_reduce(failed)
    if failed.item():
        raise CheckpointError(
            f"export to {target}: {error or 'rank 0 could not write'}. Free disk space, or export elsewhere."
        )
