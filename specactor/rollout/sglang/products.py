"""SGLang's products that give a row the same bits in any batch: on GPUs their tiles follow the number of rows.

SGLang has one size of tile for one row and for thousands. Where a row's sum runs over the same numbers in the same
order whatever the tile, as on the tensor cores of an H200 (docs/results/gpu.md), the size is free. `agree` looks before
any other size is used; where bits differ, SGLang's own stays.

In the same mode SGLang adds a layer's output and normalizes the sum in eleven kernels, a thousand of the 1,900 of a
pass of 48 layers. Here it is one, by which a row has the same bits in any batch as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

ROWS, DEPTH, COLUMNS = 64, 1024, 256  # of the trial
LONGEST_NORM = 16_384  # numbers of a row, which one program holds


Tile = dict[str, int]  # in SGLang's words


def tile(rows: int, columns: int, depth: int, *, warps: int = 4, stages: int = 4) -> Tile:
    sizes = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": depth}
    return {**sizes, "GROUP_SIZE_M": 8, "num_warps": warps, "num_stages": stages}


# Of eleven and sixteen sizes those that were fast at all shapes of Qwen3-30B-A3B on an H200; by the most rows.
PRODUCTS = {16: tile(16, 64, 128), 64: tile(64, 64, 128), 512: tile(64, 128, 64)}
FEW, MANY = PRODUCTS[16], PRODUCTS[512]
OF_SGLANG = tile(128, 128, 64, warps=8, stages=3)
SGLANGS = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
"""SGLang's own for experts: with the number of warps and stages that Triton takes by default."""


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not torch.cuda.is_available():
        return
    for target, hook in {
        "sglang.srt.batch_invariant_ops.batch_invariant_ops._matmul_persistent_triton": _product,
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config.get_default_config": _of_experts,
        # On Blackwell it multiplies up to 16 rows by another kernel than more: a verification would have other bits.
        "sglang.srt.layers.dual_gemm.DualGemm._select_mode": _no_kernel_of_few_rows,
        "sglang.srt.layers.layernorm.RMSNorm.forward_cuda": _norm,
    }.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _no_kernel_of_few_rows(original: Callable[..., Any], *args: Any) -> None:
    """Return the mode in which SGLang's fused product of a dense layer is never taken."""


def _product(
    original: Callable[..., Tensor], a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    chosen = next((own for most, own in PRODUCTS.items() if len(a) <= most), None)
    if chosen is None or a.dtype != torch.bfloat16 or not _may_choose():
        return original(a, b, out_dtype, bias)
    return multiply(chosen, a, b, out_dtype, bias)


def _norm(
    original: Callable[..., Any], norm: Any, x: Tensor, residual: Tensor | None = None, *more: Any, **named: Any
) -> Any:
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    if (
        residual is None
        or not is_batch_invariant_mode_enabled()
        or not x.dtype == residual.dtype == torch.bfloat16
        or x.dim() != 2
        or x.shape != residual.shape
        or not x.numel()
        or not x.shape[1] == norm.hidden_size <= LONGEST_NORM
        or any(of is not None for of in (*more, *named.values(), norm.variance_size_override, norm.override_orig_dtype))
        or norm.fp32_residual
    ):
        return original(norm, x, residual, *more, **named)
    from specactor.rollout.sglang import kernels

    parts = x.contiguous(), residual.contiguous(), norm.weight
    return kernels.add_and_normalize(*parts, norm.variance_epsilon, rounds=norm.cast_x_before_out_mul)


def multiply(sizes: Tile, a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return the product [M, N] by SGLang's kernel."""
    from sglang.srt.batch_invariant_ops.batch_invariant_ops import matmul_kernel_persistent
    from sglang.srt.utils.common import get_device_core_count

    (rows, depth), columns = a.shape, b.shape[1]
    out = torch.empty(rows, columns, device=a.device, dtype=out_dtype)
    tiles = -(-rows // sizes["BLOCK_SIZE_M"]) * -(-columns // sizes["BLOCK_SIZE_N"])
    processors = get_device_core_count(a.device.index or 0) or 1
    matmul_kernel_persistent[(min(processors, tiles),)](
        *(a, b, out, bias, rows, columns, depth, *a.stride(), *b.stride(), *out.stride()),
        NUM_SMS=processors,
        **{f"{name}_LARGE": of.numel() > 2**31 for name, of in (("A", a), ("B", b), ("C", out))},
        HAS_BIAS=bias is not None,
        **sizes,
    )
    return out


def _of_experts(original: Callable[..., Tile], *args: Any) -> Tile:
    own = original(*args)
    rows, experts, _, _, per_row, dtype, *_ = args
    # SGLang names no type for 16 bits, and has the one size in its batch-invariant mode alone
    if dtype is not None or own != SGLANGS or not _may_choose():
        return own
    is_few = rows * per_row <= 4 * experts  # an expert has four rows on average, or fewer
    return dict(FEW if is_few else MANY)


def multiply_experts(sizes: Tile, a: Tensor, b: Tensor) -> Tensor:
    """Return the product [M, N] by SGLang's kernel of experts; there is one, and `a` [M, K] is of whole tiles."""
    import triton.language as tl
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel

    out = torch.empty(len(a), 1, b.shape[1], device=a.device, dtype=a.dtype)
    numbers = torch.arange(len(a), device=a.device, dtype=torch.int32)
    zeros, weights = torch.zeros_like(numbers), torch.ones(len(a), 1, device=a.device)
    invoke_fused_moe_kernel(
        *(a, b.T.contiguous()[None], None, out, None, None, None, weights, zeros[:, None], numbers, zeros),
        *(zeros[:1] + len(a), False, 1, sizes),
        compute_type=tl.bfloat16 if a.dtype == torch.bfloat16 else tl.float32,
        **dict.fromkeys(("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16"), False),
        per_channel_quant=False,
    )
    return out[:, 0]


def _may_choose() -> bool:
    if is_current_stream_capturing() and not agree.cache_info().currsize:
        return False
    return agree()


@cache
def agree(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether tiles of all sizes give the same bits there."""
    random = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, generator=random, device=device).to(dtype) for size in ((ROWS, DEPTH), (DEPTH, COLUMNS)))
    try:
        dense = [multiply(sizes, a, b, dtype) for sizes in (OF_SGLANG, *PRODUCTS.values())]
        experts = [multiply_experts(sizes, a, b) for sizes in (SGLANGS, FEW, MANY)]
    except Exception as error:  # a GPU with less memory per processor, or another Triton: its errors are many
        logging.getLogger(__name__).warning("Products keep SGLang's tiles: %r", error)
        return False
    return all(torch.equal(of[0], other) for of in (dense, experts) for other in of[1:])
