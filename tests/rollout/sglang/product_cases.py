"""Script for Triton's interpreter: SGLang's products in tiles of several sizes, and its norms in one kernel. Prints
JSON."""

from __future__ import annotations

import json
from typing import Any

import torch

from specactor.cpu import torchvision_ops

torchvision_ops.install()

from specactor.rollout.sglang import kernels, products  # noqa: E402
from specactor.rollout.sglang.products import tile  # noqa: E402


def norms() -> dict[str, Any]:
    """SGLang's norm of a sum beside ours; a wrong version, whose rows feel their neighbours."""
    import sglang.srt.batch_invariant_ops as modes
    from sglang.srt.layers.layernorm import RMSNorm

    asked = list[str]()

    def original(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None, *_: Any, **__: Any) -> Any:
        asked.append(str(x.dtype))
        return norm.forward_native(x, residual)

    norm = RMSNorm(96)
    norm.weight.data = torch.randn(96).bfloat16()
    x, residual = torch.randn(2, 5, 96).bfloat16()
    modes.is_batch_invariant_mode_enabled = lambda: True
    far, alone, right = [], list[bool](), kernels.add_and_normalize
    for norm.cast_x_before_out_mul in (False, True):
        ours, native = products._norm(original, norm, x, residual), norm.forward_native(x, residual)
        pairs = [(got.float(), wanted.float()) for got, wanted in zip(ours, native, strict=True)]
        # the interpreter cuts numbers off where a device rounds them
        far += [float(((got - wanted).abs() / wanted.abs()).max()) for got, wanted in pairs]
    for version in (right, lambda x, residual, *rest, **named: right(x + x.mean(0), residual, *rest, **named)):
        kernels.add_and_normalize = version
        ours, one = (products._norm(original, norm, x[rows], residual[rows]) for rows in (slice(5), slice(3, 4)))
        alone.append(all(torch.equal(whole[3:4], row) for whole, row in zip(ours, one, strict=True)))
    ours = len(asked)
    products._norm(original, norm, x)
    products._norm(original, norm, x.float(), residual.float())
    products._norm(original, norm, x, residual, None, "a product that is quantized")
    products._norm(original, norm, x, residual, post_residual_addition=x)
    modes.is_batch_invariant_mode_enabled = lambda: False
    products._norm(original, norm, x, residual)
    return {"far": max(far), "alone": alone, "asked": [ours, len(asked)]}


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
    found = {"errors": errors, "alone": alone, "agree": [shipped, of_one_depth, agree()], "norms": norms()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
