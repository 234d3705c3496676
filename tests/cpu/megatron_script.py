"""Checks of Megatron's CPU platform on 2 ranks; rank 0 writes what was found as JSON. See test_megatron.py.

torchrun --nproc-per-node 2 ... -m tests.cpu.megatron_script RESULTS.json
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specactor.cpu import megatron as platform

platform.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from specactor.cpu.layers import (  # noqa: E402
    PackedAttention,
    bucket_lengths,
    grouped_linear,
    positions,
    rotate_packed,
)

LENGTHS = [5, 40, 1, 17, 44, 43, 9, 60]
HEADS, KV_HEADS, SIZE = 4, 2, 8


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """One sequence, one head at a time, the softmax written out; (T, heads * size)."""
    out, start = [], 0
    for n in lengths:
        part = slice(start, start + n)
        heads = []
        for h in range(HEADS):
            g = h // (HEADS // KV_HEADS)
            scores = q[part, h] @ k[part, g].T / SIZE**0.5
            hidden = torch.ones(n, n).triu(1).bool()
            heads.append(torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v[part, g])
        out.append(torch.cat(heads, dim=-1))
        start += n
    return torch.cat(out)


def mine(tensor: torch.Tensor, lengths: list[int], ranks: int, rank: int) -> torch.Tensor:
    """This rank's rows: chunks rank and 2 ranks - 1 - rank of every sequence."""
    rows = []
    for part in tensor.split(lengths):
        chunks = part.chunk(2 * ranks)
        rows += [chunks[rank], chunks[2 * ranks - 1 - rank]] if ranks > 1 else [part]
    return torch.cat(rows)


