"""Our own kernels on this machine's GPU, beside the CPU: tokens, and bits of rows alone and in company. Prints JSON.

python -m benchmarks.gpu_kernels {cuda,cpu}; cpu: in small, in Triton's interpreter (TRITON_INTERPRET=1)
"""

from __future__ import annotations

import json
import sys

import torch
from torch.nn.functional import pad

from specactor.config.rollout import SPLIT
from specactor.cpu import sglang_ops, torchvision_ops
from specactor.rollout.sglang import kernels, products
from specactor.rollout.sglang.kernels import TILE

Case = dict[str, int | float]


def sampling(device: str, *, rows: int, vocab: int) -> Case:
    """`differ`: rows with another token than the CPU's; `bits`: rows whose log-probability is another one alone."""
    torch.manual_seed(0)
    logits, temperatures = torch.randn(rows, vocab) * 4, torch.full((rows, 1), 0.7)
    seeds, positions = torch.randint(2**62, (rows,)), torch.randint(40_000, (rows,))
    wanted = sglang_ops.sample_with_noise(logits / temperatures, seeds, positions).view(-1)
    given = [x.to(device) for x in (logits, temperatures, seeds, positions, torch.zeros(rows, dtype=torch.bool))]
    drawn = kernels.draw(*given)
    together = kernels.logprobs_of(drawn.tokens, given[0], given[1], drawn)
    bits = 0
    for row in range(0, rows, max(1, rows // 16)):
        own = [x[row : row + 1] for x in given]
        alone = kernels.draw(*own)
        bits += not torch.equal(kernels.logprobs_of(alone.tokens, own[0], own[1], alone), together[row : row + 1])
    return {"rows": rows, "differ": int((drawn.tokens.cpu() != wanted).sum()), "bits": bits}


def tiles(device: str, dtype: torch.dtype, *, group: int, dim: int, lengths: tuple[int, ...]) -> Case:
    """`differ`: rows that are not softmax attention's; `bits`: rows that have others in a tile of eight than alone."""
    torch.manual_seed(group)
    width = max(lengths) + TILE
    k, v = torch.randn(2, len(lengths) * width, 1, dim).to(device, dtype)
    slots = torch.randperm(len(k), device=device).view(len(lengths), width)
    q = torch.randn(len(lengths), group, dim).to(device, dtype)
    parts = torch.empty(len(lengths) * TILE, group, -(-width // SPLIT), dim, device=device)

    def attend(q: torch.Tensor, readers: list[int], seen: list[int]) -> torch.Tensor:
        indices = torch.cat([slots[r, :n] for r, n in zip(readers, seen, strict=True)])
        indptr = pad(torch.tensor(seen, device=device).cumsum(0), (1, 0)).int()
        sizes, out = torch.empty(len(q), device=device, dtype=torch.int32), torch.empty_like(q)
        kernels.size_tiles(torch.tensor(readers, device=device), sizes)
        log_totals = torch.empty_like(parts[..., 0])
        kernels.tile_attention(q, k, v, out, indptr, indices, sizes, parts, log_totals, dim**-0.5)
        return out

    every = list(range(len(lengths)))
    alone = attend(q, every, list(lengths))
    differ = 0
    for r, n in enumerate(lengths):
        keys, values = (x[slots[r, :n], 0].double() for x in (k, v))
        exact = (q[r].double() @ keys.T * dim**-0.5).softmax(-1) @ values
        differ += float((alone[r].double() - exact).abs().max()) > (1e-4 if dtype == torch.float32 else 2e-2)
    bits = 0
    for at in range(TILE):
        company = torch.randn(len(lengths), TILE, group, dim).to(device, dtype)
        company[:, at] = q
        readers = [r for r in every for _ in range(TILE)]
        seen = [max(1, n - at + i) if i != at else n for n in lengths for i in range(TILE)]
        found = attend(company.flatten(0, 1), readers, seen).view(len(lengths), TILE, group, dim)
        bits += sum(not torch.equal(one, other) for one, other in zip(found[:, at], alone, strict=True))
    return {"rows": TILE * len(lengths), "differ": differ, "bits": bits}


def products_of(device: str, dtype: torch.dtype, *, depth: int, columns: int) -> Case:
    """`differ`: rows that are not the exact product's; `bits`: rows that have other bits in other company or, on a GPU,
    in tiles of another size. Triton's interpreter adds in an order that follows their depth."""
    torch.manual_seed(depth)
    a, b = (torch.randn(size).to(device, dtype) for size in ((products.ROWS, depth), (depth, columns)))
    exact = a.double() @ b.double()
    bound = (1e-3 if dtype == torch.float32 else 2e-2) * exact.abs().clamp(1.0)
    differ = bits = 0
    dense = []
    for tile in (products.OF_SGLANG, *products.PRODUCTS.values()):
        every = products.multiply(tile, a, b, dtype)
        differ += int(((every.double() - exact).abs() > bound).any(1).sum())
        for count in (1, 5, products.ROWS // 2):
            bits += int((products.multiply(tile, a[:count], b, dtype) != every[:count]).any(1).sum())
        dense.append(every)
    experts = [products.multiply_experts(config, a, b) for config in (products.SGLANGS, products.FEW, products.MANY)]
    if device == "cuda":
        for first, *others in (dense, experts):
            bits += sum(int((other != first).any(1).sum()) for other in others)
    return {"rows": products.ROWS, "differ": differ, "bits": bits}


def norms(device: str, dtype: torch.dtype, *, depth: int, rows: int = 64) -> Case:
    """`differ`: rows that are not the exact norm's; `bits`: rows that have others in other company."""
    torch.manual_seed(depth)
    x, residual = torch.randn(2, rows, depth).to(device, dtype)
    weight = torch.randn(depth).to(device, dtype)
    out, total = kernels.add_and_normalize(x, residual, weight, 1e-6)
    exact = x.double() + residual.double()
    found = [(total, exact), (out, exact * (exact.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double())]
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    wrong = [(got.double() - right).abs() > bound * right.abs().clamp(1.0) for got, right in found]
    bits = 0
    for count in (1, 5, rows // 2):
        pieces = kernels.add_and_normalize(x[-count:].clone(), residual[-count:].clone(), weight, 1e-6)
        bits += sum(
            int((piece != whole[-count:]).any(1).sum()) for piece, whole in zip(pieces, (out, total), strict=True)
        )
    return {"rows": rows, "differ": int((wrong[0] | wrong[1]).any(1).sum()), "bits": bits}


def main(device: str) -> None:
    if device == "cpu":
        torchvision_ops.install()
    import sglang.kernels.ops.moe.fused_moe_triton_kernels as experts

    experts.is_batch_invariant_mode_enabled = lambda: True  # as in engines: it fixes the order of a product's sides
    if device == "cuda":
        found = {"sampling": sampling(device, rows=256, vocab=151_936)}
        for depth, columns in ((2048, 5120), (4096, 2048), (768, 2048), (2048, 128)):
            found[f"products of {depth} by {columns}"] = products_of(
                device, torch.bfloat16, depth=depth, columns=columns
            )
        for depth in (1024, 2048, 5120):
            found[f"norms of {depth}"] = norms(device, torch.bfloat16, depth=depth)
        lengths = (1, 63, 64, 65, 255, 256, 257, 1000, 8191)
        for group in (1, 2, 4, 8):
            for dtype in (torch.bfloat16, torch.float32):
                name = f"tiles of {group} heads, {dtype}".replace("torch.", "")
                found[name] = tiles(device, dtype, group=group, dim=128, lengths=lengths)
    else:
        found = {"sampling": sampling(device, rows=4, vocab=3000)}
        found["products of 256 by 64"] = products_of(device, torch.float32, depth=256, columns=64)
        found["norms of 100"] = norms(device, torch.float32, depth=100)
        found["tiles of 2 heads, float32"] = tiles(device, torch.float32, group=2, dim=16, lengths=(1, 257))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
