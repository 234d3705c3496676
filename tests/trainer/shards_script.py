"""Trainer ranks that say where their shards lie: against each element's number, and with how much memory.

torchrun ... -m tests.trainer.shards_script SPEC.json RESULTS.json
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from specactor.cpu import megatron

megatron.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from specactor.parallel.collective import destroy_groups  # noqa: E402
from specactor.trainer.model import Policy  # noqa: E402
from specactor.trainer.shards import RankShards  # noqa: E402
from specactor.weights_sync import plan  # noqa: E402
from tests.trainer import layout_script as layouts  # noqa: E402

AT = 64
ROWS, COLUMNS = 2**14, 2**10
"""Of a large parameter over all shards."""


def expected(shards: RankShards, name: str, tensor: torch.Tensor) -> dict[str, list[int]]:
    """Of every element of each Hugging Face tensor, its first byte in memory; -1 where another rank has it."""
    size, cut = tensor.numel(), shards._is_cut(name, tensor)
    group = shards._split(name).group
    count, own = (group.size(), group.rank()) if cut else (1, 0)
    pieces = list(torch.arange(count * size).view(count, *tensor.shape))
    whole = shards._bridge._weight_merge_across_tp(name, pieces, tensor) if count > 1 else pieces[0]
    found = {}
    for hf_name, numbers in zip(*shards._bridge._weight_to_hf_format(name, whole), strict=True):
        number = numbers.reshape(-1) - own * size
        there = (number >= 0) & (number < size)
        found[hf_name] = torch.where(there, AT + number * tensor.element_size(), -1).tolist()
    return found


def noted(shards: RankShards, name: str, tensor: torch.Tensor) -> dict[str, list[int]]:
    found, item = {}, tensor.element_size()
    for held in shards._tensors_of(name, tensor, memory=0, at=AT):
        at = np.full(held.num_bytes // item, -1)
        for block in held.blocks:
            for run in range(block.span.count):
                to = (block.to + run * block.step) // item
                numbers = np.arange(block.span.length // item)
                assert (at[to + numbers] == -1).all()  # once
                at[to + numbers] = block.span.at + run * block.span.step + numbers * item
        found[held.name] = at.tolist()
    return found


def wrong_plans(policy: Policy) -> list[str]:
    """Parameters of which some element lies elsewhere than the plan says."""
    shards = RankShards(policy)
    return [
        name for name, tensor in shards._parameters if noted(shards, name, tensor) != expected(shards, name, tensor)
    ]


def without_columns(rows: int, columns: int) -> list[plan.Digit]:
    """Every row is one run, whatever became of the order in it."""
    return [digit._replace(values=0 * digit.values, step=0) if digit.step else digit for digit in DIGITS(rows, columns)]


DIGITS = plan.digits


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def peaks(policy: Policy) -> dict[str, float]:
    """By parameter, bytes of memory per element of all shards while one of a real model's size is planned for."""
    shards, found = RankShards(policy), {}
    for name, tensor in shards._parameters:
        kind = re.search(r"word_embeddings|linear_fc[12]|linear_proj", name)
        if kind is None or "layer_norm" in name or kind[0] in found:
            continue
        count = shards._split(name).group.size() if shards._is_cut(name, tensor) else 1
        dim = getattr(tensor, "partition_dim", 0)
        shape = (ROWS // count, COLUMNS) if dim != 1 else (ROWS, COLUMNS // count)
        large: Any = torch.empty(shape, dtype=torch.bfloat16, device="meta")  # takes no memory itself
        large.tensor_model_parallel, large.partition_dim = getattr(tensor, "tensor_model_parallel", False), dim
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = _status("VmRSS")
        vocabulary = {"vocab_size": ROWS - 3, "padded_vocab_size": ROWS}
        with mock.patch.multiple(shards._bridge, **vocabulary):
            assert len(list(shards._tensors_of(name, large, memory=0, at=0))) == 1 + (kind[0] == "linear_fc1")
        found[kind[0]] = (_status("VmHWM") - before) / (ROWS * COLUMNS)
    return found


def looked_at(entry: dict[str, Any]) -> dict[str, Any]:
    policy = layouts.make(entry | {"world": os.environ["WORLD_SIZE"]}).policy
    result: dict[str, Any] = {"wrong": wrong_plans(policy), "peaks": peaks(policy)}
    if entry.get("spoilt"):
        with mock.patch.object(plan, "digits", without_columns):
            result["spoilt"] = wrong_plans(policy)
    return result


def main(spec: dict[str, Any], results: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    for name, entry in spec.items():
        own = looked_at(entry)
        found[name] = [own] * dist.get_world_size()
        dist.all_gather_object(found[name], own)
        destroy_groups(keep_process_group=True)
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