def attention_error(ranks: int) -> dict[str, float]:
    """Largest difference of outputs and of gradients to the written-out attention."""
    group = parallel_state.get_context_parallel_group()
    rank = group.rank()
    lengths = [-(-n // (2 * ranks)) * 2 * ranks for n in LENGTHS] if ranks > 1 else LENGTHS
    torch.manual_seed(0)
    total = sum(lengths)
    whole = [torch.randn(total, heads, SIZE, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    direction = torch.randn(total, HEADS * SIZE)
    expected = naive_attention(*whole, lengths)
    expected_grads = torch.autograd.grad((expected * direction).sum(), whole)

    local = [mine(tensor.detach(), lengths, ranks, rank).requires_grad_() for tensor in whole]
    module = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(module)
    module.softmax_scale = SIZE**-0.5
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    got = module(*local, None, packed_seq_params=SimpleNamespace(cu_seqlens_q_padded=boundaries))
    grads = torch.autograd.grad((got * mine(direction, lengths, ranks, rank)).sum(), local)
    return {
        "output": float((got - mine(expected.detach(), lengths, ranks, rank)).abs().max()),
        "gradient": max(
            float((a - mine(b, lengths, ranks, rank)).abs().max()) for a, b in zip(grads, expected_grads, strict=True)
        ),
    }


def rotation_error(ranks: int) -> float:
    group = parallel_state.get_context_parallel_group()
    lengths = [-(-n // (2 * ranks)) * 2 * ranks for n in LENGTHS] if ranks > 1 else LENGTHS
    freqs = torch.outer(torch.arange(max(lengths)).float(), 100.0 ** -torch.linspace(0, 1, SIZE // 2))
    freqs = torch.cat([freqs, freqs], dim=-1)[:, None, None]
    t = torch.randn(sum(lengths), HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    expected = []
    for part in t.split(lengths):
        pairs = torch.view_as_complex(
            torch.stack([part[..., : SIZE // 2], part[..., SIZE // 2 :]], dim=-1).contiguous()
        )
        turned = pairs * torch.polar(torch.ones(len(part), SIZE // 2), freqs[: len(part), 0, 0, : SIZE // 2])[:, None]
        expected.append(torch.cat([turned.real, turned.imag], dim=-1))
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    got = rotate_packed(mine(t, lengths, ranks, group.rank()), boundaries, freqs, cp_group=group)
    return float((got - mine(torch.cat(expected), lengths, ranks, group.rank())).abs().max())


def experts_error() -> float:
    torch.manual_seed(2)
    counts = [3, 0, 7, 1]
    x = torch.randn(11, 6, requires_grad=True)
    weights = [torch.randn(5, 6, requires_grad=True) for _ in counts]
    direction = torch.randn(11, 5)
    expected = torch.cat([part @ w.T for part, w in zip(x.split(counts), weights, strict=True)])
    got = grouped_linear(x, counts, weights)
    pairs = [(got, expected)]
    for a, b in zip(
        torch.autograd.grad((got * direction).sum(), [x, *weights]),
        torch.autograd.grad((expected * direction).sum(), [x, *weights]),
        strict=True,
    ):
        pairs.append((a, b))
    return max(float((a - b).abs().max()) for a, b in pairs)


def bucket_faults() -> list[str]:
    """Random lengths: every sequence in one bucket, longest first, padding bounded."""
    rng, faults = random.Random(0), []
    for _ in range(300):
        lengths = [rng.choice([0, 1, 2, rng.randint(1, 50), rng.randint(1, 1000)]) for _ in range(rng.randint(1, 40))]
        buckets = bucket_lengths(lengths)
        members = sorted(i for bucket in buckets for i in bucket)
        if members != [i for i, n in enumerate(lengths) if n]:
            faults.append(f"lost or doubled: {lengths}")
        for bucket in buckets:
            room = lengths[bucket[0]] * len(bucket)
            if max(lengths[i] for i in bucket) != lengths[bucket[0]]:
                faults.append(f"not longest first: {lengths}")
            if sum(lengths[i] for i in bucket) < 0.7 * room - 1e-9:
                faults.append(f"too much padding: {lengths}")
    return faults


def all_positions(ranks: int, length: int) -> list[int]:
    """Positions of a sequence over all ranks: each exactly once."""
    each = length // ranks
    found = [positions(torch.arange(each), torch.tensor(each), ranks, rank).tolist() for rank in range(ranks)]
    return sorted(p for part in found for p in part)


def gloo() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    full, part = torch.arange(16.0).view(4, 4), torch.empty(4, 2)
    dist.scatter(part, list(full.chunk(2, dim=1)) if rank == 0 else None, src=0)
    outputs = [torch.empty(r + 1, 2) for r in range(world)]
    dist.all_gather(outputs, torch.full((rank + 1, 2), float(rank)))
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    threads = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return {
        "one_device": threads.count("gloo_tcp_loop") == 1,
        "strided_scatter": torch.equal(part, full.chunk(2, dim=1)[rank]),
        "uneven_all_gather": all(torch.equal(o, torch.full((r + 1, 2), float(r))) for r, o in enumerate(outputs)),
    }


def devices() -> dict[str, bool]:
    return {
        "factory": torch.zeros(2, device="cuda").device.type == "cpu",
        "to": torch.zeros(2).to("cuda").device.type == "cpu",
        "module": next(torch.nn.Linear(2, 2).cuda().parameters()).device.type == "cpu",
        "type": torch.zeros(2).type() == "torch.cuda.FloatTensor" and torch.zeros(2).type() == "torch.FloatTensor",
        "other_type": torch.zeros(2).type() != "torch.cuda.HalfTensor",
        "current": torch.cuda.current_device() == torch.device("cpu"),
        "not_available": not torch.cuda.is_available(),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"gloo": gloo(), "devices": devices(), "experts": experts_error()}
    found |= {"buckets": bucket_faults(), "positions": all_positions(3, 36) == list(range(36))}
    for ranks in (1, 2):
        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
        found |= {f"attention{ranks}": attention_error(ranks), f"rotation{ranks}": rotation_error(ranks)}
        parallel_state.destroy_model_parallel()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(gathered))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
