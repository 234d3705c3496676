"""One rank of the test of vocabulary-parallel log-probabilities: rank, world, store file, input file, output file."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from specactor.trainer.logprobs import vocab_parallel_logprobs


def main(rank: int, world: int, store: str, source: str, target: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    results = []
    for case in torch.load(source, weights_only=True):
        shard = case["logits"].chunk(world, dim=1)[rank].clone().requires_grad_()
        logprobs_T, entropy_T = vocab_parallel_logprobs(
            shard, case["targets"], temperature=case["temperature"], group=dist.group.WORLD
        )
        (logprobs_T * case["weights"]).sum().backward()
        results.append({"logprobs": logprobs_T.detach(), "entropy": entropy_T, "grad": shard.grad})
    torch.save(results, target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5])
