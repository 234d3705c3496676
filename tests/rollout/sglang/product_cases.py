"""Script for Triton's interpreter: SGLang's products in tiles of several sizes. Prints JSON."""

from __future__ import annotations

import json

import torch

from specactor.cpu import torchvision_ops

torchvision_ops.install()

from specactor.rollout.sglang import products  # noqa: E402
from specactor.rollout.sglang.products import tile  # noqa: E402


def main() -> None:
    import sglang.kernels.ops.moe.fused_moe_triton_kernels as experts

    experts.is_batch_invariant_mode_enabled = lambda: True  # as in engines: it fixes the order of sides
    torch.manual_seed(0)
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    exact = a.double() @ b.double()
    errors, alone = [], []
    for sizes in (products.OF_SGLANG, *products.PRODUCTS.values()):
        every = products.multiply(sizes, a, b, torch.float32)
        errors.append(float((every - exact).abs().max()))
        alone.append(torch.equal(products.multiply(sizes, a[5:6], b, torch.float32), every[5:6]))
    for config in (products.SGLANGS, products.FEW, products.MANY):
        errors.append(float((products.multiply_experts(config, a, b) - exact).abs().max()))

    def agree() -> bool:
        products.agree.cache_clear()
        return products.agree("cpu", torch.float32)

    products.DEPTH, products.COLUMNS = 256, 64
    # the interpreter adds what a tile is deep at once: it is a device on which sizes differ
    shipped = agree()
    products.PRODUCTS = {64: tile(16, 64, 64)}
    products.FEW, products.MANY = tile(16, 64, 32), tile(64, 64, 32)
    of_one_depth = agree()
    products.PRODUCTS = {64: tile(16, 64, 128)}
    print(json.dumps({"errors": errors, "alone": alone, "agree": [shipped, of_one_depth, agree()]}))


if __name__ == "__main__":
    main()
