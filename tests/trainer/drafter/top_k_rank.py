"""One rank of the test of the top-k over a sharded vocabulary: rank, world, store file, input, output."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from specactor.trainer.logprobs import vocab_parallel_top_k


def main(rank: int, world: int, store: str, source: str, target: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    results = []
    for case in torch.load(source, weights_only=True):
        shard = case["logits"].chunk(world, dim=1)[rank]
        ids, logprobs = vocab_parallel_top_k(shard, case["k"], temperature=case["temperature"], group=dist.group.WORLD)
        results.append({"ids": ids, "logprobs": logprobs})
    torch.save(results, target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5])
