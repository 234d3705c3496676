"""A model that is too large for one file is written into several, which an index names."""

from __future__ import annotations

import io
import json
import os
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specactor.run_folder import RunFolder
from specactor.trainer import model_files
from specactor.trainer.model_files import FolderWriter  # which has Megatron write in its way

from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync  # isort: skip
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner_helpers import _create_write_items

WEIGHTS = {f"layer.{i}": torch.arange(10.0) + i for i in range(5)}
"""40 bytes each."""


def written(folder: Path, max_file_bytes: int) -> Path:
    (folder / "source").mkdir()
    (folder / "source" / "config.json").write_text('{"model_type": "x", "torch_dtype": "float32"}')
    (folder / "source" / "model.safetensors").write_text("the old weights")
    writer = FolderWriter(folder / "target", max_file_bytes)
    for name, tensor in WEIGHTS.items():
        writer.add(name, tensor)
    assert not (folder / "target").exists(), "it appears whole"
    writer.finish(folder / "source", "bfloat16")
    return folder / "target"


@pytest.mark.parametrize(("max_file_bytes", "files"), [(80, 3), (119, 3), (120, 2), (1, 5)])
def test_no_file_is_larger_and_the_index_names_each_tensor(tmp_path: Path, max_file_bytes: int, files: int) -> None:
    target = written(tmp_path, max_file_bytes)
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    assert sorted(file.name for file in target.iterdir()) == ["config.json", *names, "model.safetensors.index.json"]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    found = {name: load_file(target / name) for name in names}
    assert index["weight_map"] == {tensor: name for name, tensors in found.items() for tensor in tensors}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in found.values()]
    assert max(sizes) <= max(max_file_bytes, 40), "no file is larger, but for one tensor that is"
    for name, tensor in WEIGHTS.items():
        assert torch.equal(found[index["weight_map"][name]][name], tensor)


def test_a_checkpoint_copies_one_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of those that were gathered all are parts of one: Megatron's copies of them take as much again, 366 GB of a model
    of 30B parameters on one host. What is written is each part alone."""
    gathered = torch.arange(64.0)
    parts = {f"part {i}": gathered[8 * i : 8 * i + 8] for i in range(8)}
    alive, most = [0], [0]
    clone = torch.Tensor.clone

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        made = clone(tensor)
        alive[0] += made.nbytes
        most[0] = max(most[0], alive[0])
        weakref.finalize(made, lambda: alive.__setitem__(0, alive[0] - 32))
        return made

    items = [item for name, part in parts.items() for item in _create_write_items(name, part)]
    planner: Any = SimpleNamespace(resolve_data=lambda item: parts[item.index.fqn])
    writer = FileSystemWriterAsync(tmp_path, thread_count=1)
    monkeypatch.setattr(torch.Tensor, "clone", counted)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    writer.prepare_write_data(SavePlan(items, storage_data=_StoragePrefix("__0_")), planner)
    write, _, arguments = writer.get_save_function_and_args()
    assert write is not None
    write(*arguments)
    assert most[0] <= 64  # of all 256 bytes: one is still there while the next is made
    with open(tmp_path / "__0_0.distcp", "rb") as file:
        for result in writer.retrieve_write_results():
            place = result.storage_data
            file.seek(place.offset)
            found = torch.load(io.BytesIO(file.read(place.length)))
            assert found.equal(parts[result.index.fqn])
            assert found.untyped_storage().nbytes() == 32


def test_ranks_wait_for_a_slow_disk_without_an_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Megatron's own save waits in NCCL for the ranks that write, which ends the run after half an hour."""
    order: list[object] = []

    class Ranks:
        def together(self, phase: str, work: Any) -> None:
            order.append(phase)
            work()

    request = SimpleNamespace(
        async_fn=lambda *of: order.append(of), async_fn_args=(1, 2), finalize_fns=[lambda: order.append("whole")]
    )

    def save(*_: object, async_sharded_save: bool = False) -> Any:
        return request if async_sharded_save else order.append("written, and waited for")

    monkeypatch.setattr(model_files.dist_checkpointing, "save", save)
    monkeypatch.setattr(model_files, "_sharded", lambda *_, **__: {})
    monkeypatch.setattr(model_files, "Collective", Ranks)
    model_files.save([], None, tmp_path)
    assert order == ["checkpoint", (1, 2), "whole"]


def test_two_runs_write_one_target_and_only_old_leavings_go(tmp_path: Path) -> None:
    """In containers both may have the same pid, and a process of this host says nothing of another's."""
    of_another_host, old = tmp_path / "target.tmp-4194305", tmp_path / "target.tmp-1"
    for folder in (of_another_host, old):
        folder.mkdir()
    os.utime(old, (time.time() - 2 * 86_400,) * 2)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    writers = [FolderWriter(tmp_path / "target") for _ in range(2)]
    for writer in writers:
        writer.add("layer", WEIGHTS["layer.0"])
    for writer in writers:
        writer.finish(tmp_path / "source", "float32")
        assert load_file(tmp_path / "target" / "model.safetensors").keys() == {"layer"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target", of_another_host.name]


def test_what_a_killed_export_left_goes_when_its_run_goes_on(tmp_path: Path) -> None:
    run = RunFolder(root=tmp_path)
    FolderWriter(run.export).add("layer", WEIGHTS["layer.0"])
    run.export.mkdir()
    run.remove_partial_exports()
    assert list(tmp_path.iterdir()) == [run.export]


def test_one_file_has_the_name_of_all(tmp_path: Path) -> None:
    target = written(tmp_path, 200)
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(target / "model.safetensors").keys() == WEIGHTS.keys()
    assert json.loads((target / "config.json").read_text()) == {"model_type": "x", "dtype": "bfloat16"}
